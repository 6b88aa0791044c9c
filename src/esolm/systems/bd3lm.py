"""BD3-LM: left to right over blocks, masked diffusion inside a block (paper, section 2.3).

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.float64 import to_device
from ..core.noise import LinearSchedule, mask_by_count, mask_by_rate
from ..core.order import Schedule, ancestral
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.visibility import Visibility, block, hide
from ..net.conditionals import place_nats
from ..net.denoiser import Rows
from ..net.head import Score
from ..net.protocol import Forward, Network
from ..sampling.loops import Chooser, blockwise
from ..sampling.request import Request, Step
from . import System


@dataclass(frozen=True)
class BD3LM(System):
    """One pass over z and x: a block of z sees itself and the clean blocks before it."""

    block_size: int = 16
    """L', tokens in a block."""
    mask_rate_min: float = 1e-3
    """Training draws the share of masks in a block uniformly between mask_rate_min and mask_rate_max, the clipped
    schedule of its authors. The bound itself has no cut-off."""
    mask_rate_max: float = 1.0
    mask_id: int = -1

    samplers: ClassVar = {"ancestral": ("num_steps",), "first_hitting": ()}

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        if not 0 <= self.mask_rate_min < self.mask_rate_max <= 1:
            low, high = self.mask_rate_min, self.mask_rate_max
            raise ValueError(f"mask_rate_min {low} and mask_rate_max {high} must satisfy 0 <= min < max <= 1")

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum())}

    def _check_length(self, length: int) -> None:
        if length % self.block_size:
            raise ValueError(f"length {length} is not a multiple of block_size {self.block_size}")

    def corrupt(self, scored: Tensor, rng: Randomness, train: bool) -> tuple[Tensor, Tensor]:
        """Which tokens are masked and the weight of their nats, both [B, L]; every block has its own time."""
        batch, length = scored.shape
        self._check_length(length)
        examples, blocks = rng.examples(batch), length // self.block_size
        t = to_device(rng.at("time").times(examples, rng.total, blocks)[..., None], scored.device)  # [B, blocks, 1]
        u = to_device(rng.at("mask").uniform(examples, length).unflatten(1, (blocks, -1)), scored.device)
        inside = scored.unflatten(1, (blocks, -1))
        if train:
            t = self.mask_rate_min + (self.mask_rate_max - self.mask_rate_min) * t
            masked, weight = mask_by_rate(inside, LinearSchedule().alpha(t), u), LinearSchedule().weight(t)
        else:
            masked, weight = mask_by_count(inside, t, u)
        return masked.flatten(1), weight.expand_as(u).flatten(1)

    def _visibility(self, length: int, valid: Tensor | None, device: torch.device) -> Visibility:
        visibility = block(length, self.block_size, device)
        return visibility if valid is None else hide(visibility, valid.repeat(1, 2))

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """The sum over blocks of the MDM bound of a block given the blocks before it."""
        x, valid, _ = batch
        length = x.shape[1]
        scored = batch.scored
        masked, weight = self.corrupt(scored, rng, train)
        z_t = torch.where(masked, self.mask_id, x)
        position = torch.arange(length, device=x.device)[None]
        visibility = self._visibility(length, valid, x.device)
        rows = Rows(slice(0, length), masked.flatten().nonzero()[:, 0])
        score = Score(x[masked], self.mask_id, weight.expand_as(x)[masked])
        nats = net(torch.cat([z_t, x], 1), position.repeat(1, 2), visibility, out=rows, score=score)
        return [Term("diffusion", place_nats(nats, masked, position.expand_as(x), length), scored)]

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        """num_steps is T, the steps of the whole sequence: T' = T L'/L of them in each block."""
        num_steps, given_order = request.options.num_steps, request.options.given_order
        default = "first_hitting" if num_steps is None else "ancestral"
        sampler = request.choose_sampler(self.name, self.samplers, default)
        self._check_length(request.x.shape[1])
        steps = None
        if sampler == "ancestral":
            blocks = -(-request.valid.sum(1, keepdim=True) // self.block_size)  # of each row
            steps = self.block_size if num_steps is None else num_steps // blocks
            if num_steps is not None and num_steps < (most := int(blocks.max())):
                raise ValueError(f"num_steps is {num_steps}; {most} blocks need at least {most}")
        return ancestral(request.given, request.valid, rng, 1.0, steps, given_order, self.block_size)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Block by block, with a cache between blocks."""
        choose = Chooser.of(request, rng, self.mask_id)
        return blockwise(net, request.x, request.valid, schedule, self.block_size, choose)

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        if sigma is not None:
            raise ValueError("sigma is an order of positions, and bd3lm orders only its blocks: leave it out")
        length = batch.x.shape[1]
        self._check_length(length)
        position = torch.arange(length, device=batch.x.device)[None]
        visibility = self._visibility(length, batch.valid, batch.x.device)
        return net(batch.x.repeat(1, 2), position.repeat(1, 2), visibility, out=Rows(slice(0, length)))

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        whole = dataclasses.replace(self, mask_rate_min=0.0, mask_rate_max=1.0)
        return whole.terms(net, batch, rng, train=independent)
