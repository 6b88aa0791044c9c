"""The likelihood of an order in one pass, against a plain forward pass and against one pass per token.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.terms import token_nats
from ..core.visibility import causal
from ..net.conditionals import bidirectional_nats, order_nats
from ..net.denoiser import Denoiser, Rows
from ..runtime.machine import autocast, pick_precision
from .latency import network
from .report import table
from .timing import interleaved, ratio, summary

ORDER, PLAIN, PASSES = "one pass per order", "plain forward", "one pass per token"


def cases(net: Denoiser, x: Tensor, mask_id: int, passes: int, precision: str) -> dict[str, Callable[[int], Tensor]]:
    """Score x [B, L] under a new order each round, its next tokens, and `passes` of the L separate passes."""
    batch, length = x.shape
    everything = torch.ones_like(x, dtype=torch.bool)
    position = torch.arange(length)[None]
    chosen = (torch.arange(length) * passes // length).diff(prepend=torch.tensor([-1])) > 0

    def orders(i: int) -> Tensor:
        return torch.rand(batch, length, generator=torch.Generator().manual_seed(i)).argsort(-1)

    def plain(i: int) -> Tensor:
        logits = net(x, position, causal(length), out=Rows(slice(0, length)))
        return token_nats(logits.flatten(0, 1), x.flatten(), mask_id)

    def each_token(i: int) -> Tensor:
        return bidirectional_nats(net, x[:1], orders(i)[:1], chosen[None], mask_id, batch_size=batch)

    def timed(case: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        def run(i: int) -> Tensor:
            with torch.no_grad(), autocast(x.device, precision):
                return case(i)

        return run

    return {
        ORDER: timed(lambda i: order_nats(net, x, orders(i), everything, mask_id)),
        PLAIN: timed(plain),
        PASSES: timed(each_token),
    }


def measure(
    length: int, vocab_size: int, batch: int, layers: int, width: int, rounds: int, passes: int, precision: str
) -> dict[str, Any]:
    """Measure seconds and ratios for one size."""
    net = network(layers, width, vocab_size, length)
    x = torch.randint(0, vocab_size - 1, (batch, length))
    passes = min(passes, length)
    seconds = interleaved(cases(net, x, vocab_size - 1, passes, precision), rounds)
    cost = ratio(seconds[ORDER], seconds[PLAIN])
    # One order of one sequence by L passes of equal size, against one order of one sequence of the batch.
    gain = ratio([s * length / passes for s in seconds[PASSES]], [s / batch for s in seconds[ORDER]])
    return {
        "length": length,
        "vocab_size": vocab_size,
        "batch": batch,
        **cost.record("cost_of_plain_forward", 3, "cost_quartiles"),
        **gain.record("faster_than_passes", 1, "faster_quartiles"),
        "passes_timed": passes,
        "orders_per_second": round(batch / summary(seconds[ORDER]).median, 2),
        "orders_per_second_by_passes": round(passes / length / summary(seconds[PASSES]).median, 5),
    }


def run(
    lengths: list[int] | None = None,
    vocab_size: int = 4098,
    tokens: int = 4096,
    layers: int = 6,
    width: int = 384,
    rounds: int = 9,
    passes: int = 16,
    precision: str = "float32",
) -> dict[str, Any]:
    """Time one pass for all conditionals of an order: its cost in plain forward passes and its gain over L passes.

    Both sides compute logits and nats of every position. With one mask query per token the ideal cost is 2.

    Args:
        lengths: sequence lengths; 256 and 1024 by default.
        vocab_size: vocabulary size, including the mask token.
        tokens: tokens per batch.
        layers: number of blocks.
        width: width of the network, a multiple of 64.
        rounds: number of timed rounds.
        passes: number of the L equal separate passes to time.
        precision: auto, float32 or bf16.
    """
    precision = pick_precision(precision, torch.device("cpu"))
    found = [
        measure(length, vocab_size, max(tokens // length, 1), layers, width, rounds, passes, precision)
        for length in lengths or [256, 1024]
    ]
    columns = {
        "L": "length:d", "× plain forward": "cost_of_plain_forward", "quartiles": "cost_quartiles",
        "× faster than L passes": "faster_than_passes", "orders/s": "orders_per_second",
        "by L passes": "orders_per_second_by_passes",
    }  # fmt: skip
    table(f"likelihood of an order, V = {vocab_size}, {layers} x {width}, {precision}", columns, found)
    return {"precision": precision, "cases": found}
