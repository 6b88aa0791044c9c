"""`esolm overlap`: ROUGE and BERTScore of predictions."""

from __future__ import annotations

from .parsing import Reporting

_COMMAND = Reporting(
    "esolm.metrics.overlap",
    "overlap",
    "overlap FILE.jsonl",
    "ROUGE, and BERTScore by a local model, of the predictions that `esolm sample --out` wrote.",
)
make_parser, run = _COMMAND.make_parser, _COMMAND.run
