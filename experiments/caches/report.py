"""Approximate caches and confidence samplers of MDLM, beside the exact cache of Eso-LM."""

from __future__ import annotations

import math
from typing import Any

from experiments.frontier import plots
from experiments.frontier import report as frontier
from experiments.runner.document import Results, number, table

STEPS = ("32", "128")
CACHES = {
    "prefix": "Fast-dLLM's prefix cache",
    "dual": "Fast-dLLM's dual cache",
    "delayed": "dKV-Cache-Decode",
    "frozen": "FreeCache",
    "frozen, last_pass": "FreeCache, the authors' behaviour",
}
SURE = "esolm, confidence"
NAMES = {**{cache: f"MDLM, {title} (`{cache}`)" for cache, title in CACHES.items()}, SURE: "Eso-LM, exact cache"}
"""The rows of the table, by their names in `esolm bench caches`."""
METHOD = """MDLM and Eso-LM of the second round on stories. MDLM's confidence sampler works in blocks of 32 tokens, Eso-LM's in a window of 32.
Each row is compared with MDLM's confidence sampler without a cache, which feeds all 128 positions in each pass. Times, judge and
entropy are those of [the table above](#second-round-quality-against-time)."""
TABLE = """*Positions fed*, *equal tokens* and *KL* are from `esolm bench caches`, over {texts} texts at batch 1 with a nucleus of {top_p}: each text has its own
seed, and the same random numbers with the cache and without. Equal tokens are the share of positions with the token of the sampler
without a cache, KL is the divergence in nats of the candidates' distributions from those of a full pass over the same tokens,
± standard errors over texts (KL: {seeds} texts). Eso-LM is another model, so its tokens are not compared:"""
FIGURE = "![Judge and milliseconds per sample with approximate and exact caches; hollow marks are degenerate](results/caches.svg)"


def points(results: Results) -> list[dict[str, Any]]:
    """Return the timed settings of MDLM and Eso-LM in `frontier`."""
    return [p for p in frontier.points(results) if p["system"] in ("MDLM", "Eso-LM 1") and p["seconds"]]


def measured(results: Results) -> dict[str, Any]:
    """The results of `esolm bench caches` by T."""
    return {steps: results[f"agreement-{steps}"] for steps in STEPS if f"agreement-{steps}" in results}


def report(results: Results) -> str:
    """Return the figure, and a table with a row for each cache."""
    parts = ["## Approximate caches and confidence samplers (not in the paper)", METHOD]
    if points(results):
        parts.append(FIGURE)
    return "\n\n".join([*parts, *caches(results)])


def caches(results: Results) -> list[str]:
    """Return the table of speed, agreement and quality."""
    made = measured(results)
    by_name = {p["name"]: p for p in frontier.points(results)}
    rows = []
    for steps in STEPS:
        for cache, title in NAMES.items():
            about = made.get(steps, {}).get("caches", {}).get(cache, {})
            name = f"esolm-confidence-{steps}" if cache == SURE else f"mdlm-{cache}-{steps}"
            cells = [*agreement(about), *against(by_name.get(f"mdlm-confidence-{steps}"), by_name.get(name))]
            if about or any(cell != "–" for cell in cells):
                rows.append([steps, title, *cells])
    if not rows:
        return []
    columns = (
        "T", "cache", "positions fed", "equal tokens, %", "KL", "× faster, batch 1", "× faster, batch 16", "judge", "entropy",
    )  # fmt: skip
    options = next((found["options"] for found in made.values()), None)
    head = (
        ""
        if options is None
        else TABLE.format(
            texts=options["batch"] * (options["rounds"] + 1),
            top_p=options["top_p"],
            seeds=options["batch"] * options["seeds"],
        )
    )
    return [text for text in (head, table(columns, rows, text=2)) if text]


def agreement(about: dict[str, Any]) -> list[str]:
    """Return the cells of `esolm bench caches`."""
    same, error = about.get("same_tokens"), about.get("same_tokens_stderr")
    return [
        number(about.get("fed_per_pass"), None, 1),
        number(None if same is None else 100 * same, None if error is None else 100 * error, 1),
        number(about.get("kl"), about.get("kl_stderr"), 5),
    ]


def against(plain: dict[str, Any] | None, mine: dict[str, Any] | None) -> list[str]:
    """Return the cells of speed and quality against the sampler without a cache."""
    if plain is None or mine is None:
        return ["–"] * 4
    faster = [number(plain[key] / mine[key] if plain[key] and mine[key] else None) for key in ("alone", "seconds")]
    error = math.hypot(mine["stderr"], plain["stderr"])
    return [*faster, f"{mine['nats'] - plain['nats']:+.2f} ± {error:.2f}", f"{mine['entropy'] - plain['entropy']:+.2f}"]


def conclusions(results: Results) -> list[str]:
    """Return what we conclude about the caches."""
    by_name = {p["name"]: p for p in points(results)}
    pairs = [
        (by_name[f"mdlm-confidence-{steps}"], by_name[name])
        for steps in STEPS
        for cache in CACHES
        if (name := f"mdlm-{cache}-{steps}") in by_name and f"mdlm-confidence-{steps}" in by_name
    ]
    if not pairs:
        return []
    ranges = []
    for key, batch in (("alone", 1), ("seconds", 16)):
        gains = [plain[key] / mine[key] for plain, mine in pairs if plain[key] and mine[key]]
        ranges += [f"{min(gains):.1f} to {max(gains):.1f} times as fast as no cache at batch {batch}"] if gains else []
    apart = [(mine["nats"] - plain["nats"]) / math.hypot(mine["stderr"], plain["stderr"]) for plain, mine in pairs]
    known = f"The judge's difference is at most {max(map(abs, apart)):.1f} standard errors."
    return [f"MDLM's approximate caches are {' and '.join(ranges)}. {known}"]


def figures(results: Results) -> dict[str, Any]:
    """Plot quality against time."""
    from matplotlib import pyplot as plt

    if not (found := points(results)):
        return {}
    figure, axes = plt.subplots(figsize=(8, 5))
    mdlm, eso = "MDLM, confidence", "Eso-LM, confidence"
    lines = {
        "MDLM, ancestral": ("#c1440e", "s", "-", {n: f"mdlm-{n}" for n in (8, 32, 128)}),
        f"{mdlm}, no cache": ("#c1440e", "s", "--", {n: f"mdlm-confidence-{n}" for n in STEPS}),
        "Eso-LM, ancestral": ("#2a7f62", "o", "-", {n: f"esolm-{n}" for n in (8, 32, 128)}),
        f"{eso}, exact cache": ("#2a7f62", "o", "--", {n: f"esolm-confidence-{n}" for n in STEPS}),
    }
    colours = ("#4a6fa5", "#8f6bb1", "#b08d2e", "#777777")
    marks = ("^", "v", "P", "X")
    lines |= {
        f"{mdlm}, {cache}": (colour, mark, "--", {n: f"mdlm-{cache}-{n}" for n in STEPS})
        for cache, colour, mark in zip(CACHES, colours, marks, strict=False)
    }
    by_name = {p["name"]: p for p in found}
    for title, (colour, mark, dashes, names) in lines.items():
        mine = {n: by_name[name] for n, name in names.items() if name in by_name}
        if not mine:
            continue
        x, _ = plots.spans(mine.values())
        axes.plot(x, [p["nats"] for p in mine.values()], dashes, color=colour, lw=1)
        plots.scatter(axes, list(mine.values()), colour, mark)
        axes.plot([], [], f"{mark}{dashes}", color=colour, label=title, ms=5)
        if title.removeprefix(f"{mdlm}, ") not in CACHES:
            for n, p in mine.items():
                plots.label(axes, p, f"T = {n}", colour)
    plots.time_axis(axes, "milliseconds per sample, batch 16 (quartiles)")
    axes.plot([], [], "o", color="#999999", mfc="white", label="degenerate: low entropy (†)")
    plots.legend(axes)
    return {"caches": figure}
