"""Eso-LM (A) against (B), the share kappa, and unit weights against the bound's weights."""

from __future__ import annotations

import math

from experiments.runner.document import Results, number, table

PAPER = {"1": ("36.12", "30.96"), "0.5": ("32.53", "30.51"), "0.25": ("29.23", "28.44"), "0.125": ("26.29", "25.97")}
KAPPAS = {"0.25": ("esolm-0.5-kappa-0.25", "diverged"), "0.5": ("esolm-0.5", "31.53"), "0.75": ("esolm-0.5-kappa-0.75", "32.25")}  # fmt: skip


def report(results: Results) -> str:
    """Return three small tables and a summary."""

    def cell(run: str) -> str:
        found = results.get(f"bound-{run}")
        return "–" if found is None else number(found[0]["nats"], found[0]["stderr"], 3)

    variants = [[f"alpha_0 = {a}", cell(f"esolm-{a}"), cell(f"esolm-a-{a}"), *PAPER[a]] for a in PAPER]
    kappas = [[kappa, cell(run), paper] for kappa, (run, paper) in KAPPAS.items()]
    seen = [
        ["tokens earlier in the order: Eso-LM (B)", cell("esolm-1-elbo"), cell("esolm-1")],
        ["clean tokens in both directions: Eso-LM (A)", "", cell("esolm-a-1")],
        ["all tokens in both directions: MDLM", cell("mdlm"), ""],
    ]
    return "\n\n".join(
        [
            "## Variants: (A) against (B), kappa, weights",
            METHOD,
            table(("", "(B)", "(A)", "paper, (B)", "paper, (A)"), variants),
            table(("kappa at alpha_0 = 0.5", "bound", "paper, (A), perplexity"), kappas),
            "MDLM and Eso-LM at alpha_0 = 1 differ in the attention pattern and in the weights of the loss:",
            table(("attention to", "weights of the bound", "unit weights"), seen),
            verdict(results),
        ]
    )


METHOD = """The bound in nats per token on the validation split; all models were trained on the same tokens. The paper's columns are
perplexities on LM1B: for (A) against (B) after a million steps, for kappa after 500 thousand steps of (A)."""


def nats_of(results: Results) -> dict[str, float]:
    """Return the bounds by run."""
    return {name.removeprefix("bound-"): found[0]["nats"] for name, found in results.items()}


def noise(nats: dict[str, float]) -> float:
    """Return the largest difference between two seeds of one Eso-LM."""
    pairs = [(nats[run], nats[f"{run}-seed1"]) for run in ("esolm-1", "esolm-0.125") if f"{run}-seed1" in nats]
    return max((abs(a - b) for a, b in pairs), default=0.0)


def judged(gain: float, spread: float) -> str:
    """Return whether a gain reported by the paper is confirmed here."""
    return "confirmed" if gain > spread else "not confirmed" if gain < -spread else "inconclusive here"


def verdict(results: Results) -> str:
    """Summarise the tables."""
    nats, lines = nats_of(results), []
    gains = {
        a: nats[f"esolm-{a}"] - nats[f"esolm-a-{a}"] for a in PAPER if {f"esolm-{a}", f"esolm-a-{a}"} <= nats.keys()
    }
    if len(gains) == len(PAPER):
        ours = ", ".join(f"{gain:+.2f}" for gain in gains.values())
        paper = ", ".join(f"{math.log(float(b) / float(a)):+.2f}" for b, a in PAPER.values())
        lines.append(f"Gain of (A) over (B), from alpha_0 = 1 to 0.125: {ours} nats (paper: {paper}).")
    if all(run in nats for run, _ in KAPPAS.values()):
        best = min(KAPPAS, key=lambda kappa: nats[KAPPAS[kappa][0]])
        lines.append(f"The best kappa of the three is {best} (paper: 0.5).")
    if {"mdlm", "esolm-1-elbo", "esolm-1", "esolm-a-1"} <= nats.keys():
        lines.append(
            f"At alpha_0 = 1 the gain of unit weights for (B) is {nats['esolm-1-elbo'] - nats['esolm-1']:+.2f} nats; that of"
            f" bidirectional attention among clean tokens, with unit weights, {nats['esolm-1'] - nats['esolm-a-1']:+.2f}; that of"
            f" bidirectional attention among all tokens, with the bound's weights, {nats['esolm-1-elbo'] - nats['mdlm']:+.2f}."
        )
    return " ".join([*lines, f"Two seeds of one Eso-LM differ by up to {noise(nats):.2f}."])


def findings(results: Results) -> list[list[str]]:
    """Return rows for the table of findings."""
    nats, rows = nats_of(results), list[list[str]]()
    spread = noise(nats)
    if {"esolm-a-1", "esolm-a-0.125", "esolm-1", "esolm-0.125"} <= nats.keys():
        gains = {a: nats[f"esolm-{a}"] - nats[f"esolm-a-{a}"] for a in ("1", "0.125")}
        paper = {a: math.log(float(PAPER[a][0]) / float(PAPER[a][1])) for a in gains}
        numbers = [" and ".join(f"{found[a]:+.2f}" for a in gains) + " nats" for found in (paper, gains)]
        claim = "(A) has a better bound than (B), less so with less diffusion (alpha_0 = 1 and 0.125)"
        rows.append([claim, *numbers, judged(gains["1"], spread)])
    if all(run in nats for run, _ in KAPPAS.values()):
        ours = {kappa: nats[run] for kappa, (run, _) in KAPPAS.items()}
        margin = min(value - ours["0.5"] for kappa, value in ours.items() if kappa != "0.5")
        here = ", ".join(f"{value:.2f}" for value in ours.values()) + " nats"
        claim = "Giving each term half of the batch is best (kappa = 0.25, 0.5, 0.75)"
        rows.append([claim, "diverged, 31.5, 32.3 (perplexity, (A))", here, judged(margin, spread)])
    if {"esolm-1", "esolm-1-elbo"} <= nats.keys():
        gain = nats["esolm-1-elbo"] - nats["esolm-1"]
        claim = "Unit weights train better than the bound's at alpha_0 = 1"
        rows.append([claim, "stated without a number", f"{gain:+.2f} nats", judged(gain, spread)])
    return rows
