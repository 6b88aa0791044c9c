"""Gains of one kind of models over another, paired by seed, with errors and verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Results = Mapping[str, Any]
SEEDS = (0, 1, 2)
RUNS = (*SEEDS, "0-float32")
"""The seeds, and the first once more in float32: rounding alone changes a run about as much as another seed."""
STUDENT = (
    63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92,
)  # fmt: skip
"""Student's t at 99 %, two-sided, for 1 to 16 degrees of freedom."""
BOUND, JACKKNIFE = "bound", "exact"
"""The estimates that are compared, by the prefix of their results."""
ROWS = {
    "ar": "AR", "mdlm": "MDLM", "mdlm-unit": "MDLM, unit weights", "bd3lm-4": "BD3-LM, L' = 4",
    "esolm-1": "Eso-LM, alpha_0 = 1",
    "esolm-1-elbo": "Eso-LM, 1, weights of the bound", "any-1": "Eso-LM, 1, any-order loss",
    "esolm-0.5": "Eso-LM, 0.5", "esolm-0.25": "Eso-LM, 0.25", "esolm-0.125": "Eso-LM, 0.125",
    "any-0.125": "Eso-LM, 0.125, any-order loss", "esolm-a-1": "Eso-LM (A), 1", "esolm-a-0.25": "Eso-LM (A), 0.25",
    "esolm-0.5-kappa-0.125": "Eso-LM, 0.5, kappa = 0.125", "esolm-0.5-kappa-0.75": "Eso-LM, 0.5, kappa = 0.75",
    "d3pm-absorb": "D3PM, absorb", "d3pm-uniform": "D3PM, uniform", "sedd-absorb": "SEDD, absorb",
    "sedd-uniform": "SEDD, uniform",
    "udlm": "UDLM", "duo": "Duo", "diffusionbert": "DiffusionBERT", "diffusion_lm": "Diffusion-LM",
}  # fmt: skip
"""The runs and their names."""
CHAIN = ("esolm-1", "esolm-0.5", "esolm-0.25", "esolm-0.125", "ar")
"""From diffusion to left to right."""
COMPARED = {
    "MDLM is better than Eso-LM at alpha_0 = 1": ("mdlm", "esolm-1", math.log(36.12 / 31.78)),
    "The same, both trained with the weights of the bound": ("mdlm", "esolm-1-elbo", None),
    "The same, both trained with unit weights": ("mdlm-unit", "esolm-1", None),
    "(A) is better than (B) at alpha_0 = 1": ("esolm-a-1", "esolm-1", math.log(36.12 / 30.96)),
    "(A) is better than (B) at alpha_0 = 0.25": ("esolm-a-0.25", "esolm-0.25", math.log(29.23 / 28.44)),
    "kappa = 0.5 is better than 0.75 at alpha_0 = 0.5, here for (B)": (
        "esolm-0.5", "esolm-0.5-kappa-0.75", f"{math.log(32.25 / 31.53):+.2f} nats, (A) after 500,000 steps",
    ),
    "kappa = 0.5 is better than 0.125 at alpha_0 = 0.5, here for (B)": (
        "esolm-0.5", "esolm-0.5-kappa-0.125", "(A) diverged at 0.125",
    ),
    "Unit weights train better than the bound's at alpha_0 = 1": ("esolm-1", "esolm-1-elbo", None),
    "Not in the paper: the any-order loss trains better than the paper's at alpha_0 = 1": ("any-1", "esolm-1", None),
    "Not in the paper: the same at alpha_0 = 0.125": ("any-0.125", "esolm-0.125", None),
}  # fmt: skip
"""The better one by the claim, the other, and the paper's gain in nats, or what it says instead."""
PAIRS = (
    *dict.fromkeys(pair[:2] for pair in COMPARED.values()),
    *((later, earlier) for earlier, later in pairwise(CHAIN)),
)


def estimate(found: Any) -> tuple[float, float | None]:
    """The last jackknife of a result, and its change since half as many orders."""
    curve = [point for point in found[0].get("curve") or [] if point["jackknife"] is not None]
    if not curve:
        return found[0]["nats"], None
    half = [point for point in curve if point["num_orders"] * 2 == curve[-1]["num_orders"]]
    return curve[-1]["jackknife"], half[0]["jackknife"] - curve[-1]["jackknife"] if half else None


def scores(results: Results, run: str, kind: str = BOUND) -> dict[int | str, tuple[float, float]]:
    """Nats and standard error of the runs of a kind of models by seed; those of AR are exact, whatever the kind."""
    prefix = BOUND if run == "ar" else kind
    names = {seed: f"{prefix}-{run}-{seed}" for seed in RUNS}
    found = {seed: results[name] for seed, name in names.items() if name in results}
    return {seed: (estimate(each)[0], each[0]["stderr"]) for seed, each in found.items()}


def differences(results: Results, better: str, other: str, kind: str = BOUND) -> list[float]:
    """The gains of one kind of models over the other, for each of `RUNS` that both have."""
    first, second = scores(results, better, kind), scores(results, other, kind)
    return [second[seed][0] - first[seed][0] for seed in RUNS if seed in first and seed in second]


def spread(results: Results, kind: str = BOUND) -> tuple[float, int]:
    """The standard deviation of the differences, pooled over all comparisons, and its degrees of freedom."""
    several = [found for pair in PAIRS if len(found := differences(results, *pair, kind)) > 1]
    freedom = sum(len(found) - 1 for found in several)
    squares = sum(statistics.variance(found) * (len(found) - 1) for found in several)
    return (squares / freedom) ** 0.5 if freedom else 0.0, freedom


def chance(results: Results, errors: list[float]) -> float:
    """The part of standard errors that comes from drawn masks and not from the texts, which AR's comes from alone."""
    texts = [error for _, error in scores(results, "ar").values()] or [0.0]
    return max(0.0, statistics.fmean(errors) ** 2 - statistics.fmean(texts) ** 2) ** 0.5


@dataclass(frozen=True)
class Gain:
    """A mean gain in nats with its error and the degrees of freedom of its spread."""

    nats: float
    error: float
    seeds: int
    freedom: int

    @property
    def verdict(self) -> str:
        """Whether the gain is significant at 1 % by Student's t."""
        if not self.freedom:
            return "one run, no verdict"
        least = self.error * STUDENT[min(self.freedom, len(STUDENT)) - 1]
        return "confirmed" if self.nats > least else "contradicted" if self.nats < -least else "not distinguishable"

    @property
    def significant(self) -> bool:
        """Whether it is above or below zero by the rule."""
        return self.verdict in ("confirmed", "contradicted")

    def __str__(self) -> str:
        return f"{self.nats:+.3f} ± {self.error:.3f}"

    @property
    def counted(self) -> str:
        """The gain and its seeds."""
        return f"{self} nats, {counted(self.seeds)}"


def counted(seeds: int) -> str:
    """Return the number of runs in words."""
    return f"{seeds} run" + "s" * (seeds > 1)


def gain(results: Results, better: str, other: str, kind: str = BOUND) -> Gain | None:
    """The gain of one run over the other by one kind of scores; None without a common seed."""
    found = differences(results, better, other, kind)
    if not found:
        return None
    noise, freedom = spread(results, kind)
    drawn = [chance(results, [error for _, error in scores(results, run, kind).values()]) for run in (better, other)]
    return Gain(statistics.fmean(found), math.hypot(noise / len(found) ** 0.5, *drawn), len(found), freedom)


def between(results: Results, better: str, other: str) -> Gain | None:
    """The gain of one result over another, by their names; None if one is missing."""
    if better not in results or other not in results:
        return None
    first, second = results[better][0], results[other][0]
    noise, freedom = spread(results)
    drawn = [chance(results, [each["stderr"]]) for each in (first, second)]
    return Gain(second["nats"] - first["nats"], math.hypot(noise, *drawn), 1, freedom)


def decisive(results: Results, better: str, other: str) -> Gain | None:
    """The gain that the verdict is about: by the jackknife if both have it for two seeds, else by the bound."""
    jackknife = gain(results, better, other, JACKKNIFE)
    return jackknife if jackknife is not None and jackknife.seeds > 1 else gain(results, better, other)


def interpolation(results: Results) -> list[Gain]:
    """The steps from diffusion to left to right by their bounds; empty unless every run has seed 0."""
    found = [gain(results, later, earlier) for earlier, later in pairwise(CHAIN)]
    return [step for step in found if step is not None] if None not in found else []


def rows(results: Results) -> list[list[str]]:
    """Return a row for each claim that has results: the paper's gain, ours, and the verdict."""
    made = []
    for name, (better, other, paper) in COMPARED.items():
        found, bound = decisive(results, better, other), gain(results, better, other)
        if found is None or bound is None:
            continue
        theirs = paper if isinstance(paper, str) else "–" if paper is None else f"{paper:+.2f} nats"
        ours = found.counted
        if found != bound:
            ours += f" by the jackknife (bound: {bound.counted})"
        made.append([name, theirs, ours, found.verdict])
    return made
