"""What a training step asks of the network, counted instead of computed: rows, attending pairs and operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .net.denoiser import DenoiserConfig, Rows
from .randomness import Randomness, fold
from .system import System
from .visibility import Packed, Part, Visibility


@dataclass
class Work:
    """Of forward passes."""

    fed: float = 0.0  # rows that go through the blocks
    asked: float = 0.0  # rows that go through the head
    pairs: float = 0.0  # slots that see each other, in a block
    last: float = 0.0  # and in the last one

    def flops(self, config: DenoiserConfig) -> float:
        """Floating-point operations; past the keys and values of the last block only the asked rows go on."""
        width = config.width
        per_row = 2 * width**2 * (4 + 2 * config.mlp_ratio)
        past = 2 * width**2 * 2
        blocks = (config.layers - 1) * (self.fed * per_row + 4 * width * self.pairs)
        ends = self.fed * past + self.asked * (per_row - past) + 4 * width * self.last
        return blocks + ends + self.asked * 2 * width * config.vocab_size


class Counter(nn.Module):
    """Stands for a network, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def forward(
        self, tokens: Tensor, position: Tensor, visibility: Visibility | Packed, *, out: Rows, **rest: Any
    ) -> Tensor:
        """Nats of zero."""
        asked = out.index.numel() if out.index is not None else tokens.shape[0] * (out.span.stop - out.span.start)
        whole = () if isinstance(visibility, Packed) else (Part(tokens.shape[0], visibility, out.span),)
        for batch, seen, span in visibility.parts if isinstance(visibility, Packed) else whole:
            copies = batch // seen.rank.shape[0]
            self.work.pairs += float(seen.dense().sum()) * copies
            self.work.last += float(seen.dense(span).sum()) * copies
        self.work.fed += tokens.shape[0] * tokens.shape[1]
        self.work.asked += asked
        return torch.zeros(asked)


@torch.no_grad()
def count(system: System, x: Tensor, rounds: int) -> Work:
    """The mean over the draws of some training steps on x."""
    net: Any = Counter()
    for i in range(rounds):
        system.terms(net, x, None, None, Randomness(fold(1, i), 0, len(x)), True)
    work = net.work
    return Work(*(value / rounds for value in (work.fed, work.asked, work.pairs, work.last)))
