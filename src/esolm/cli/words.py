"""`esolm words`: the share of words in samples that occur in real texts."""

from __future__ import annotations

from .parsing import Reporting

_COMMAND = Reporting(
    "esolm.metrics.words",
    "words",
    "words SAMPLES.jsonl CORPUS",
    "How many words of the samples that `esolm sample --out` wrote occur in a corpus of real texts.",
)
make_parser, run = _COMMAND.make_parser, _COMMAND.run
