"""Block, ancestral and speculative sampling from one model."""

from __future__ import annotations

from experiments.runner.document import Results, number, table

ROWS = {
    "block-16": ("block, 16 tokens per step", "8"),
    "ancestral-8": ("ancestral, T = 8 (16 tokens per step)", "8"),
    "block-4": ("block, 4 tokens per step", "32"),
    "ancestral-32": ("ancestral, T = 32 (4 tokens per step)", "32"),
    "ancestral-128": ("ancestral, T = 128", "128"),
    "first_hitting": ("one token at a time", "128"),
    "speculative": ("speculative, lossless", "adaptive"),
}


def report(results: Results) -> str:
    """Return the judged quality of each sampler."""
    rows = []
    for name, (title, steps) in ROWS.items():
        if (found := results.get(f"judge-{name}")) is not None:
            rows.append([title, steps, number(found["nats"], found["stderr"]), number(found["entropy"])])
    method = "Eso-LM at alpha_0 = 1, 256 samples each, top-p 0.9; the table above has the times of ancestral sampling."
    parts = ["## Samplers", method, table(("sampler", "steps", "judge, nats", "entropy"), rows), verdict(results)]
    return "\n\n".join(parts)


def verdict(results: Results) -> str:
    """Summarise whether the speculative sampler is lossless and how block compares with ancestral."""
    lines = []
    both = [results.get(f"judge-{name}") for name in ("first_hitting", "speculative")]
    if all(both):
        one, many = both
        gap, error = many["nats"] - one["nats"], (many["stderr"] ** 2 + one["stderr"] ** 2) ** 0.5
        lines.append(
            f"Speculative sampling differs from one token at a time by {gap:+.3f} ± {error:.3f} nats; in theory the difference is zero."
        )
    for block, steps in (("4", "32"), ("16", "8")):
        pair = [results.get(f"judge-{name}") for name in (f"block-{block}", f"ancestral-{steps}")]
        if all(pair):
            gap, error = pair[0]["nats"] - pair[1]["nats"], (pair[0]["stderr"] ** 2 + pair[1]["stderr"] ** 2) ** 0.5
            lines.append(
                f"At {block} tokens per step the block sampler differs from ancestral by {gap:+.3f} ± {error:.3f} nats."
            )
    return " ".join(lines)


def findings(results: Results) -> list[list[str]]:
    """Return the row for the block sampler against the ancestral one at few steps."""
    pair = [results.get(f"judge-{name}") for name in ("block-16", "ancestral-8")]
    if not all(pair):
        return []
    gap, error = pair[0]["nats"] - pair[1]["nats"], (pair[0]["stderr"] ** 2 + pair[1]["stderr"] ** 2) ** 0.5
    held = "confirmed" if gap < -2 * error else "not confirmed"
    claim = "The block sampler is better than the ancestral one at few steps (8 steps, judge's nats)"
    return [[claim, "better generative perplexity and MAUVE", f"{gap:+.2f} ± {error:.2f}", held]]
