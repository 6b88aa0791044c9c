"""`esolm overlap`: ROUGE and BERTScore of predictions."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import report


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return report(
        "esolm.metrics.overlap",
        "overlap",
        "overlap FILE.jsonl",
        "ROUGE, and BERTScore by a local model, of the predictions that `esolm sample --out` wrote.",
        argv,
    )
