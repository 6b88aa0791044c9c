"""Approximate caches and confidence samplers of MDLM, beside the exact cache of Eso-LM."""

from __future__ import annotations

import math
from typing import Any

from experiments.frontier import report as frontier
from experiments.runner.document import Results, number, table

STEPS = ("32", "128")
CACHES = {
    "prefix": "Fast-dLLM's prefix cache",
    "dual": "Fast-dLLM's dual cache",
    "delayed": "dKV-Cache-Decode",
    "frozen": "FreeCache",
}


def points(results: Results) -> list[dict[str, Any]]:
    """Return the settings of MDLM and Eso-LM in `frontier`, by their names there."""
    return [p for p in frontier.points(results) if p["system"] in ("MDLM", "Eso-LM 1") and p["seconds"]]


def report(results: Results) -> str:
    """Return the agreement of the caches, and a verdict on each."""
    found = points(results)
    parts = ["## Approximate caches and confidence samplers (not in the paper)", METHOD]
    if found:
        parts += [FIGURE]
    return "\n\n".join([*parts, *agreement(results), *verdicts(results, found)])


def agreement(results: Results) -> list[str]:
    """Return the table of `esolm bench caches`."""
    rows = []
    for steps in STEPS:
        if (made := results.get(f"agreement-{steps}")) is not None:
            for name, found in made["caches"].items():
                kl, same = found.get("kl"), found.get("same_tokens")
                fed, faster = number(found["fed_per_pass"], None, 1), number(found["faster"], None, 2)
                equal = number(None if same is None else 100 * same, None, 1)
                rows.append([steps, name, fed, faster, equal, number(kl, None, 4)])
    columns = ("T", "cache", "positions fed per pass", "times as fast", "equal tokens, %", "KL, nats")
    return [AGREEMENT, table(columns, rows, text=2)] if rows else []


def verdicts(results: Results, found: list[dict[str, Any]]) -> list[str]:
    """Return one sentence for each cache: speed, agreement, quality, and the exact cache in the same time."""
    by_name = {p["name"]: p for p in found}
    ours = [p for p in found if p["system"] == "Eso-LM 1"]
    lines = []
    for cache, title in CACHES.items():
        parts = []
        for steps in STEPS:
            plain, mine = by_name.get(f"mdlm-confidence-{steps}"), by_name.get(f"mdlm-{cache}-{steps}")
            made = results.get(f"agreement-{steps}")
            if plain is None or mine is None or made is None:
                continue
            gap, error = mine["nats"] - plain["nats"], math.hypot(mine["stderr"], plain["stderr"])
            same = made["caches"][cache]["same_tokens"]
            text = (
                f"at T = {steps} {plain['seconds'] / mine['seconds']:.2f} times as fast in a batch and"
                f" {made['caches'][cache]['faster']:.2f} times alone, {100 * same:.0f} % equal tokens,"
                f" {gap:+.2f} ± {error:.2f} nats to the judge"
            )
            if fast := [p for p in ours if p["seconds"] <= mine["seconds"]]:
                best = min(fast, key=lambda p: p["nats"])
                text += (
                    f" (the best of Eso-LM in no more time: {best['sampler']},"
                    f" {best['nats'] - mine['nats']:+.2f} nats and {best['entropy'] - mine['entropy']:+.2f} entropy)"
                )
            parts.append(text)
        if parts:
            lines.append(f"- **{title}** (`--cache {cache}`): {'; '.join(parts)}.")
    return ["\n".join(lines)] if lines else []


METHOD = """MDLM and Eso-LM of the second round on stories; the table above has the quality and the time of every setting. MDLM's confidence
sampler works in blocks of 32 tokens, Eso-LM's in a window of 32. Times are those of batches of 16, all settings in turn in one run."""
AGREEMENT = """Agreement with the same sampler without a cache, greedy, batch 1 (`esolm bench caches`): positions fed per pass of 128, equal
tokens, and the KL divergence of the candidates' distributions from those of a full pass. The last rows are Eso-LM, whose cache is
exact; its samples are those of another model and are not compared:"""
FIGURE = "![Judged nats against milliseconds per sample with approximate and exact caches](results/caches.svg)"


def figures(results: Results) -> dict[str, Any]:
    """Plot quality against time."""
    from matplotlib import pyplot as plt

    if not (found := points(results)):
        return {}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    mdlm, eso = "MDLM, confidence", "Eso-LM, confidence"
    lines = {
        "MDLM, ancestral": ("#c1440e", "s-", [f"mdlm-{n}" for n in (8, 32, 128)]),
        f"{mdlm}, no cache": ("#c1440e", "s--", [f"mdlm-confidence-{n}" for n in STEPS]),
        "Eso-LM, ancestral": ("#2a7f62", "o-", [f"esolm-{n}" for n in (8, 32, 128)]),
        f"{eso}, exact cache": ("#2a7f62", "o--", [f"esolm-confidence-{n}" for n in STEPS]),
    }
    colours = ("#4a6fa5", "#8f6bb1", "#b08d2e", "#777777")
    lines |= {
        f"{mdlm}, {cache}": (colour, "^--", [f"mdlm-{cache}-{n}" for n in STEPS])
        for cache, colour in zip(CACHES, colours, strict=True)
    }
    for label, (colour, style, names) in lines.items():
        mine = [p for p in found if p["name"] in names]
        x, y = [1000 * p["seconds"] for p in mine], [p["nats"] for p in mine]
        axes.plot(x, y, style, color=colour, label=label, ms=5)
    axes.set(xscale="log", xlabel="milliseconds per sample, batch 16", ylabel="judge, nats per token (lower is better)")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return {"caches": figure}
