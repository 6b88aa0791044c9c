"""Figures of result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"exact": "#2a7f62", "onepass": "#c1440e", "stepmerge": "#3b5b92", "elbo": "#8a6d1d"}
ORDERS = {"random": "#2a7f62", "left_to_right": "#3b5b92"}


def write(results: dict[str, Any], out: Path) -> None:
    """Write molecules.svg, sudoku.svg and estimators.svg, as far as there are results."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    drawings = {"molecules": _molecules, "sudoku": _sudoku, "estimators": _estimators}
    for name in drawings.keys() & results.keys():
        figure = drawings[name](results[name], plt)
        figure.tight_layout()
        figure.savefig(out / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def _molecules(found: dict[str, Any], plt: Any) -> Any:
    figure, plots = plt.subplots(1, 3, figsize=(10, 3.2), sharex=True)
    for axes, key, title in zip(
        plots, ("reward", "whole", "distinct"), ("reward", "valid and whole", "distinct texts")
    ):
        for name, run in found["runs"].items():
            estimator, seed = name.split("-")[1:]
            points = run["curve"]
            label = estimator if seed == "0" else None
            x = [point["network_tokens"] / 1e6 for point in points]
            axes.plot(x, [point[key] for point in points], color=COLOURS[estimator], label=label, linewidth=1)
        axes.set(xlabel="million tokens through the network", title=title, ylim=(0, 1.02))
    plots[0].legend(frameon=False, fontsize=8)
    return figure


def _sudoku(found: dict[str, Any], plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(4.6, 3.2))
    for name, run in found["runs"].items():
        order, seed = name.removeprefix("sudoku-").rsplit("-", 1)
        points = run["curve"]
        label = order.replace("_", " ") if seed == "0" else None
        x, y = [point["step"] for point in points], [point["solved"] for point in points]
        axes.plot(x, y, color=ORDERS[order], label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="puzzles solved", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)
    return figure


def _estimators(found: dict[str, Any], plt: Any) -> Any:
    figure, plots = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, name in zip(plots, ("parallel", "one by one"), strict=True):
        rows = {key: row for key, row in found[name].items() if key != "exact"}
        for x, (key, row) in enumerate(rows.items()):
            axes.errorbar(x, row["bias"], yerr=row["sd"], fmt="o", color=COLOURS[key.split()[0]], capsize=3)
        axes.axhline(0, color=COLOURS["exact"], linewidth=1)
        labels = [f"{key}\n{row['passes']} pass{'es' * (row['passes'] > 1)}" for key, row in rows.items()]
        axes.set_xticks(range(len(rows)), labels, fontsize=6, rotation=45)
        axes.set(title=f"samples drawn {name}" if name != "parallel" else "samples in parallel steps")
    plots[0].set_ylabel("estimate - exact log p, nats")
    return figure
