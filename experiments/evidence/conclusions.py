"""What we conclude from the gains of the second round; every sentence depends on a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.evidence.gains import ROWS, counted, decisive, gain, interpolation

Results = Mapping[str, Any]


def conclusions(results: Results) -> list[str]:
    """Return what we conclude, one sentence or two for each question, by the verdicts."""
    found = (ends(results), half(results), loss(results), attention(results), left_to_right(results))
    return [text for text in found if text]


def ends(results: Results) -> str:
    """Conclude on alpha_0."""
    steps = interpolation(results)
    if not steps or any(step.nats < 0 for step in steps):
        return ""
    names = ("`alpha_0` = 1", "0.5", "0.25", "0.125", "AR")
    small = [
        f"between {first} and {second} ({step} nats)"
        for first, second, step in zip(names, names[1:], steps, strict=False)
        if not step.significant
    ]
    text = "`alpha_0` moves the likelihood from masked diffusion to left to right, as in the paper"
    what = "differences" if len(small) > 1 else "difference"
    return text + (
        f"; the {what} {' and '.join(small)} {'are' if len(small) > 1 else 'is'} not significant." if small else "."
    )


def half(results: Results) -> str:
    """Conclude on kappa."""
    others = {kappa: decisive(results, "esolm-0.5", f"esolm-0.5-kappa-{kappa}") for kappa in ("0.125", "0.75")}
    known = {kappa: each for kappa, each in others.items() if each is not None}
    if not known:
        return ""
    words = {"confirmed": "better than", "contradicted": "worse than"}
    sides = [
        f"{words.get(each.verdict, 'not distinguishable from')} {kappa} ({each} nats)" for kappa, each in known.items()
    ]
    text = f"`kappa` = 0.5 is {' and '.join(sides)}, {counted(min(each.seeds for each in known.values()))}."
    return text + (" In the paper training (A) diverged at 0.125; our (B) did not." if "0.125" in known else "")


def loss(results: Results) -> str:
    """Conclude on the any-order loss."""
    words = {"confirmed": "better", "contradicted": "worse"}
    made = []
    for alpha in ("1", "0.125"):
        if (found := decisive(results, f"any-{alpha}", f"esolm-{alpha}")) is not None:
            how = words.get(found.verdict, "not distinguishable from the paper's loss")
            made.append(f"{how} at `alpha_0` = {alpha} ({found.counted})")
    text = "With as many network tokens, `loss: any_order`, which the paper does not try, is"
    return f"{text} {', and '.join(made)}." if made else ""


def attention(results: Results) -> str:
    """Conclude on the price of causal attention."""
    pairs = {
        "MDLM": gain(results, "mdlm", "esolm-1"),
        "MDLM if both have the weights of the bound": gain(results, "mdlm", "esolm-1-elbo"),
        "MDLM if both have unit weights": gain(results, "mdlm-unit", "esolm-1"),
        "(A)": gain(results, "esolm-a-1", "esolm-1"),
    }
    words = {"confirmed": "behind", "contradicted": "ahead of"}
    known = {name: each for name, each in pairs.items() if each is not None}
    if not known:
        return ""
    sides = [
        f"{words.get(each.verdict, 'not distinguishable from')} {name} ({-each.nats:+.3f} ± {each.error:.3f} nats)"
        for name, each in known.items()
    ]
    seen = any(each.verdict == "confirmed" for each in known.values())
    price = "shows in some comparisons" if seen else "does not show at this scale"
    return (
        f"The paper's price of causal attention {price}. At `alpha_0` = 1 Eso-LM (B) is {'; '.join(sides)}. These are "
        "short runs of small networks: they do not say what holds after long training."
    )


def left_to_right(results: Results) -> str:
    """Conclude on AR, if it is ahead of every other run."""
    gains = {run: decisive(results, "ar", run) for run in ROWS if run != "ar"}
    known = {run: each for run, each in gains.items() if each is not None}
    if not known or any(each.verdict != "confirmed" for each in known.values()):
        return ""
    nearest = min(known, key=lambda run: known[run].nats)
    return (
        f"AR has a higher likelihood than any other system; the nearest is {ROWS[nearest]} ({known[nearest]} nats). "
        "If you need neither another order nor infilling, use AR."
    )
