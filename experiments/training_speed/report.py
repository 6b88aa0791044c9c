"""A training step of every system on the network of these experiments."""

from __future__ import annotations

from experiments.runner.document import Results, number, table


def report(results: Results) -> str:
    """Ratios to MDLM's step, beside the count."""
    case = results["step"]["cases"][0]
    rows = [
        [name, number(r["ratio_to_mdlm"]), number(r["predicted_ratio"]), f"{r['tokens_per_second']:,}"]
        for name, r in case["systems"].items()
    ]
    method = f"""A whole step (forward, backward, AdamW) on two cores, L = {case["length"]}, vocabulary {case["vocab_size"]}, each system
held against a step of MDLM just before it; beside it the ratio that counting rows and pairs predicts."""
    return "\n\n".join(["## Training speed", method, table(("system", "× MDLM", "counted", "tokens/s"), rows)])
