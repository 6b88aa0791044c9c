"""Figures of quality and time; matplotlib is imported where they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Point = dict[str, Any]
STYLES = {
    "AR": ("#333333", "D"), "MDLM": ("#c1440e", "s"), "BD3-LM 4": ("#4a6fa5", "^"), "Eso-LM 1": ("#2a7f62", "o"),
    "Eso-LM 1, any-order loss": ("#7cc4a5", "P"), "Eso-LM 0.25": ("#b08d2e", "v"), "Eso-LM 0.125": ("#8f6bb1", "X"),
}  # fmt: skip
"""Colour and mark by system."""


def spans(points: Iterable[Point], key: str = "seconds", quartiles: str = "quartiles") -> tuple[list[float], Any]:
    """Milliseconds and their quartiles as error bars."""
    median = [1000 * p[key] for p in points]
    low = [m - 1000 * p[quartiles][0] for m, p in zip(median, points, strict=True)]
    high = [1000 * p[quartiles][1] - m for m, p in zip(median, points, strict=True)]
    return median, [[max(0.0, v) for v in low], [max(0.0, v) for v in high]]


def scatter(axes: Any, points: list[Point], colour: str, mark: str, **style: Any) -> None:
    """Draw settings with quartiles of time and standard errors of the judge; degenerate ones are hollow."""
    for degenerate in (False, True):
        if mine := [p for p in points if p["degenerate"] == degenerate]:
            x, wide = spans(mine)
            axes.errorbar(
                x, [p["nats"] for p in mine], xerr=wide, yerr=[p["stderr"] for p in mine], fmt=mark, color=colour,
                mfc="white" if degenerate else colour, elinewidth=0.8, **{"ms": 5, **style},
            )  # fmt: skip


def label(axes: Any, p: Point, text: str, colour: str, offset: tuple[int, int] = (5, 5)) -> None:
    """Write a name beside a setting."""
    from matplotlib import patheffects

    place = (1000 * p["seconds"], p["nats"])
    halo = [patheffects.withStroke(linewidth=2, foreground="white")]
    axes.annotate(
        text, place, xytext=offset, textcoords="offset points", fontsize=7, color=colour, path_effects=halo, zorder=5
    )


def time_axis(axes: Any, title: str) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of every power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(xscale="log", xlabel=title, ylabel="judge, nats per token (lower is better)")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def against_time(timed: list[Point], frontier: Callable[[list[Point]], list[Point]]) -> Any:
    """The judge against time at batch 16; a line through the frontier of each system, whose settings are labelled."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for system, (colour, mark) in STYLES.items():
        if not (mine := [p for p in timed if p["system"] == system]):
            continue
        best = frontier(mine)
        scatter(axes, [p for p in mine if p not in best], colour, mark, alpha=0.45)
        scatter(axes, best, colour, mark)
        x, _ = spans(best)
        axes.plot(x, [p["nats"] for p in best], f"{mark}-", color=colour, label=system, ms=5)
        for p in best:
            label(axes, p, p["sampler"] or "left to right", colour, (-20, -12) if system == "AR" else (5, 5))
        for p in mine:
            if p["degenerate"] and "confidence" in p["sampler"] and "cache" not in p["sampler"]:
                label(axes, p, p["sampler"], colour, (-10, 7))
    time_axis(axes, "milliseconds per sample, batch 16 (quartiles)")
    axes.plot([], [], "o", color="#999999", alpha=0.45, label="a faster setting of the system is as good")
    axes.plot([], [], "o", color="#999999", mfc="white", label="degenerate: low entropy (†)")
    legend(axes)
    return figure


def legend(axes: Any) -> None:
    """Write the legend beside the figure."""
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3.5)


def speeds(points: list[Point], title: Callable[[Point], str], length: int) -> Any:
    """Bars of tokens per second at batch 1 with their values and the judge's nats."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 0.5 * len(points) + 1.2))
    bars = points[::-1]
    values = [length / p["alone"] for p in bars]
    ends = [[length / p["alone_quartiles"][i] for p in bars] for i in (1, 0)]
    errors = [
        [v - low for v, low in zip(values, ends[0], strict=True)],
        [h - v for v, h in zip(values, ends[1], strict=True)],
    ]
    colours = ["#2a7f62" if p["system"].startswith("Eso") else "#999999" for p in bars]
    axes.barh([title(p) for p in bars], values, xerr=errors, color=colours, error_kw={"elinewidth": 0.8})
    for i, (p, value, end) in enumerate(zip(bars, values, ends[1], strict=True)):
        text = f"  {value:.0f}; judge {p['nats']:.2f} ± {p['stderr']:.2f}"
        axes.annotate(text, (max(value, end), i), va="center", fontsize=8)
    axes.set(xlabel="tokens per second, one sample at a time (quartiles)", xlim=(0, 1.45 * max(ends[1])))
    return figure
