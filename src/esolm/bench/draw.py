"""Drawing tokens from logits, against the usual implementations: softmax and multinomial, and a sort for top-p.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.draw import Draw
from ..core.randomness import Randomness
from ..sampling.chooser import Chooser
from .naive import multinomial, sorted_nucleus
from .report import table
from .timing import interleaved, ratio, summary

TWIN = {"draw": "softmax + multinomial", "top-p": "top-p by a sort"}

CALLS = 16
"""Minimum number of rows drawn per timed measurement."""


def cases(logits: Tensor, top_p: float) -> dict[str, Callable[[int], Tensor]]:
    """Our draws, including their random numbers, and the reference implementations."""
    rows, mask_id = len(logits), logits.shape[1] - 1
    position = torch.arange(rows)

    def ours(draw: Draw) -> Callable[[int], Tensor]:
        return lambda i: Chooser(draw, Randomness(i), mask_id)(logits, position, position)

    return {
        "draw": ours(Draw()),
        TWIN["draw"]: lambda i: multinomial(logits, mask_id),
        "top-p": ours(Draw(top_p=top_p)),
        TWIN["top-p"]: lambda i: sorted_nucleus(logits, mask_id, top_p),
    }


def run(
    rows: list[int] | None = None,
    vocab_size: int = 50258,
    top_p: float = 0.9,
    spread: float = 3.0,
    dtype: str = "float32",
    rounds: int = 15,
) -> dict[str, Any]:
    """Time draws from logits against softmax + multinomial, and top-p against a full sort.

    Args:
        rows: numbers of tokens drawn at once; 1, 16 and 64 by default.
        vocab_size: vocabulary size, including the mask token.
        top_p: probability mass of the nucleus.
        spread: standard deviation of the normally distributed logits.
        dtype: data type of the logits, float32 or bfloat16.
        rounds: number of timed rounds.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; it must be float32 or bfloat16")
    found: list[dict[str, Any]] = []
    for number in rows or [1, 16, 64]:
        torch.manual_seed(0)
        logits = (spread * torch.randn(number, vocab_size)).to(getattr(torch, dtype))
        with torch.inference_mode():
            seconds = interleaved(cases(logits, top_p), rounds, warmup=2, calls=max(1, CALLS // number))
        for name, twin in TWIN.items():
            gain = ratio(seconds[twin], seconds[name]).record("faster", 2, "faster_quartiles")
            times = {
                "milliseconds": round(1e3 * summary(seconds[name]).median, 3),
                "twin_milliseconds": round(1e3 * summary(seconds[twin]).median, 3),
            }
            found.append({"rows": number, "draw": name, "twin": twin, **gain, **times})
    columns = {
        "draw": "draw", "rows": "rows:d", "× faster": "faster", "quartiles": "faster_quartiles", "ms": "milliseconds",
        "than": "twin", "its ms": "twin_milliseconds",
    }  # fmt: skip
    table(f"draws from {vocab_size} logits, {dtype}, top_p {top_p:g}", columns, found)
    return {"cases": found}
