"""`esolm mauve`: MAUVE between samples and real texts."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import report


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return report(
        "esolm.metrics.mauve",
        "mauve",
        "mauve SAMPLES.jsonl REFERENCES EMBEDDER",
        "MAUVE between the samples that `esolm sample --out` wrote and real texts, by a local embedder.",
        argv,
    )
