"""Training on the any-order bound itself against the paper's two terms, at equal compute."""

from __future__ import annotations

from experiments.runner.document import Results, number, table

ALPHAS = ("1", "0.5", "0.125")
STEPS = ("8", "32", "128")


def report(results: Results) -> str:
    """Exact likelihood and judged samples of both losses."""
    rows = []
    for alpha in ALPHAS:
        for name, run, sampled in (
            ("two terms", f"esolm-{alpha}", f"esolm-{alpha}-{alpha}"),
            *((f"any order, equal {what}", *[f"any_order-{alpha}-{what}"] * 2) for what in ("tokens", "seconds")),
        ):
            found = results.get(f"exact-{run}")
            if found is None:
                continue
            cells = [number(exact(results, run), found[0]["stderr"], 3)]
            for steps in STEPS:
                judged = results.get(f"judge-{sampled}-{steps}")
                cells.append("–" if judged is None else number(judged["nats"], judged["stderr"]))
            rows.append([f"alpha_0 = {alpha}, {name}", *cells])
    columns = ("loss", "exact, nats", *(f"judged at T = {steps}" for steps in STEPS))
    return "\n\n".join(["## The any-order loss (not in the paper)", METHOD, table(columns, rows), verdict(results)])


METHOD = """The paper's loss has two terms, each on its share of the batch; `loss: any_order` scores every token of every example
under one order in one two-stream pass. It feeds the network more tokens for an example, so it gets fewer steps: as many
as feed the same number of tokens in all, or as many as take the same time. Exact nats per token (jackknife over 32
orders, 64 sequences), and the outside judge's nats per token of 256 samples."""


def exact(results: Results, run: str) -> float | None:
    """Exact nats per token of a run, if they were measured."""
    found = results.get(f"exact-{run}")
    return None if found is None else found[0]["curve"][-1]["jackknife"]


def noise(results: Results) -> float:
    """The largest difference between two seeds of the paper's loss."""
    pairs = [[exact(results, f"esolm-{alpha}{seed}") for seed in ("", "-seed1")] for alpha in ALPHAS]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


def gains(results: Results, equal: str) -> dict[str, float]:
    """Exact nats that the any-order loss gains, by alpha_0."""
    found = {}
    for alpha in ALPHAS:
        two, any_order = (exact(results, run) for run in (f"esolm-{alpha}", f"any_order-{alpha}-{equal}"))
        if two is not None and any_order is not None:
            found[alpha] = two - any_order
    return found


def verdict(results: Results) -> str:
    """The differences in likelihood, and in quality."""
    told = []
    for equal in ("tokens", "seconds"):
        if found := gains(results, equal):
            each = "; ".join(f"{gain:+.2f} at alpha_0 = {alpha}" for alpha, gain in found.items())
            told.append(f"The any-order loss gains at equal {equal}, in exact nats per token: {each}.")
    if told:
        told.append(f"Two seeds of the paper's loss differ by up to {noise(results):.2f}.")
    better = [
        results[f"judge-esolm-{alpha}-{alpha}-{steps}"]["nats"] - found["nats"]
        for alpha in ALPHAS
        for steps in STEPS
        if f"judge-esolm-{alpha}-{alpha}-{steps}" in results
        and (found := results.get(f"judge-any_order-{alpha}-tokens-{steps}")) is not None
    ]
    if better:
        told.append(
            f"The judge prefers its samples at equal tokens in {sum(gain > 0 for gain in better)} of {len(better)}"
            f" settings, by {min(better):+.2f} to {max(better):+.2f} nats."
        )
    return " ".join(told)


def findings(results: Results) -> list[list[str]]:
    """A row for the table of findings."""
    found = gains(results, "tokens")
    if len(found) < len(ALPHAS):
        return []
    here = ", ".join(f"{gain:+.2f}" for gain in found.values()) + " nats"
    clear = [alpha for alpha, gain in found.items() if gain > noise(results)]
    held = "yes" if len(clear) == len(found) else f"at alpha_0 = {', '.join(clear)}; else as two seeds differ"
    claim = (
        "Not in the paper: training on the any-order bound is better at equal tokens (alpha_0 = 1, 0.5, 0.125; exact)"
    )
    return [[claim, "–", here, held if clear else "not told apart here"]]
