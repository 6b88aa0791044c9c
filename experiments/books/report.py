"""The model that comes with the package: what it knows, and what it writes."""

from __future__ import annotations

from experiments.runner.document import Results, number, table

MODES = {
    "diffusion": "diffusion alone, T = 32 (`--alpha_0 1 --num_steps 32`)",
    "hybrid": "as trained, T = 32 (`--num_steps 32`)",
    "left_to_right": "left to right (`--sampler left_to_right`)",
}


def report(results: Results) -> str:
    """Likelihood, judged samples, and texts."""
    parts = ["## The model that comes with the package", METHOD]
    if (found := results.get("exact")) is not None:
        nats = number(found[0]["curve"][-1]["jackknife"], found[0]["stderr"], 3)
        parts.append(f"Exact likelihood on the valid split, by the jackknife over 32 orders: {nats} nats per token.")
    judged = {title: results.get(f"judge-{mode}") for mode, title in MODES.items()}
    rows = [[t, number(f["nats"], f["stderr"]), number(f["entropy"])] for t, f in judged.items() if f is not None]
    if rows:
        parts.append(table(("sampled", "judge, nats", "entropy"), rows))
    for mode, title in MODES.items():
        if (made := results.get(f"text-{mode}")) is not None:
            parts.append(f"The first samples of seed 0, {title}, nucleus 0.9, whatever they are:")
            parts += map(quote, made["texts"])
    if (made := results.get("infill")) is not None:
        parts.append(f"`{made['request']['text']}`, filled in three times (seed 0, four tokens a blank):")
        parts += map(quote, made["texts"])
    return "\n\n".join(parts)


METHOD = """`esolm sample books`, `esolm infill books "…"` and `esolm.load("books")` need no training and no download. The model
(three blocks of width 256, 8 heads) was trained on the same books by the any-order loss at alpha_0 = 0.25, longer than those
above, and is stored in bfloat16."""


def quote(text: str) -> str:
    """A text as a quotation in Markdown, in one paragraph."""
    return "> " + " ".join(text.split()).replace("*", "\\*").replace("_", "\\_")
