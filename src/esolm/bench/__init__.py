"""Benchmarks that users can rerun on their machines with `esolm bench NAME`.

Each module has a function `run(...)` whose arguments are the command's options; it prints tables and returns the
results as a dict. Cases are timed in turn within one run and reported as ratios, since absolute times depend on the
machine. May import every package but `cli`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

NAMES = {
    "train": "a training step of every system, and the cost predicted from operation counts",
    "latency": "one cached step in float32, bf16 and int8, against the authors' implementation, AR and GPT-2",
    "sample": "a whole sample with NFE = L for Eso-LM, AR, BD3-LM and MDLM",
    "draw": "drawing tokens from logits, against softmax + multinomial and a sort",
    "precision": "KL divergence from float32 and perplexity of a trained model in bf16 and int8",
    "likelihood": "all conditionals of an order in one pass, against a plain forward pass and against L passes",
    "start": "a new process from the shell to its first sample, by phase",
    "speculative": "passes, acceptance and time of speculative sampling, against one token at a time",
    "caches": "approximate caches of MDLM against no cache, beside the exact cache of an Eso-LM",
    "points": "passes and seconds of samples of trained models under several settings",
    "serve": "serving: continuous batching against static batches and one at a time, and the overhead of the server",
    "machine": "matrix products and memory reads: the limits of this machine",
}
"""Benchmarks and what they measure."""


def find(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function of a benchmark; raises ValueError for an unknown name."""
    check_name(name)
    run: Callable[..., dict[str, Any]] = importlib.import_module(f"{__name__}.{name}").run
    return run


def check_name(name: str) -> None:
    """Raise ValueError for a benchmark that does not exist."""
    if name not in NAMES:
        raise ValueError(f"no benchmark {name!r}: choose from {', '.join(NAMES)}")
