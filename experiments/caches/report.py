"""Approximate caches and confidence samplers of MDLM, beside the exact cache of Eso-LM."""

from __future__ import annotations

import math
from typing import Any

from experiments.runner.document import Results, number, table

STEPS = ("32", "128")
CACHES = {
    "prefix": "Fast-dLLM's prefix cache",
    "dual": "Fast-dLLM's dual cache",
    "delayed": "dKV-Cache-Decode",
    "frozen": "FreeCache",
}
MDLM, ESO = "runs/mdlm", "runs/esolm-1"
BLOCKS = "block_length=32"


def points(results: Results) -> list[dict[str, Any]]:
    """Return every judged setting with its passes and seconds."""
    timed = {p["point"]: p for p in (results["time"]["points"] if "time" in results else [])}
    settings = [("MDLM, ancestral", f"mdlm-{n}", n, f"{MDLM} num_steps={n}") for n in ("8", *STEPS)]
    settings += [("Eso-LM, ancestral", f"esolm-1-1-{n}", n, f"{ESO} alpha_0=1 num_steps={n}") for n in ("8", *STEPS)]
    settings += [
        (
            f"MDLM, confidence, {title}",
            f"mdlm-{cache}-{n}",
            n,
            f"{MDLM} sampler=confidence num_steps={n} {BLOCKS}{more}",
        )
        for cache, title, more in [("none", "no cache", ""), *((c, c, f" cache={c}") for c in CACHES)]
        for n in STEPS
    ]
    settings += [
        ("Eso-LM, confidence, exact cache", f"esolm-confidence-{n}", n, f"{ESO} sampler=confidence num_steps={n} window=32")
        for n in STEPS
    ]  # fmt: skip
    found = []
    for title, name, steps, point in settings:
        if (judged := results.get(f"judge-{name}")) is not None and point in timed:
            cost = timed[point]
            found.append(
                {"title": title, "name": name, "T": steps, "passes": cost["passes"]}
                | {"seconds": cost["seconds_per_sample"], **judged}
            )
    return found


def report(results: Results) -> str:
    """Return all settings, the agreement of the caches, and a verdict on each."""
    found = points(results)
    rows = [
        [p["title"], p["T"], number(p["passes"], None, 0), number(1000 * p["seconds"], None, 1),
         number(p["nats"], p["stderr"]), number(p["entropy"])]
        for p in found
    ]  # fmt: skip
    columns = ("setting", "T", "passes", "ms per sample", "judge, nats", "entropy")
    parts = ["## Approximate caches and confidence samplers (not in the paper)", METHOD]
    if rows:
        parts += [FIGURE, table(columns, rows)]
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
    ours = [p for p in found if p["title"].startswith("Eso-LM")]
    lines = []
    for cache, title in CACHES.items():
        parts = []
        for steps in STEPS:
            plain, mine = by_name.get(f"mdlm-none-{steps}"), by_name.get(f"mdlm-{cache}-{steps}")
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
                    f" (the best of Eso-LM in no more time: {best['title'].removeprefix('Eso-LM, ')}, T = {best['T']},"
                    f" {best['nats'] - mine['nats']:+.2f} nats and {best['entropy'] - mine['entropy']:+.2f} entropy)"
                )
            parts.append(text)
        if parts:
            lines.append(f"- **{title}** (`--cache {cache}`): {'; '.join(parts)}.")
    return ["\n".join(lines)] if lines else []


METHOD = """256 samples of 128 tokens per setting, top-p 0.9, judged as above. MDLM's confidence sampler works in blocks of 32 tokens,
Eso-LM's in a window of 32. Times are those of batches of 16, all settings in turn in one run."""
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
    styles = {"MDLM, ancestral": ("#c1440e", "s-"), "Eso-LM, ancestral": ("#2a7f62", "o-")}
    styles |= {"MDLM, confidence, no cache": ("#c1440e", "s--"), "Eso-LM, confidence, exact cache": ("#2a7f62", "o--")}
    colours = ("#4a6fa5", "#8f6bb1", "#b08d2e", "#777777")
    styles |= {f"MDLM, confidence, {cache}": (colour, "^--") for cache, colour in zip(CACHES, colours, strict=True)}
    for title, (colour, style) in styles.items():
        mine = [p for p in found if p["title"] == title]
        axes.plot(
            [1000 * p["seconds"] for p in mine], [p["nats"] for p in mine], style, color=colour, label=title, ms=5
        )
    axes.set(xscale="log", xlabel="milliseconds per sample, batch 16", ylabel="judge, nats per token (lower is better)")
    axes.legend(fontsize=8, frameon=False)
    return {"caches": figure}
