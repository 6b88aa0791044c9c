"""The bundled model: likelihood and samples."""

from __future__ import annotations

from experiments.runner.document import Results, number, table

MODES = {
    "diffusion": "diffusion only, T = 32 (`--alpha_0 1 --num_steps 32`)",
    "hybrid": "as trained, T = 32 (`--num_steps 32`)",
    "left_to_right": "left to right (`--sampler left_to_right`)",
}


def report(results: Results) -> str:
    """Return likelihood, judged samples and texts."""
    parts = ["## The bundled model", METHOD]
    if (found := results.get("exact")) is not None:
        nats = number(found[0]["curve"][-1]["jackknife"], found[0]["stderr"], 3)
        parts.append(
            f"Likelihood on the validation split, estimated by the jackknife of 32 orders on 64 sequences: {nats} nats per token."
        )
    judged = {title: results.get(f"judge-{mode}") for mode, title in MODES.items()}
    rows = [[t, number(f["nats"], f["stderr"]), number(f["entropy"])] for t, f in judged.items() if f is not None]
    if rows:
        parts.append(table(("sampled", "judge, nats", "entropy"), rows))
    for mode, title in MODES.items():
        if (made := results.get(f"text-{mode}")) is not None:
            parts.append(f"The first samples of seed 0, not selected, {title}, top-p 0.9:")
            parts += map(quote, made["texts"])
    if (made := results.get("infill")) is not None:
        parts.append(f"`{made['request']['text']}`, filled in three times (seed 0, four tokens per blank):")
        parts += map(quote, made["texts"])
    return "\n\n".join(parts)


METHOD = """`esolm sample books`, `esolm infill books "…"` and `esolm.load("books")` use the model that the package
contains. It has three blocks of width 256 with 8 heads, was trained on the same books with the any-order loss at
alpha_0 = 0.25, longer than the models above, and is stored in bfloat16."""


def quote(text: str) -> str:
    """Format a text as one paragraph of quoted Markdown."""
    return "> " + " ".join(text.split()).replace("*", "\\*").replace("_", "\\_")
