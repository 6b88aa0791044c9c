"""Molecules as SMILES: validity, uniqueness and novelty against the number of passes."""

from __future__ import annotations

from typing import Any

from experiments.runner.document import Results, number, table

WORDS = {"all": "one at a time", "nucleus": "one at a time, nucleus"}
SYSTEMS = {
    "mdlm": ("MDLM", {step: WORDS.get(step, step) for step in ("4", "8", "16", "32", "all", "nucleus")}),
    "esolm": (
        "Eso-LM, alpha_0 = 1",
        {step: WORDS.get(step, step) for step in ("4", "8", "16", "32", "all", "nucleus")},
    ),
    "quarter": (
        "Eso-LM, 0.25",
        {"1": "16, sampled at 1", "0.5": "16, sampled at 0.5", "0.25": "16, sampled at 0.25", "0": "left to right"}
        | {"nucleus": "left to right, nucleus"},
    ),
}
COLOURS = {"mdlm": "#c1440e", "esolm": "#2a7f62", "quarter": "#3b5b92"}


def settings(results: Results, system: str) -> dict[str, Any]:
    """What was found for each setting of a system, by the words for it."""
    found = {title: results.get(f"molecules-{system}-{name}") for name, title in SYSTEMS[system][1].items()}
    return {title: f for title, f in found.items() if f is not None}


def row(name: str, title: str, f: dict[str, Any]) -> list[str]:
    shares = (number(f[key], f[f"{key}_stderr"], 3) for key in ("validity", "whole", "uniqueness", "novelty"))
    return [name, title, number(f["nfe"], None, 1), *shares, number(f["atoms"], None, 1)]


def report(results: Results) -> str:
    """One row for a setting."""
    rows = [row(SYSTEMS[s][0], title, f) for s in SYSTEMS for title, f in settings(results, s).items()]
    for system, (name, words) in SYSTEMS.items():
        if (f := results.get(f"unmarked-{system}")) is not None:
            rows.append(row(f"{name}, no mark", words.get("all", "left to right"), f))
    columns = ("trained", "T", "passes", "valid", "valid and whole", "unique", "novel", "heavy atoms")
    return "\n\n".join(["## Molecules", METHOD, FIGURE, table(columns, rows), verdict(results)])


METHOD = """A structure with rules of its own: 100,000 SMILES of MOSES, one a sequence, after a mark that is given. 1000 samples each,
with a nucleus of 0.9 where it says so (diamonds in the figure); valid is what RDKit reads and sanitises. A scrap like `CC` is valid too: whole is
what is no smaller than the smallest hundredth of MOSES. Unique is the share of the valid that differ, novel that of these which
the training does not have; heavy atoms are the mean of the valid (21.6 in MOSES)."""

FIGURE = "![Share of samples that are valid and whole molecules, against passes of the network](results/molecules.svg)"


def verdict(results: Results) -> str:
    """Eso-LM against MDLM, what left to right is worth, and the mark."""
    told, found = [], {system: settings(results, system) for system in SYSTEMS}
    pairs = [
        (title, f, found["mdlm"][title]) for title, f in found["esolm"].items() if title in found["mdlm"]
    ]  # fmt: skip
    if pairs:
        each = "; ".join(f"{a['whole']:.3f} against {b['whole']:.3f} (T = {title})" for title, a, b in pairs)
        told.append(f"Valid and whole, Eso-LM at alpha_0 = 1 against MDLM: {each.replace('T = one', 'one')}.")
    if quarter := found["quarter"]:
        each = "; ".join(f"{f['whole']:.3f} ({title})" for title, f in quarter.items())
        told.append(f"Eso-LM at 0.25: {each}. {ORDER}")
    marks = []
    for system, (name, words) in SYSTEMS.items():
        marked = found[system].get(words.get("all", "left to right"))
        if marked is not None and (f := results.get(f"unmarked-{system}")) is not None:
            marks.append(f"{name} {f['whole']:.3f} and {marked['whole']:.3f}")
    if marks:
        told.append(f"Without the mark, after twice as many steps, and with it: {'; '.join(marks)}. {MARK}")
    return "\n\n".join(told)


ORDER = """What opens is closed from left to right by looking back; in a random order it must be guessed."""

MARK = """Positions are relative, and a query that comes early in the order sees little: without a mark it cannot know where in
the molecule it stands. A bidirectional network can count the masks around it."""


def figures(results: Results) -> dict[str, Any]:
    """Valid at all, and valid and whole, against passes; with a nucleus as diamonds."""
    from matplotlib import pyplot as plt

    figure, plots = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True)
    for axes, key, title in zip(plots, ("validity", "whole"), ("valid", "valid and whole"), strict=True):
        for system, (name, _) in SYSTEMS.items():
            found = settings(results, system)
            for nucleus, style in ((False, "o-"), (True, "D")):
                points = [f for title, f in found.items() if title.endswith("nucleus") is nucleus]
                x, y, error = ([f[k] for f in points] for k in ("nfe", key, f"{key}_stderr"))
                label = None if nucleus else name
                bars = [[min(2 * e, 0.9 * m) for m, e in zip(y, error, strict=True)], [2 * e for e in error]]
                axes.errorbar(x, y, yerr=bars, fmt=style, color=COLOURS[system], label=label, capsize=3)
        axes.set(xlabel="passes of the network", title=title)
        if any(f[key] for system in SYSTEMS for f in settings(results, system).values()):
            axes.set(yscale="log", ylim=(0.001, 1))
            axes.set_yticks([0.01, 0.1, 1], ["1 %", "10 %", "100 %"])
    plots[0].set_ylabel("share of samples")
    plots[0].legend(frameon=False, fontsize=8, loc="upper left")
    return {"molecules": figure}
