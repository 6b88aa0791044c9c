"""Training on the any-order bound against the paper's two-term loss, at equal compute."""

from __future__ import annotations

from experiments.runner.document import Results, number, table

ALPHAS = ("1", "0.5", "0.125")
STEPS = ("8", "32", "128")


def report(results: Results) -> str:
    """Return the table of likelihood and judged samples of both losses."""
    rows = []
    for alpha in ALPHAS:
        for name, run, sampled in (
            ("two terms", f"esolm-{alpha}", f"esolm-{alpha}-{alpha}"),
            *((f"any order, equal {what}", *[f"any_order-{alpha}-{what}"] * 2) for what in ("tokens", "seconds")),
        ):
            found = results.get(f"exact-{run}")
            if found is None:
                continue
            cells = [number(jackknife(results, run), found[0]["stderr"], 3)]
            for steps in STEPS:
                judged = results.get(f"judge-{sampled}-{steps}")
                cells.append("–" if judged is None else number(judged["nats"], judged["stderr"]))
            rows.append([f"alpha_0 = {alpha}, {name}", *cells])
    columns = ("loss", "jackknife, nats", *(f"judged at T = {steps}" for steps in STEPS))
    return "\n\n".join(["## The any-order loss (not in the paper)", METHOD, table(columns, rows), verdict(results)])


METHOD = """The paper's loss has two terms, each on its share of the batch; `loss: any_order` scores every token of every example
under one order in one two-stream pass. It feeds the network more tokens per example, so it gets fewer steps: as many as
feed the same total number of tokens, or as many as take the same time. The likelihood is a jackknife estimate of 32
orders on 64 sequences, in nats per token; its [remaining bias](#perplexity-table-1-finding-1) of a few hundredths of a
nat may differ between the losses. The judge's nats per token are of 256 samples."""


def jackknife(results: Results, run: str) -> float | None:
    """Return the jackknife estimate of a run in nats per token, if it was measured."""
    found = results.get(f"exact-{run}")
    return None if found is None else found[0]["curve"][-1]["jackknife"]


def noise(results: Results) -> float:
    """Return the largest difference between two seeds of the paper's loss."""
    pairs = [[jackknife(results, f"esolm-{alpha}{seed}") for seed in ("", "-seed1")] for alpha in ALPHAS]
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


def gains(results: Results, equal: str) -> dict[str, float]:
    """Return the gain of the any-order loss in nats, by alpha_0."""
    found = {}
    for alpha in ALPHAS:
        two, any_order = (jackknife(results, run) for run in (f"esolm-{alpha}", f"any_order-{alpha}-{equal}"))
        if two is not None and any_order is not None:
            found[alpha] = two - any_order
    return found


def verdict(results: Results) -> str:
    """Summarise the differences in likelihood and in quality."""
    lines = []
    for equal in ("tokens", "seconds"):
        if found := gains(results, equal):
            each = "; ".join(f"{gain:+.2f} at alpha_0 = {alpha}" for alpha, gain in found.items())
            lines.append(f"Gain of the any-order loss at equal {equal}, in nats per token: {each}.")
    if lines:
        lines.append(f"Two seeds of the paper's loss differ by up to {noise(results):.2f}.")
    better = [
        results[f"judge-esolm-{alpha}-{alpha}-{steps}"]["nats"] - found["nats"]
        for alpha in ALPHAS
        for steps in STEPS
        if f"judge-esolm-{alpha}-{alpha}-{steps}" in results
        and (found := results.get(f"judge-any_order-{alpha}-tokens-{steps}")) is not None
    ]
    if better:
        lines.append(
            f"At equal tokens the judge prefers its samples in {sum(gain > 0 for gain in better)} of {len(better)} settings;"
            f" the differences range from {min(better):+.2f} to {max(better):+.2f} nats."
        )
    return " ".join(lines)


def findings(results: Results) -> list[list[str]]:
    """Return a row for the table of findings."""
    found = gains(results, "tokens")
    if len(found) < len(ALPHAS):
        return []
    here = ", ".join(f"{gain:+.2f}" for gain in found.values()) + " nats"
    clear = [alpha for alpha, gain in found.items() if gain > noise(results)]
    held = (
        "yes"
        if len(clear) == len(found)
        else f"at alpha_0 = {', '.join(clear)}; otherwise within the difference of two seeds"
    )
    claim = "Not in the paper: training on the any-order bound is better at equal tokens (alpha_0 = 1, 0.5, 0.125; jackknife)"
    return [[claim, "–", here, held if clear else "inconclusive here"]]
