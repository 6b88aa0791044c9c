"""Reverse processes that several systems share (`sampling.chain.Reverse`).

Shapes: B batch, L length, R rows that get logits, K steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.draw import Draw
from ..core.float64 import wide
from ..sampling.chain import Reverse


@dataclass(frozen=True, eq=False)
class AbsorbReverse:
    """A mask becomes the token v with probability p_v reveal_v, and stays a mask otherwise."""

    absorbing: int  # the mask id
    draw: Draw  # temperature, top_k and top_p shape p
    reveal: Callable[[int, Tensor], Tensor]  # a step and the logits -> its chance, or that of each token [V]
    times: Sequence[float | None]  # what the network is fed, one for each step

    def start(self, u: Tensor) -> Tensor:
        return torch.full(u.shape, self.absorbing, device=u.device)

    def time(self, step: int) -> float | None:
        return self.times[step]

    def weights(self, step: int, logits: Tensor, z: Tensor) -> Tensor:
        p = self.draw.probabilities(logits.to(wide(logits.device)), self.absorbing)
        p = p * self.reveal(step, logits).to(p)
        p[:, self.absorbing] = (1 - p.sum(-1)).clamp_min(0)
        return p


@dataclass(frozen=True)
class GreedyLast:
    """A chain whose last step takes the likeliest token instead of drawing one."""

    chain: Reverse
    num_steps: int

    @property
    def absorbing(self) -> int | None:
        return self.chain.absorbing

    def start(self, u: Tensor) -> Tensor:
        return self.chain.start(u)

    def time(self, step: int) -> float | None:
        return self.chain.time(step)

    def weights(self, step: int, logits: Tensor, z: Tensor) -> Tensor:
        weights = self.chain.weights(step, logits, z)
        if step < self.num_steps - 1:
            return weights
        return torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)


def masked_share(batch: Batch, mask_id: int) -> Tensor:
    """The share of masks among the valid tokens of each row, [B]."""
    masked = batch.x == mask_id
    if batch.valid is None:
        return masked.double().mean(1)
    return (masked & batch.valid).sum(1) / batch.valid.sum(1).clamp_min(1)
