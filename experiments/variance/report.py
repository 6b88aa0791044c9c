"""Standard deviation of single estimates of the bound, over times and masks and over orders."""

from __future__ import annotations

from experiments.runner.document import Results, number, table

ALPHAS = ("1", "0.5", "0.25", "0.125")


def report(results: Results) -> str:
    """Return a table with one row per estimator."""
    rows = []
    for alpha in ALPHAS:
        if (found := results.get(f"variance-{alpha}")) is not None:
            rows += [
                [f"alpha_0 = {alpha}: {e['estimator']}", str(e["samples"]), number(e["mean"], None, 3), number(e["sd"], None, 3)]
                for e in found["estimators"]
            ]  # fmt: skip
    rows.append(["paper: over t and z_t", "10", "3.25", "0.56"])
    rows.append(["paper: over sigma", "1", "3.28", "0.03"])
    summary = " ".join(verdict(results))
    method = "100 estimates for one sequence of the validation split, in nats per token."
    return "\n\n".join(
        ["## Variance of the two estimators", method, table(("estimator", "draws", "mean", "s.d."), rows), summary]
    )


def gains(results: Results) -> dict[str, tuple[float, float]]:
    """Return by alpha_0 the ratio of standard deviations: ten independent times to one order, ten stratified times to one."""
    found = {alpha: results[f"variance-{alpha}"]["estimators"] for alpha in ALPHAS if f"variance-{alpha}" in results}
    return {alpha: (e[0]["sd"] / e[-1]["sd"], e[1]["sd"] / e[-1]["sd"]) for alpha, e in found.items()}


def verdict(results: Results) -> list[str]:
    """Summarise alpha_0 = 1, which the paper's claim is about, and the rest."""
    found = gains(results)
    text = []
    if "1" in found:
        plain, strata = found["1"]
        text.append(
            f"**{'Confirmed' if plain > 1 else 'Not confirmed'}** for a pure diffusion model: the standard deviation with one order is {plain:.1f} times "
            f"smaller than with ten independent times and masks (19 times in the paper), and {strata:.1f} times smaller than with ten "
            "stratified times, as `esolm score` draws them. Much of the variance comes from the times."
        )
    rest = [f"{found[alpha][0]:.1f} at alpha_0 = {alpha}" for alpha in ALPHAS[1:] if alpha in found]
    if rest:
        text.append(
            f"With less diffusion the gain is smaller: {', '.join(rest)}. Most tokens then belong to the sequential term, which has no time."
        )
    return text


def findings(results: Results) -> list[list[str]]:
    """Return the row for the two estimators at alpha_0 = 1."""
    if "1" not in (found := gains(results)):
        return []
    held = "confirmed" if found["1"][0] > 1 else "not confirmed"
    claim = "The estimate over one order varies less than over ten times and masks (alpha_0 = 1; ratio of standard deviations)"
    return [[claim, "19×", f"{found['1'][0]:.1f}×", held]]
