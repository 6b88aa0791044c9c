"""`esolm words`: the share of words in samples that occur in real texts."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import report


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return report(
        "esolm.metrics.words",
        "words",
        "words SAMPLES.jsonl CORPUS",
        "How many words of the samples that `esolm sample --out` wrote occur in a corpus of real texts.",
        argv,
    )
