"""`esolm mauve`: MAUVE between samples and real texts."""

from __future__ import annotations

from .parsing import Reporting

_COMMAND = Reporting(
    "esolm.metrics.mauve",
    "mauve",
    "mauve SAMPLES.jsonl REFERENCES EMBEDDER",
    "MAUVE between the samples that `esolm sample --out` wrote and real texts, by a local embedder.",
)
make_parser, run = _COMMAND.make_parser, _COMMAND.run
