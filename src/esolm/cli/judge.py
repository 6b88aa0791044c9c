"""`esolm judge`: generative perplexity and entropy of samples."""

from __future__ import annotations

from .parsing import Reporting

_COMMAND = Reporting(
    "esolm.metrics.judge",
    "judge",
    "judge SAMPLES.jsonl JUDGE",
    "Quality of the samples that `esolm sample --out` wrote, by an outside causal language model.",
)
make_parser, run = _COMMAND.make_parser, _COMMAND.run
