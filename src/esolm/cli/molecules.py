"""`esolm molecules`: validity, uniqueness and novelty of samples of SMILES."""

from __future__ import annotations

from .parsing import Reporting

_COMMAND = Reporting(
    "esolm.metrics.molecules",
    "molecules",
    "molecules SAMPLES.jsonl",
    "How many of the samples that `esolm sample --out` wrote are valid, distinct and new molecules.",
)
make_parser, run = _COMMAND.make_parser, _COMMAND.run
