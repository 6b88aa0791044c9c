"""Molecules as SMILES: validity, uniqueness and novelty against the number of passes."""

from __future__ import annotations

from typing import Any

from esolm.reproduce.document import Results, number, table

STEPS = ("4", "8", "16", "32", "all")
SYSTEMS = {"esolm": "Eso-LM, alpha_0 = 1", "mdlm": "MDLM"}


def report(results: Results) -> str:
    """One row for a setting."""
    rows = []
    for system, name in SYSTEMS.items():
        for steps in STEPS:
            if (found := results.get(f"molecules-{system}-{steps}")) is not None:
                shares = (
                    number(found[key], found[f"{key}_stderr"], 3) for key in ("validity", "uniqueness", "novelty")
                )
                title = "one at a time" if steps == "all" else steps
                rows.append([name, title, number(found["nfe"], None, 1), *shares, number(found["atoms"], None, 1)])
    columns = ("system", "T", "passes", "valid", "unique of these", "novel of these", "heavy atoms")
    return "\n\n".join(["## Molecules", METHOD, FIGURE, table(columns, rows), verdict(results)])


METHOD = """A structure with rules of its own: 100,000 SMILES of MOSES, one a sequence. 1000 samples each without a nucleus; valid is
what RDKit reads and sanitises. Heavy atoms are of the valid ones (in MOSES 21.6): scraps like `CC` are valid too."""

FIGURE = "![Share of valid molecules against passes of the network](results/molecules.svg)"


def verdict(results: Results) -> str:
    """Which system makes more valid molecules at which T."""
    told = []
    for steps in STEPS:
        pair: list[Any] = [results.get(f"molecules-{system}-{steps}") for system in SYSTEMS]
        if all(pair):
            told.append(f"{pair[0]['validity']:.2f} against {pair[1]['validity']:.2f} at T = {steps}")
    return f"Valid molecules of Eso-LM against MDLM: {'; '.join(told)}." if told else ""


def figures(results: Results) -> dict[str, Any]:
    """Validity against passes."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4))
    for system, colour in (("esolm", "#2a7f62"), ("mdlm", "#c1440e")):
        found = [f for steps in STEPS if (f := results.get(f"molecules-{system}-{steps}")) is not None]
        x, y, error = ([f[key] for f in found] for key in ("nfe", "validity", "validity_stderr"))
        axes.errorbar(x, y, yerr=[2 * e for e in error], fmt="o-", color=colour, label=SYSTEMS[system], capsize=3)
    axes.set(xlabel="passes of the network", ylabel="valid molecules", ylim=(0, None))
    axes.legend(frameon=False)
    return {"molecules": figure}
