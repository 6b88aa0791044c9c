"""Second round: Table 1 on stories, its open comparisons over seeds, and samples to read."""

from __future__ import annotations

import math
import statistics

from experiments.evidence import gains
from experiments.evidence.conclusions import conclusions as conclusions
from experiments.evidence.gains import (
    CHAIN,
    JACKKNIFE,
    ROWS,
    SEEDS,
    Gain,
    between,
    estimate,
    gain,
    interpolation,
    scores,
)
from experiments.runner.document import Results, number, table

PAPER = {
    "mdlm": 31.78, "bd3lm-4": 28.23, "esolm-1": 36.12, "esolm-0.5": 32.53, "esolm-0.25": 29.23, "esolm-0.125": 26.29,
    "esolm-a-1": 30.96, "esolm-a-0.25": 28.44, "d3pm-absorb": 76.90, "d3pm-uniform": 137.90, "sedd-absorb": 32.71,
    "sedd-uniform": 40.25, "udlm": 36.71, "duo": 33.68, "diffusionbert": 63.78, "diffusion_lm": 118.62,
}  # fmt: skip
"""Perplexities of the bounds on LM1B in the paper's Table 1 and, for (A), its table of (A) and (B)."""
PAPER_EXACT = {
    "ar": 22.83, "mdlm": 26.82, "esolm-1": 31.65, "esolm-0.5": 28.07, "esolm-0.25": 24.80, "esolm-0.125": 23.02,
}  # fmt: skip
"""The exact column of its Table 1: importance-weighted bounds of 5,000 orders, for MDLM of 1,000."""
CORPUS_TOKENS = 3_937_024
METHOD = """Models of four blocks of width 192 ({parameters}) on children's stories: BPE with 2,048 entries, sequences of
128 tokens, batches of 32, learning rate 0.001. They have seen {tokens:.1f} million tokens (any-order loss: as many network tokens,
hence fewer tokens of text), one thread each, in bf16. Nats per token are measured on the same 256 sequences of real
held-out stories, ± the standard error over sequences; standard errors are shown for seed 0 only.

*Exact* is the true likelihood for AR and BD3-LM (over all orders in each block), and for Eso-LM an estimate of it, the jackknife
of {orders} orders. Its remaining bias is of the size of its change from {half} to {orders} orders, the next column, or larger, since
the change shrinks slowly; the ± does not include it. *Bound* is the bound that the model was trained with. For Eso-LM the two are
of slightly different processes ([likelihood](likelihood.md#what-the-numbers-mean)): in the diffusion phase of training a mask sees
the masks before it, under an order it sees clean tokens only. So their gap is not just the looseness of the bound. The paper's
numbers are perplexities on LM1B, of models of 12 layers, and show the order of the systems at best."""
SIZES = ("small", "0", "large")
UNPLANNED = {
    "kappa = 0.25": ("bound-esolm-0.5-kappa-0.25-0",),
    "the any-order loss at equal seconds instead of equal tokens (the first round has it)": ("bound-any-1-seconds-0",),
    "books as a second corpus": ("bound-books-ar-0",),
}
"""What the plan of this round asked for beside the rows of the table, and the results that would show it."""
RULE = """**The rule.** A gain is the difference in nats per token between two models with the same seed, as a mean over the n runs
that both kinds have: a run for each seed and, of AR, MDLM and Eso-LM at alpha_0 = 1, one more of seed 0 in float32{rounding}. Its error, after the ±, has two parts, added in quadrature. The first is s / √n, where s is the standard
deviation of such differences, pooled over all comparisons with several runs: {spreads}. Where a comparison has one
run, its spread is assumed equal to the pooled one. The second is the chance of the evaluation. Every model is scored with the
same draws of masks, so that it does not fall with n: for each side with a drawn bound, e² = max(0, stderr² − stderr of AR²),
since AR draws nothing and its standard error comes from the texts alone, which are the same for both sides. A gain is
*confirmed* if it is above t times its error and *contradicted* if it is below minus that, with Student's t at 1 %, two-sided, for
the degrees of freedom of s; otherwise it is *not distinguishable* from zero. Where both sides have a jackknife for at least two
runs, the verdict is that of the jackknife, which estimates the likelihood itself, with the s of jackknife differences; the gain
by the bound is in brackets. What is left of the jackknife's bias is on both
sides and not in the error. Some comparisons share a model, so that their differences are not quite independent."""


def parts(results: Results, run: str) -> list[str]:
    """Return the cells of a row after its name."""
    found, exact = scores(results, run), scores(results, run, JACKKNIFE)
    bounds = [
        number(found[seed][0], found[seed][1] if not seed else None, 3) if seed in found else "" for seed in SEEDS
    ]
    best, change = "", ""
    if run == "ar":
        best, bounds[0] = bounds[0], ""
    elif exact:
        seed = min(exact)
        moved = estimate(results[f"exact-{run}-{seed}"])[1]
        best = number(*exact[seed], 3) + (f" (seed {seed})" if seed else "")
        change = "" if moved is None else f"-{moved:.3f}" if moved > 0 else f"+{-moved:.3f}"
    paper = [f"{values[run]:.2f}" if run in values else "" for values in (PAPER_EXACT, PAPER)]
    return [best, change, *bounds, f"{math.exp(found[0][0]):,.1f}", *paper]


def orders(results: Results) -> int:
    """The number of orders of the jackknife."""
    counts = [results[name][0].get("num_orders") or 0 for name in results if name.startswith("exact-")]
    return max(counts, default=0) or 64


def method(results: Results) -> str:
    """Say what was trained and measured."""
    runs = {name.removeprefix("run-"): results[name] for name in results if name.startswith("run-")}
    first = {run.removesuffix("-0"): about for run, about in runs.items() if run.endswith("-0")}
    sizes = {run: about["parameters"] for run, about in first.items() if "parameters" in about}
    others = sorted({f"{size / 1e6:.2f}" for run, size in sizes.items() if run != "ar"})
    parameters = f"{' or '.join(others) or '?'} million parameters"
    if "ar" in sizes:
        parameters += f"; AR, which has no AdaLN, {sizes['ar'] / 1e6:.2f} million"
    return METHOD.format(
        parameters=parameters,
        tokens=max((about.get("tokens", 0) for about in runs.values()), default=0) / 1e6,
        orders=orders(results),
        half=orders(results) // 2,
    )


def report(results: Results) -> str:
    """Return the table, the comparisons and the texts."""
    half = orders(results) // 2
    columns = (
        "system", "exact", f"change from K = {half} to {2 * half}", "bound", "seed 1", "seed 2", "perplexity",
        "paper, exact", "paper, bound",
    )  # fmt: skip
    made = [[name, *parts(results, run)] for run, name in ROWS.items() if f"bound-{run}-0" in results]
    texts_of = [
        "## Second round: stories",
        method(results),
        table(columns, made),
        unreached(results),
        cost(results),
        heart(results),
        ahead(results),
        longer(results),
        rule(results),
        sizes(results),
        texts(results),
    ]
    return "\n\n".join(text for text in texts_of if text)


def unreached(results: Results) -> str:
    """Name what the budget did not reach."""
    names = [name for run, name in ROWS.items() if f"bound-{run}-0" not in results]
    if any(f"bound-ar-{size}" not in results for size in SIZES):
        names.append("AR, MDLM and Eso-LM in two other sizes at equal tokens")
    names += [what for what, needed in UNPLANNED.items() if not all(name in results for name in needed)]
    seeds = [name for run, name in ROWS.items() if len(scores(results, run)) == 1]
    text = f"Not reached in this round: {'; '.join(names)}." if names else ""
    return f"{text} Of one seed only: {'; '.join(seeds)}.".strip() if seeds else text


def cost(results: Results) -> str:
    """Say how much was trained, and how long that took where it is recorded."""
    runs = [results[name] for name in results if name.startswith(("run-", "size-"))]
    if not runs:
        return ""
    tokens = sum(about.get("tokens", 0) for about in runs)
    timed = [about for about in runs if "seconds" in about]
    text = f"The {len(runs)} runs of this round were trained on {tokens / 1e6:.0f} million tokens in all"
    if not timed:
        return f"{text}. Their time is not recorded."
    hours = sum(about["seconds"] * (about["config"]["compute"]["threads"] or 1) for about in timed) / 3600
    share = sum(about["tokens"] for about in timed) / tokens
    return f"{text}. Core-hours are recorded for {len(timed)} of them, with {100 * share:.0f} % of the tokens: {hours:.1f}."


def heart(results: Results) -> str:
    """Compare AR on stories that it was trained on with others."""
    names = [name for name in results if name.startswith("run-ar-")]
    if "seen" not in results or "unseen" not in results or not names:
        return ""
    seen, unseen = ((results[name][0]["nats"], results[name][0]["stderr"]) for name in ("seen", "unseen"))
    gap, error = unseen[0] - seen[0], math.hypot(seen[1], unseen[1])
    learned = (
        "it has learned some of them by heart"
        if gap > 2 * error
        else "there is no sign that it has learned them by heart"
    )
    return (
        f"The corpus has 15 MB, {CORPUS_TOKENS / 1e6:.1f} million tokens, so that a run reads it "
        f"{results[names[0]].get('tokens', 0) / CORPUS_TOKENS:.1f} times. After that AR has {number(*seen, 3)} nats on real stories that "
        f"it was trained on, and {number(*unseen, 3)} on others, {gap:+.3f} ± {error:.3f}: {learned}. Whether a larger corpus would "
        "have changed the results was not measured."
    )


def ahead(results: Results) -> str:
    """Say what of the lead of Eso-LM at alpha_0 = 1 over MDLM is due to the weights, if it leads."""
    lead, weights = gain(results, "esolm-1", "mdlm"), gain(results, "esolm-1", "esolm-1-elbo")
    rest = gain(results, "esolm-1-elbo", "mdlm")
    if lead is None or weights is None or rest is None or lead.verdict != "confirmed":
        return ""
    return (
        f"**MDLM against Eso-LM at alpha_0 = 1.** Eso-LM leads here ({lead.counted}); in the paper it is behind. As in the paper, MDLM is "
        "trained with the weights of its bound and Eso-LM at alpha_0 = 1 with unit weights. With the weights of the bound on both sides, "
        f"the lead is {rest.counted}, {significance(rest)}; unit weights gain Eso-LM {weights.counted}, {significance(weights)}. "
        f"{units(results)}That the bounds are right is tested on enumerated distributions (`tests/property/test_bounds.py`). What "
        "bidirectional attention gains in long training, these runs cannot show."
    )


def significance(found: Gain) -> str:
    """Say whether a gain is significant by the rule."""
    return "significant by the rule below" if found.significant else "not significant by the rule below"


def units(results: Results) -> str:
    """Say what unit weights do for bidirectional attention."""
    over, both = gain(results, "mdlm-unit", "mdlm"), gain(results, "mdlm-unit", "esolm-1")
    if over is not None and both is not None:
        return (
            f"MDLM with unit weights has a gain of {over.counted} over MDLM, {significance(over)}, and of {both.counted} over Eso-LM with "
            f"unit weights, {significance(both)}. "
        )
    hybrid = between(results, "bound-d3pm-absorb-0", "bound-mdlm-0")
    if hybrid is None:
        return ""
    return (
        f"D3PM with absorbing noise, whose attention is bidirectional and whose hybrid loss is for the most part a cross entropy with "
        f"equal weights, has a gain of {hybrid.counted} over MDLM, {significance(hybrid)}. "
    )


def longer(results: Results) -> str:
    """Compare MDLM and Eso-LM with the same weights of the loss in a smaller network and a longer run, as training goes on."""
    names = ("mdlm-small-long", "esolm-1-elbo-small-long")
    runs = [results[f"size-{name}"] for name in names if f"size-{name}" in results]
    found = between(results, *(f"bound-{name}" for name in names))
    if len(runs) < 2 or found is None:
        return ""
    curves = [{int(step): loss for step, loss in run["validations"].items()} for run in runs]
    shown = [step for step in sorted(curves[0]) if step in curves[1] and step % (max(curves[0]) // 8) == 0]
    made = [
        [f"{step:,}", *(number(curve[step], None, 3) for curve in curves), f"{curves[1][step] - curves[0][step]:+.3f}"]
        for step in shown
    ]
    ends = " and ".join(number(results[f"bound-{name}"][0]["nats"], None, 3) for name in names)
    fate = {
        "confirmed": "MDLM is ahead, as in the paper",
        "contradicted": "Eso-LM stays ahead",
        "not distinguishable": "the two cannot be told apart",
    }.get(found.verdict, "there is no verdict without a second seed of any comparison")
    return (
        f"**Check with a smaller network and longer training.** A network of half the width ({runs[0]['parameters'] / 1e6:.1f} million "
        f"parameters) was trained on four times as many tokens ({runs[0]['tokens'] / 1e6:.0f} million, the corpus "
        f"{runs[0]['tokens'] / CORPUS_TOKENS:.1f} times), as MDLM and as Eso-LM at alpha_0 = 1 with the same weights of the loss, so that only "
        "attention differs; one seed. The table has the bound on the validation stories as training goes on, without errors. On the 256 "
        f"sequences of the table above they end at {ends} nats, a gain of {found} for MDLM: by the rule below {fate}. Network, length of "
        "training and number of epochs all changed, so this does not say which of them matters.\n\n"
        + table(("steps", "MDLM", "Eso-LM", "gain of MDLM"), made)
    )


def findings(results: Results) -> list[list[str]]:
    """Return rows for the table of findings: the order of alpha_0, and every comparison."""
    steps = interpolation(results)
    if not steps:
        return gains.rows(results)
    held = [step for step in steps if step.verdict == "confirmed"]
    means = [statistics.mean(nats for nats, _ in scores(results, run).values()) for run in CHAIN]
    here = ", ".join(f"{math.exp(mean):.1f}" for mean in means)
    paper = ", ".join(f"{(PAPER_EXACT if run == 'ar' else PAPER)[run]:.1f}" for run in CHAIN)
    claim = "**1.** alpha_0 = 1, 0.5, 0.25, 0.125 and AR interpolate between diffusion and left to right (perplexity of the bound)"
    verdict = "confirmed" if len(held) == len(steps) else f"{len(held)} of {len(steps)} steps confirmed"
    return [[claim, paper, here, verdict], *gains.rows(results)]


def rule(results: Results) -> str:
    """State the rule of the comparisons."""
    if not gains.rows(results):
        return ""
    kinds = {gains.BOUND: "bounds", JACKKNIFE: "the jackknife"}
    found = {title: gains.spread(results, kind) for kind, title in kinds.items()}
    known = [
        f"{number(noise, None, 4)} nats with {freedom} degrees of freedom for {title}"
        for title, (noise, freedom) in found.items()
        if freedom
    ]
    return RULE.format(spreads=", ".join(known) or "no comparison has two runs yet", rounding=rounding(results))


def rounding(results: Results) -> str:
    """Say what the precision alone changes, of the runs that were made in both."""
    pairs = {
        ROWS[run]: [scores(results, run).get(kind) for kind in (0, "0-float32")] for run in ("ar", "mdlm", "esolm-1")
    }
    changes = [f"{name} {plain[0] - low[0]:+.3f}" for name, (low, plain) in pairs.items() if low and plain]
    if not changes:
        return ""
    return f" (bound in float32 minus that in bf16, nats: {'; '.join(changes)}; so rounding alone changes a run as another seed does)"


def sizes(results: Results) -> str:
    """Return the bounds of AR, MDLM and Eso-LM by the size of the network, and their gaps to AR."""
    made = []
    for size in SIZES:
        names = [f"bound-{run}-{size}" for run in ("ar", "mdlm", "esolm-1")]
        about = results.get(f"run-ar-{size}") or results.get(f"size-ar-{size}")
        if about is None or any(name not in results for name in names):
            continue
        found = [number(results[name][0]["nats"], results[name][0]["stderr"], 3) for name in names]
        gaps = [str(between(results, names[0], name)) for name in names[1:]]
        made.append([f"{about['parameters'] / 1e6:.1f}M", *found, *gaps])
    if len(made) < 2:
        return ""
    text = """The same tokens with networks of other sizes, one seed: nats per token of AR, the bounds of MDLM and Eso-LM, and AR's gains over them.
Networks of so few sizes, trained for the same short time, show a direction at best; they are not a scaling law."""
    return f"{text}\n\n" + table(
        ("parameters of AR", "AR", "MDLM", "Eso-LM, alpha_0 = 1", "AR over MDLM", "AR over Eso-LM"), made
    )


def texts(results: Results) -> str:
    """Return the first sample of each model, not selected."""
    found = {run: results[f"texts-{run}-0"] for run in ROWS if f"texts-{run}-0" in results}
    if not found:
        return ""
    shown = [
        f"**{ROWS[run]}** ({record['nfe'][0]} passes). {' '.join(record['texts'][0].split())}"
        for run, record in found.items()
    ]
    head = """**Samples.** The first of four samples with seed 0, not selected: the default sampler of each system with a nucleus of 0.9, 128
tokens, as many steps as tokens. Each is a stretch of a stream of stories, so it may begin and end within one."""
    return "\n\n".join([head, *shown])
