"""`esolm molecules`: validity, uniqueness and novelty of samples of SMILES."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import report


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return report(
        "esolm.metrics.molecules",
        "molecules",
        "molecules SAMPLES.jsonl",
        "How many of the samples that `esolm sample --out` wrote are valid, distinct and new molecules.",
        argv,
    )
