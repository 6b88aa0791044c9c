"""Molecules as SMILES: validity, uniqueness and novelty against the number of passes."""

from __future__ import annotations

from typing import Any

from esolm.reproduce.document import Results, number, table

STEPS = ("4", "8", "16", "32", "all")
MIXES = ("1", "0.5", "0.25", "0")
SYSTEMS = {
    "mdlm": "MDLM",
    "esolm": "Eso-LM, alpha_0 = 1",
    "any_order": "Eso-LM, 1, any-order loss",
    "quarter": "Eso-LM, 0.25",
}
COLOURS = {"mdlm": "#c1440e", "esolm": "#2a7f62", "any_order": "#8fc7b3", "quarter": "#3b5b92"}


def settings(results: Results, system: str) -> dict[str, Any]:
    """What was found for each setting of a system, by the words for it."""
    words = {mix: f"16, sampled at {mix}" for mix in MIXES} | {"0": "left to right"}
    if system != "quarter":
        words = {steps: steps for steps in STEPS} | {"all": "one at a time"}
    words["nucleus"] = f"{[*words.values()][-1]}, nucleus"
    found = {title: results.get(f"molecules-{system}-{name}") for name, title in words.items()}
    return {title: f for title, f in found.items() if f is not None}


def report(results: Results) -> str:
    """One row for a setting."""
    rows = []
    for system, name in SYSTEMS.items():
        for title, f in settings(results, system).items():
            shares = (number(f[key], f[f"{key}_stderr"], 3) for key in ("validity", "whole", "uniqueness", "novelty"))
            rows.append([name, title, number(f["nfe"], None, 1), *shares, number(f["atoms"], None, 1)])
    columns = ("trained", "T", "passes", "valid", "valid and whole", "unique", "novel", "heavy atoms")
    return "\n\n".join(["## Molecules", METHOD, FIGURE, table(columns, rows), verdict(results)])


METHOD = """A structure with rules of its own: 100,000 SMILES of MOSES, one a sequence of at most 40 tokens. 1000 samples each, with
a nucleus of 0.9 where it says so; valid is what RDKit reads and sanitises. A scrap like `CC` is valid too: whole is what is no smaller than the
smallest hundredth of MOSES. Unique is the share of the valid that differ, novel that of these which the training does not
have; heavy atoms are the mean of the valid (21.6 in MOSES)."""

FIGURE = "![Share of samples that are valid and whole molecules, against passes of the network](results/molecules.svg)"


def verdict(results: Results) -> str:
    """The most that each system reached, and with how many passes."""
    best = {}
    for system, name in SYSTEMS.items():
        if found := settings(results, system):
            title, f = max(found.items(), key=lambda item: item[1]["whole"])
            best[name] = f"{name} {number(f['whole'], f['whole_stderr'], 3)} ({title}, {f['nfe']:.0f} passes)"
    return f"Most that is valid and whole: {'; '.join(best.values())}." if best else ""


def figures(results: Results) -> dict[str, Any]:
    """Valid at all, and valid and whole, against passes; with a nucleus as diamonds."""
    from matplotlib import pyplot as plt

    figure, plots = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True)
    for axes, key, title in zip(plots, ("validity", "whole"), ("valid", "valid and whole"), strict=True):
        for system, name in SYSTEMS.items():
            found = settings(results, system)
            for nucleus, style in ((False, "o-"), (True, "D")):
                points = [f for title, f in found.items() if title.endswith("nucleus") is nucleus]
                x, y, error = ([f[k] for f in points] for k in ("nfe", key, f"{key}_stderr"))
                label, bars = None if nucleus else name, [2 * e for e in error]
                axes.errorbar(x, y, yerr=bars, fmt=style, color=COLOURS[system], label=label, capsize=3)
        axes.set(xlabel="passes of the network", title=title, ylim=(0, None))
    plots[0].set_ylabel("share of samples")
    plots[1].legend(frameon=False, fontsize=8)
    return {"molecules": figure}
