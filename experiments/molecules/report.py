"""Molecules as SMILES: validity, uniqueness and novelty by number of passes."""

from __future__ import annotations

from typing import Any

from experiments.runner.document import Results, number, table

WORDS = {"all": "one at a time", "nucleus": "one at a time, top-p"}
SYSTEMS = {
    "mdlm": ("MDLM", {step: WORDS.get(step, step) for step in ("4", "8", "16", "32", "all", "nucleus")}),
    "esolm": (
        "Eso-LM, alpha_0 = 1",
        {step: WORDS.get(step, step) for step in ("4", "8", "16", "32", "all", "nucleus")},
    ),
    "quarter": (
        "Eso-LM, 0.25",
        {"1": "16, sampled at 1", "0.5": "16, sampled at 0.5", "0.25": "16, sampled at 0.25", "0": "left to right"}
        | {"nucleus": "left to right, top-p"},
    ),
}
COLOURS = {"mdlm": "#c1440e", "esolm": "#2a7f62", "quarter": "#3b5b92"}


def settings(results: Results, system: str) -> dict[str, Any]:
    """Return the results of a system by the title of the setting."""
    found = {title: results.get(f"molecules-{system}-{name}") for name, title in SYSTEMS[system][1].items()}
    return {title: f for title, f in found.items() if f is not None}


def row(name: str, title: str, f: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    shares = (number(f[key], f[f"{key}_stderr"], 3) for key in ("validity", "whole", "uniqueness", "novelty"))
    return [name, title, number(f["nfe"], None, 1), *shares, number(f["atoms"], None, 1)]


def report(results: Results) -> str:
    """Return a table with one row per setting."""
    rows = [row(SYSTEMS[s][0], title, f) for s in SYSTEMS for title, f in settings(results, s).items()]
    for system, (name, words) in SYSTEMS.items():
        if (f := results.get(f"unmarked-{system}")) is not None:
            rows.append(row(f"{name}, no marker", words.get("all", "left to right"), f))
    columns = ("trained", "T", "passes", "valid", "valid and complete", "unique", "novel", "heavy atoms")
    return "\n\n".join(["## Molecules", METHOD, FIGURE, table(columns, rows), verdict(results)])


METHOD = """Discrete structures with strict rules: 100,000 SMILES strings from MOSES, one per sequence, after a given start marker. 1000
samples per setting, with top-p 0.9 where stated (diamonds in the figure). *Valid*: RDKit parses and sanitises the sample.
*Complete*: valid and not smaller than the smallest 1 % of MOSES, since fragments such as `CC` are also valid. *Unique*: share
of different molecules among the valid ones. *Novel*: share of those that are not in the training set. *Heavy atoms*: mean
over the valid ones (21.6 in MOSES)."""

FIGURE = "![Share of samples that are valid and complete molecules, by network passes](results/molecules.svg)"


def verdict(results: Results) -> str:
    """Summarise Eso-LM against MDLM, left-to-right sampling, and the marker."""
    lines, found = [], {system: settings(results, system) for system in SYSTEMS}
    pairs = [
        (title, f, found["mdlm"][title]) for title, f in found["esolm"].items() if title in found["mdlm"]
    ]  # fmt: skip
    if pairs:
        each = "; ".join(f"{a['whole']:.3f} against {b['whole']:.3f} (T = {title})" for title, a, b in pairs)
        lines.append(f"Valid and complete, Eso-LM at alpha_0 = 1 against MDLM: {each.replace('T = one', 'one')}.")
    if quarter := found["quarter"]:
        each = "; ".join(f"{f['whole']:.3f} ({title})" for title, f in quarter.items())
        lines.append(f"Eso-LM at 0.25: {each}. {ORDER}")
    marks = []
    for system, (name, words) in SYSTEMS.items():
        marked = found[system].get(words.get("all", "left to right"))
        if marked is not None and (f := results.get(f"unmarked-{system}")) is not None:
            marks.append(f"{name} {f['whole']:.3f} and {marked['whole']:.3f}")
    if marks:
        lines.append(f"Without the marker, after twice as many steps, and with it: {'; '.join(marks)}. {MARK}")
    return "\n\n".join(lines)


ORDER = """Left to right, brackets and rings are closed by looking back; in a random order their position must be guessed."""

MARK = """Positions are relative, and a query early in the order attends to few tokens: without a marker it cannot know its place in
the molecule. A bidirectional network can count the masks around it."""


def figures(results: Results) -> dict[str, Any]:
    """Plot the shares of valid, and of valid and complete, samples against passes; diamonds are with top-p."""
    from matplotlib import pyplot as plt

    figure, plots = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True)
    for axes, key, title in zip(plots, ("validity", "whole"), ("valid", "valid and complete"), strict=True):
        for system, (name, _) in SYSTEMS.items():
            found = settings(results, system)
            for nucleus, style in ((False, "o-"), (True, "D")):
                points = [f for title, f in found.items() if title.endswith("top-p") is nucleus]
                x, y, error = ([f[k] for f in points] for k in ("nfe", key, f"{key}_stderr"))
                label = None if nucleus else name
                bars = [[min(2 * e, 0.9 * m) for m, e in zip(y, error, strict=True)], [2 * e for e in error]]
                axes.errorbar(x, y, yerr=bars, fmt=style, color=COLOURS[system], label=label, capsize=3)
        axes.set(xlabel="network passes", title=title)
        if any(f[key] for system in SYSTEMS for f in settings(results, system).values()):
            axes.set(yscale="log", ylim=(0.001, 1))
            axes.set_yticks([0.01, 0.1, 1], ["1 %", "10 %", "100 %"])
    plots[0].set_ylabel("share of samples")
    plots[0].legend(frameon=False, fontsize=8, loc="upper left")
    return {"molecules": figure}
