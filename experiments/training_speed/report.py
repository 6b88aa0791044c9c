"""A training step of every system on the network of these experiments."""

from __future__ import annotations

from experiments.runner.document import Results, number, table


def report(results: Results) -> str:
    """Return the ratios to MDLM's step, measured and predicted."""
    case = results["step"]["cases"][0]
    rows = [
        [name, number(r["ratio_to_mdlm"]), number(r["predicted_ratio"]), f"{r['tokens_per_second']:,}"]
        for name, r in case["systems"].items()
    ]
    method = f"""A whole step (forward, backward, AdamW) on two cores, L = {case["length"]}, vocabulary {case["vocab_size"]}. Each step is
compared with a step of MDLM just before it. "Predicted" is the ratio of operation counts."""
    return "\n\n".join(["## Training speed", method, table(("system", "× MDLM", "predicted", "tokens/s"), rows)])
