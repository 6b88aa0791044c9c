"""Spread of single estimates of the bound: over times and masks, and over orders."""

from __future__ import annotations

from esolm.reproduce.document import Results, number, table

ALPHAS = ("1", "0.5", "0.25", "0.125")


def report(results: Results) -> str:
    """One row for an estimate."""
    rows = []
    for alpha in ALPHAS:
        if (found := results.get(f"variance-{alpha}")) is not None:
            rows += [
                [f"alpha_0 = {alpha}: {e['estimator']}", str(e["samples"]), number(e["mean"], None, 3), number(e["sd"], None, 3)]
                for e in found["estimators"]
            ]  # fmt: skip
    rows.append(["paper: over t and z_t", "10", "3.25", "0.56"])
    rows.append(["paper: over sigma", "1", "3.28", "0.03"])
    ones = [found["estimators"] for found in results.values()]
    ratios = [e[0]["sd"] / e[-1]["sd"] for e in ones]
    against = [e[1]["sd"] / e[-1]["sd"] for e in ones]
    verdict = (
        f"**{'Confirmed' if min(ratios) > 1 else 'Not confirmed'}.** One order spreads {min(ratios):.1f} to {max(ratios):.1f} times less than ten "
        f"independent times and masks (the paper: 19 times), and {min(against):.1f} to {max(against):.1f} times less than "
        "the same ten with stratified times, as `esolm score` draws them: the more of the gap that closes, the more of it is in the times."
    )
    method = "100 estimates of one sequence of the valid split, nats per token."
    return "\n\n".join(
        ["## Variance of the two estimators", method, table(("estimator", "draws", "mean", "s.d."), rows), verdict]
    )
