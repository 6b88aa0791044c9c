"""`esolm judge`: generative perplexity and entropy of samples."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import report


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return report(
        "esolm.metrics.judge",
        "judge",
        "judge SAMPLES.jsonl JUDGE",
        "Quality of the samples that `esolm sample --out` wrote, by an outside causal language model.",
        argv,
    )
