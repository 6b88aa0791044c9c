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
    return "\n\n".join(["## Molecules", METHOD, table(columns, rows), verdict(results)])


METHOD = """A structure with rules of its own: 100,000 SMILES of MOSES, one a sequence. 1000 samples each without a nucleus; valid is
what RDKit reads and sanitises. Heavy atoms are of the valid ones (in MOSES 21.6): scraps like `CC` are valid too."""


def verdict(results: Results) -> str:
    """Which system makes more valid molecules at which T."""
    told = []
    for steps in STEPS:
        pair: list[Any] = [results.get(f"molecules-{system}-{steps}") for system in SYSTEMS]
        if all(pair):
            told.append(f"{pair[0]['validity']:.2f} against {pair[1]['validity']:.2f} at T = {steps}")
    return f"Valid molecules of Eso-LM against MDLM: {'; '.join(told)}." if told else ""
