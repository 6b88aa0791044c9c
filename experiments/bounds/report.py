"""Importance-weighted bounds by number of orders K, with the jackknife and antithetic orders."""

from __future__ import annotations

import itertools
from typing import Any

from experiments.runner.document import Results, number, table

ALPHAS = ("1", "0.5", "0.25", "0.125")
PAPER = {
    "1": "37.53 → 31.65",
    "0.5": "33.55 → 28.07",
    "0.25": "29.64 → 24.80",
    "0.125": "26.94 → 23.02",
}


def report(results: Results) -> str:
    """Return tables with one row per model and one column per K."""
    cases = {f"alpha_0 = {alpha}": results.get(f"iw-{alpha}") for alpha in ALPHAS} | {"MDLM": results.get("iw-mdlm")}
    found = {name: curve(case) for name, case in cases.items() if case is not None}
    counts = sorted({point["num_orders"] for points in found.values() for point in points})
    rows = []
    for name, points in found.items():
        by_count = {point["num_orders"]: point for point in points}
        cells = [number(by_count[k]["bound"], None, 3) if k in by_count else "" for k in counts]
        last = points[-1]
        rows.append([name, *cells, number(last["jackknife"], None, 3), PAPER.get(name.split()[-1], "31.19 → 26.82")])
    columns = ("model", *(f"K = {k}" for k in counts), "jackknife, largest K", "paper, perplexity, K = 1 → largest")
    pairs = [
        [
            f"alpha_0 = {alpha}",
            number(at(results[f"iw-{alpha}"], k), None, 3),
            number(at(results[f"antithetic-{alpha}"], k), None, 3),
            number(at(results[f"antithetic-{alpha}"], k, "jackknife"), None, 3),
        ]
        for alpha in ALPHAS
        if f"iw-{alpha}" in results and f"antithetic-{alpha}" in results
        for k in [10]
    ]
    parts = ["## Importance-weighted bounds", METHOD, FIGURE, table(columns, rows)]
    if pairs:
        parts.append(table(("K = 10", "plain", "antithetic pairs", "jackknife of the pairs"), pairs))
    return "\n\n".join([*parts, verdict(found)])


METHOD = """The bound with K orders in nats per token, on the first 32 sequences of the validation split. An order costs 128 passes
for MDLM and one pass for Eso-LM."""

FIGURE = "![The bound falls with the number of orders](results/bounds.svg)"


def curve(case: Any) -> list[dict[str, Any]]:
    """Return the points of a result."""
    return list(case[0]["curve"])


def at(case: Any, count: int, what: str = "bound") -> float | None:
    """Return the value at one K."""
    return next((point[what] for point in curve(case) if point["num_orders"] == count), None)


def verdict(found: dict[str, list[dict[str, Any]]]) -> str:
    """Summarise how much the bound falls with K."""
    gains = {name: points[0]["bound"] - points[-1]["bound"] for name, points in found.items()}
    falls = all(a["bound"] >= b["bound"] for points in found.values() for a, b in itertools.pairwise(points))
    text = "The bound falls with K in every row" if falls else "The bound does not fall with K everywhere"
    falling = ", ".join(f"{gain:.3f} ({name})" for name, gain in gains.items())
    errors = [point["bound_stderr"] for points in found.values() for point in points]
    return (
        f"{text}, in total by {falling} nats. Each bound has a standard error of {min(errors):.2f} to {max(errors):.2f} over"
        " sequences, which are the same in all cells. In the paper the bounds fall by 0.15 to 0.18 nats on LM1B."
    )


def findings(results: Results) -> list[list[str]]:
    """Return a row for the table of findings."""
    found = [curve(results[f"iw-{name}"]) for name in (*ALPHAS, "mdlm") if f"iw-{name}" in results]
    if len(found) <= len(ALPHAS):
        return []
    falls = all(a["bound"] > b["bound"] for points in found for a, b in itertools.pairwise(points))
    gains = [points[0]["bound"] - points[-1]["bound"] for points in found]
    claim = "More orders tighten the bound, also for MDLM (most orders against one)"
    here = f"by {min(gains):.2f} to {max(gains):.2f} nats"
    return [[claim, "by 0.15 to 0.18 nats (LM1B)", here, "confirmed" if falls else "partly"]]


def figures(results: Results) -> dict[str, Any]:
    """Plot the bound and the jackknife against K."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.8))
    cases = {"MDLM": "iw-mdlm"} | {f"Eso-LM, alpha_0 = {alpha}": f"iw-{alpha}" for alpha in ALPHAS}
    for i, (label, name) in enumerate(cases.items()):
        if (case := results.get(name)) is None:
            continue
        points, colour = curve(case), f"C{i}"
        axes.plot(
            [p["num_orders"] for p in points],
            [p["bound"] for p in points],
            "o-",
            color=colour,
            label=label,
            markersize=3,
        )
        known = [p for p in points if p["jackknife"] is not None]
        axes.plot([p["num_orders"] for p in known], [p["jackknife"] for p in known], ":", color=colour)
    axes.set(xscale="log", xlabel="orders K (dotted: jackknife)", ylabel="nats per token")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return {"bounds": figure}
