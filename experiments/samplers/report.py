"""Block, ancestral and speculative sampling of one model."""

from __future__ import annotations

from esolm.reproduce.document import Results, number, table

ROWS = {
    "block-16": ("block, 16 tokens a step", "8"),
    "ancestral-8": ("ancestral, T = 8 (16 tokens a step)", "8"),
    "block-4": ("block, 4 tokens a step", "32"),
    "ancestral-32": ("ancestral, T = 32 (4 tokens a step)", "32"),
    "ancestral-128": ("ancestral, T = 128", "128"),
    "first_hitting": ("one token at a time", "128"),
    "speculative": ("speculative, lossless", "adaptive"),
}


def report(results: Results) -> str:
    """Judged quality of each."""
    rows = []
    for name, (title, steps) in ROWS.items():
        if (found := results.get(f"judge-{name}")) is not None:
            rows.append([title, steps, number(found["nats"], found["stderr"]), number(found["entropy"])])
    method = "Eso-LM at alpha_0 = 1, 256 samples each, nucleus 0.9; their cost is in the table above."
    parts = ["## Samplers", method, table(("sampler", "steps", "judge, nats", "entropy"), rows), verdict(results)]
    return "\n\n".join(parts)


def verdict(results: Results) -> str:
    """Is the speculative sampler lossless, and is block worse than ancestral?"""
    told = []
    both = [results.get(f"judge-{name}") for name in ("first_hitting", "speculative")]
    if all(both):
        one, many = both
        gap, error = many["nats"] - one["nats"], (many["stderr"] ** 2 + one["stderr"] ** 2) ** 0.5
        told.append(
            f"Speculative sampling differs from one token at a time by {gap:+.3f} ± {error:.3f} nats, as it must."
        )
    for block, steps in (("4", "32"), ("16", "8")):
        pair = [results.get(f"judge-{name}") for name in (f"block-{block}", f"ancestral-{steps}")]
        if all(pair):
            gap, error = pair[0]["nats"] - pair[1]["nats"], (pair[0]["stderr"] ** 2 + pair[1]["stderr"] ** 2) ** 0.5
            told.append(
                f"At {block} tokens a step the block sampler is {gap:+.3f} ± {error:.3f} nats against ancestral."
            )
    return " ".join(told)
