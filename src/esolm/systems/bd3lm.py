"""BD3-LM: left to right over blocks, masked diffusion inside a block (paper, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.noise import Linear, mask_by_count, mask_by_rate, scored_tokens
from ..core.order import Schedule, ancestral
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.visibility import block, hide
from ..net.conditionals import place_nats
from ..net.denoiser import Denoiser, Rows
from ..net.head import Score
from ..sampling.loops import Chooser, blockwise
from ..sampling.request import Request, Step

SAMPLERS: dict[str, tuple[str, ...]] = {"ancestral": ("num_steps",), "first_hitting": ()}
"""Samplers and the options that each takes."""


@dataclass(frozen=True)
class System:
    """One pass over z and x: a block of z sees itself and the clean blocks before it."""

    block_size: int = 16
    """L', tokens in a block."""
    mask_rate_min: float = 1e-3
    """Training draws the share of masks of a block uniformly between mask_rate_min and mask_rate_max: the clipped
    schedule of its authors. The bound itself (not training) has no cut-off."""
    mask_rate_max: float = 1.0
    mask_id: int = -1

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        if not 0 <= self.mask_rate_min < self.mask_rate_max <= 1:
            low, high = self.mask_rate_min, self.mask_rate_max
            raise ValueError(f"mask_rate_min {low} and mask_rate_max {high} must satisfy 0 <= min < max <= 1")

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum())}

    def corrupt(self, scored: Tensor, rng: Randomness, train: bool) -> tuple[Tensor, Tensor]:
        """Which tokens are masked and the weight of their nats, both [B, L]; every block has a time of its own."""
        batch, length = scored.shape
        if length % self.block_size:
            raise ValueError(f"length {length} is not a multiple of block_size {self.block_size}")
        examples, blocks = rng.examples(batch), length // self.block_size
        t = rng.at("time").times(examples, rng.total, blocks)[..., None].to(scored.device)  # [B, blocks, 1]
        u = rng.at("mask").uniform(examples, length).unflatten(1, (blocks, -1)).to(scored.device)
        inside = scored.unflatten(1, (blocks, -1))
        if train:
            t = self.mask_rate_min + (self.mask_rate_max - self.mask_rate_min) * t
            masked, weight = mask_by_rate(inside, Linear().alpha(t), u), Linear().weight(t)
        else:
            masked, weight = mask_by_count(inside, t, u)
        return masked.flatten(1), weight.expand_as(u).flatten(1)

    def terms(
        self, net: Denoiser, x: Tensor, valid: Tensor | None, given: Tensor | None, rng: Randomness, train: bool
    ) -> list[Term]:
        """The sum over blocks of the MDM bound of a block given the blocks before it."""
        length = x.shape[1]
        scored = scored_tokens(x, valid, given)
        masked, weight = self.corrupt(scored, rng, train)
        z_t = torch.where(masked, self.mask_id, x)
        position = torch.arange(length, device=x.device)[None]
        visibility = block(length, self.block_size, x.device)
        if valid is not None:
            visibility = hide(visibility, valid.repeat(1, 2))
        rows = Rows(slice(0, length), masked.flatten().nonzero()[:, 0])
        score = Score(x[masked], self.mask_id, weight.expand_as(x)[masked])
        nats = net(torch.cat([z_t, x], 1), position.repeat(1, 2), visibility, out=rows, score=score)
        return [Term("diffusion", place_nats(nats, masked, position.expand_as(x), length), scored)]

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        """num_steps is T, the steps of the whole sequence: T' = T L'/L of them in each block."""
        length = request.x.shape[1]
        sampler = request.sampler or ("first_hitting" if request.num_steps is None else "ancestral")
        request.check("bd3lm", SAMPLERS, sampler)
        if length % self.block_size:
            raise ValueError(f"length {length} is not a multiple of block_size {self.block_size}")
        steps = None
        if sampler == "ancestral":
            blocks = -(-request.valid.sum(1, keepdim=True) // self.block_size)  # of each row
            steps = self.block_size if request.num_steps is None else request.num_steps // blocks
            if request.num_steps is not None and request.num_steps < (most := int(blocks.max())):
                raise ValueError(f"num_steps is {request.num_steps}; {most} blocks need at least {most}")
        return ancestral(request.given, request.valid, rng, 1.0, steps, request.given_order, self.block_size)

    def sample(self, net: Denoiser, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Block by block, with a cache between blocks."""
        chooser = Chooser(request.draw, rng.at("token"), self.mask_id)
        return blockwise(net, request.x, request.valid, schedule, self.block_size, chooser)
