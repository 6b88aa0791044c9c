"""Table 1: perplexity of every system, and how alpha_0 leads from diffusion to left to right."""

from __future__ import annotations

import itertools
import math
from typing import Any

from experiments.runner.document import Results, number, table

ROWS = {
    "ar": ("AR", "22.83", ""),
    "ar-adaln": ("AR with AdaLN", "21.86", ""),
    "mdlm": ("MDLM", "26.82", "31.78"),
    "bd3lm-16": ("BD3-LM, L' = 16", "", "30.60"),
    "bd3lm-8": ("BD3-LM, L' = 8", "", "29.83"),
    "bd3lm-4": ("BD3-LM, L' = 4", "", "28.23"),
    "esolm-1": ("Eso-LM, alpha_0 = 1", "31.65", "36.12"),
    "esolm-0.5": ("Eso-LM, 0.5", "28.07", "32.53"),
    "esolm-0.25": ("Eso-LM, 0.25", "24.80", "29.23"),
    "esolm-0.125": ("Eso-LM, 0.125", "23.02", "26.29"),
    "esolm-0": ("Eso-LM, 0", "21.86", ""),
}
LEFT_TO_RIGHT = ("ar", "ar-adaln", "esolm-0")


def report(results: Results) -> str:
    """The table and the verdict."""
    rows = []
    for run, (name, exact, bound) in ROWS.items():
        found, again = (results.get(f"bound-{run}{seed}") for seed in ("", "-seed1"))
        weighed = results.get(f"exact-{run}")
        if found is None:
            continue
        nats, error = found[0]["nats"], found[0]["stderr"]
        own = ["", number(nats, error, 3)] if run not in LEFT_TO_RIGHT else [number(nats, error, 3), ""]
        if weighed is not None:
            own[0] = number(_jackknife(weighed), weighed[0]["stderr"], 3)
        second = number(again[0]["nats"], None, 3) if again is not None else ""
        rows.append([name, *own, second, f"{found[0]['perplexity']:.0f}", exact, bound])
    columns = (
        "system",
        "exact, nats",
        "bound, nats",
        "bound, second seed",
        "perplexity",
        "paper, exact",
        "paper, bound",
    )
    return "\n\n".join(["## Perplexity (Table 1, Finding 1)", METHOD, FIGURE, table(columns, rows), verdict(results)])


METHOD = """Nats per token on the books of the valid split, with the standard error over sequences (the same sequences for every
system, so that differences are much surer than the errors say). The bound is the system's own; left-to-right models have
none, and for Eso-LM the exact value is the jackknife over 32 orders on the first 64 sequences. The perplexity is that of
the bound. The paper's columns are perplexities on LM1B after a million steps."""


FIGURE = "![Nats per token fall from alpha_0 = 1 to 0, between the lines of MDLM and AR](results/perplexity.svg)"


def _jackknife(weighed: Any) -> float:
    """The best estimate of a result: its jackknife, or its only value."""
    curve = weighed[0].get("curve")
    return (curve[-1]["jackknife"] if curve else None) or weighed[0]["nats"]


RUNS = ["esolm-1", "esolm-0.5", "esolm-0.25", "esolm-0.125", "esolm-0"]


def verdict(results: Results) -> str:
    """What the table says beside Finding 1, and how far the models are from convergence."""
    nats = {run: results[f"bound-{run}"][0]["nats"] for run in ROWS if f"bound-{run}" in results}
    told = [convergence(results)]
    seeds = seed_differences(results)
    same = max(seeds.values(), default=0.0)
    if seeds:
        told.append(
            f"Two seeds differ by {min(seeds.values()):.2f} to {same:.2f} nats ({ROWS[max(seeds, key=seeds.__getitem__)][0]}): a "
            "smaller difference between systems means nothing."
        )
    if {"mdlm", "esolm-1"} <= nats.keys():
        gap = nats["mdlm"] - nats["esolm-1"]
        how = "no different from" if abs(gap) <= same else "worse than" if gap > 0 else "better than"
        told.append(
            f"MDLM stands at {nats['mdlm']:.2f}, {how} Eso-LM at alpha_0 = 1 with {nats['esolm-1']:.2f}; in the paper it is 0.13 "
            "nats better. [Variants](#variants-a-against-b-kappa-weights) takes the two apart: attention, and the weights of the loss."
        )
    close = [
        f"{a} and {b}" for a, b in itertools.pairwise(RUNS) if {a, b} <= nats.keys() and abs(nats[a] - nats[b]) <= same
    ]
    if close:
        names = "; ".join(close).replace("esolm-", "")
        told.append(
            f"Neighbours no farther apart than two seeds: alpha_0 = {names}. With 0 < alpha_0 < 1 each of the two terms has half of "
            "the batch, so that such a model has seen half as many examples of each kind."
        )
    if {"ar", "ar-adaln", "esolm-0"} <= nats.keys():
        told.append(
            f"Left to right by mask queries (alpha_0 = 0) reaches {nats['esolm-0']:.2f}, AR {nats['ar']:.2f} and with "
            f"AdaLN {nats['ar-adaln']:.2f}. The paper reports one number for the last and for alpha_0 = 0; a mask query must "
            "first learn to look at the token before it, which shifted AR gets for nothing."
        )
    return "\n\n".join(text for text in told if text)


def seed_differences(results: Results) -> dict[str, float]:
    """How far the bounds of two seeds lie apart, for the runs that have two."""
    pairs = {run: (results.get(f"bound-{run}"), results.get(f"bound-{run}-seed1")) for run in ROWS}
    return {run: abs(one[0]["nats"] - two[0]["nats"]) for run, (one, two) in pairs.items() if one and two}


def convergence(results: Results) -> str:
    """How much the last quarter of the training still brought."""
    gains = {}
    for run in ROWS:
        if (found := results.get(f"run-{run}")) is not None and len(found["validations"]) > 1:
            *_, before, last = found["validations"].values()
            gains[run] = before - last
    if not gains:
        return ""
    low, high = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    return (
        f"How far from convergence: the last quarter of the steps, at a falling rate, still brought between "
        f"{gains[low]:.2f} ({ROWS[low][0]}) and {gains[high]:.2f} nats ({ROWS[high][0]})."
    )


def findings(results: Results) -> list[list[str]]:
    """Finding 1."""
    nats = [results[f"bound-{run}"][0]["nats"] for run in RUNS if f"bound-{run}" in results]
    if len(nats) < len(RUNS):
        return []
    falls, same = [a - b for a, b in itertools.pairwise(nats)], max(seed_differences(results).values(), default=0.0)
    unclear = [b for (_, b), fall in zip(itertools.pairwise(RUNS), falls, strict=True) if fall <= same]
    held = "confirmed" if sum(falls) > same and min(falls) > -same else "not confirmed"
    if unclear:
        held += f" but for the steps to {' and '.join(unclear)}, within two seeds".replace("esolm-", "")
    here = ", ".join(f"{math.exp(value):.0f}" for value in nats)
    claim = "**1.** alpha_0 = 1, 0.5, 0.25, 0.125, 0 leads from diffusion to left to right (perplexity of the bound)"
    return [[claim, "36, 33, 29, 26, 22 (LM1B)", here, held]]


def figures(results: Results) -> dict[str, Any]:
    """The bound against alpha_0, between the systems without one."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.8))
    shown = [run for run in RUNS if f"bound-{run}" in results]
    for name, label in (("bound", "Eso-LM, bound"), ("exact", "Eso-LM, exact")):
        at = [run for run in shown if f"{name}-{run}" in results or run == "esolm-0"]
        found = [results.get(f"{name}-{run}", results["bound-esolm-0"] if run == "esolm-0" else None) for run in at]
        y = [_jackknife(f) for f in found]
        error = [2 * f[0]["stderr"] for f in found] if name == "bound" else None
        style = {"color": "#2a7f62", "alpha": 1.0 if name == "bound" else 0.5, "capsize": 3}
        axes.errorbar([RUNS.index(run) for run in at], y, yerr=error, fmt="o-", label=label, **style)
    lines = {"mdlm": "#c1440e", "bd3lm-16": "#8fb0d8", "bd3lm-8": "#6c8fc0", "bd3lm-4": "#4a6fa5", "ar": "#333333"}
    for run, colour in lines.items():
        if (found := results.get(f"bound-{run}")) is not None:
            axes.axhline(found[0]["nats"], color=colour, linestyle="--", linewidth=1)
            axes.text(4.4, found[0]["nats"], ROWS[run][0], color=colour, va="center", fontsize=9)
    axes.set_xticks(range(len(RUNS)), [run.removeprefix("esolm-") for run in RUNS])
    axes.set(xlabel="alpha_0", ylabel="nats per token (lower is better)", xlim=(-0.3, 4.3))
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return {"perplexity": figure}
