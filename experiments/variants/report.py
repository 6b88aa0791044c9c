"""Eso-LM (A) against (B), the share kappa, and unit weights against those of the bound."""

from __future__ import annotations

from esolm.reproduce.document import Results, number, table

PAPER = {"1": ("36.12", "30.96"), "0.5": ("32.53", "30.51"), "0.25": ("29.23", "28.44"), "0.125": ("26.29", "25.97")}


def report(results: Results) -> str:
    """Three small tables."""

    def cell(run: str) -> str:
        found = results.get(f"bound-{run}")
        return "–" if found is None else number(found[0]["nats"], found[0]["stderr"], 3)

    variants = [[f"alpha_0 = {a}", cell(f"esolm-{a}"), cell(f"esolm-a-{a}"), *PAPER[a]] for a in PAPER]
    kappas = [[k, cell(run)] for k, run in (("0.25", "esolm-0.5-kappa-0.25"), ("0.5", "esolm-0.5"), ("0.75", "esolm-0.5-kappa-0.75"))]  # fmt: skip
    weights = [["unit", cell("esolm-1")], ["of the bound", cell("esolm-1-elbo")]]
    return "\n\n".join(
        [
            "## Variants: (A) against (B), kappa, weights",
            "The bound in nats per token on the valid split.",
            table(("", "(B)", "(A)", "paper, (B)", "paper, (A)"), variants),
            table(("kappa at alpha_0 = 0.5", "bound"), kappas),
            table(("weights at alpha_0 = 1", "bound"), weights),
            verdict(results),
        ]
    )


def verdict(results: Results) -> str:
    """What the numbers say."""
    nats = {name.removeprefix("bound-"): found[0]["nats"] for name, found in results.items()}
    told = []
    if {"esolm-1", "esolm-a-1"} <= nats.keys():
        gain = nats["esolm-1"] - nats["esolm-a-1"]
        told.append(
            f"At alpha_0 = 1, (A) is {abs(gain):.2f} nats {'better' if gain > 0 else 'worse'} than (B) (paper: 0.15 better)."
        )
    if {"esolm-0.125", "esolm-a-0.125"} <= nats.keys():
        gain = nats["esolm-0.125"] - nats["esolm-a-0.125"]
        told.append(f"At 0.125 the difference is {gain:.2f} nats (paper: 0.01).")
    if {"esolm-1", "esolm-1-elbo"} <= nats.keys():
        gain = nats["esolm-1-elbo"] - nats["esolm-1"]
        told.append(f"The bound's own weights cost {gain:.2f} nats against unit weights at alpha_0 = 1.")
    return " ".join(told)
