"""Training on the any-order bound itself against the paper's two terms, at equal compute."""

from __future__ import annotations

from esolm.reproduce.document import Results, number, table

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
            cells = [number(found[0]["curve"][-1]["jackknife"], found[0]["stderr"], 3)]
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


def verdict(results: Results) -> str:
    """The difference at equal tokens."""
    told = []
    for alpha in ALPHAS:
        both = [results.get(f"exact-{run}") for run in (f"esolm-{alpha}", f"any_order-{alpha}-tokens")]
        if all(both):
            two, any_order = (found[0]["curve"][-1]["jackknife"] for found in both)
            told.append(f"{two - any_order:+.3f} at alpha_0 = {alpha}")
    return f"The any-order loss gains at equal network tokens, in nats per token: {'; '.join(told)}." if told else ""
