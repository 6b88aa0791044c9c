"""BD3-LM: left to right over blocks, masked diffusion inside a block (paper, section 2.3).

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.float64 import to_device
from ..core.noise import LinearSchedule, mask_by_count, mask_by_rate, mask_within
from ..core.order import Schedule, ancestral
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.visibility import Visibility, block, hide
from ..net.conditionals import place_nats
from ..net.denoiser import Rows
from ..net.head import Score
from ..net.protocol import Forward, Network
from ..sampling.chooser import Chooser
from ..sampling.loops import blockwise
from ..sampling.request import Request, Step
from . import System

MOST_ENUMERATED = 8
"""Tokens of a block whose orders are enumerated for the exact likelihood, at most."""
LEAST_RATE = 1e-3
"""The mask rate at which intervals begin instead of 0, where the weight 1/t of the loss is infinite."""


@dataclass(frozen=True)
class BD3LM(System):
    """One pass over z and x: a block of z sees itself and the clean blocks before it."""

    block_size: int = 16
    """L', tokens in a block."""
    mask_rate_min: float = LEAST_RATE
    """Training draws the time of a block, which is the probability of a mask, uniformly between mask_rate_min and
    mask_rate_max, the clipped schedule of its authors. The bound itself has no cut-off."""
    mask_rate_max: float = 1.0
    clip_widths: tuple[float, ...] | None = None
    """Widths of intervals of mask rates. If given, each validation compares the intervals of these widths that
    begin at 0, 0.05, 0.1 and so on, and the whole range, and training continues with the one whose loss varies least
    between blocks. The authors search 0.5, 0.6, 0.7, 0.8 and 0.9."""
    resample: bool = False
    """Whether training draws the masks of a block again while their share lies outside the mask rates, as the authors'
    runs do. An end at 0.001 or 1 does not count."""
    mask_id: int = -1

    samplers: ClassVar = {"ancestral": ("num_steps",), "first_hitting": ()}

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        low, high = self.mask_rate_min, self.mask_rate_max
        if not (0 <= low < high <= 1 or low == high == 1):
            raise ValueError(f"mask_rate_min {low} and mask_rate_max {high} must satisfy 0 <= min < max <= 1")
        if self.clip_widths is not None:
            object.__setattr__(self, "clip_widths", tuple(self.clip_widths))  # JSON has lists
            if not self.clip_widths or not all(0 < width < 1 for width in self.clip_widths):
                found = list(self.clip_widths)
                raise ValueError(f"clip_widths is {found}; it must hold numbers above 0 and below 1, or be null")

    def alternatives(self) -> list[BD3LM]:
        """The same system with each interval of mask rates that the authors' search tries."""
        if self.clip_widths is None:
            return []
        ends = [(0.0, 1.0)]
        if self.block_size == 1:
            ends.append((1.0, 1.0))  # a mask in every block: the likelihood from left to right
        else:
            starts = ((width, k / 20) for width in self.clip_widths for k in range(20))
            ends += [(low, round(low + width, 9)) for width, low in starts if low + width < 1 + 1e-9]
        rates = ((max(low, LEAST_RATE), high) for low, high in ends)
        return [dataclasses.replace(self, mask_rate_min=low, mask_rate_max=high) for low, high in rates]

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
            low, high = self.mask_rate_min, self.mask_rate_max
            t = low + (high - low) * t
            weight = LinearSchedule().weight(t)
            if self.resample:
                number = to_device(rng.at("count").uniform(examples, blocks)[..., None], scored.device)
                masked = mask_within(inside, t, u, number, low if low > LEAST_RATE else 0.0, high)
            else:
                masked = mask_by_rate(inside, LinearSchedule().alpha(t), u)
        else:
            masked, weight = mask_by_count(inside, t, u)
        return masked.flatten(1), weight.expand_as(u).flatten(1)

    def _visibility(self, length: int, valid: Tensor | None, device: torch.device) -> Visibility:
        visibility = block(length, self.block_size, device)
        return visibility if valid is None else hide(visibility, valid.repeat(1, 2))

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """The sum over blocks of the MDM bound of a block given the blocks before it."""
        masked, weight = self.corrupt(batch.scored, rng, train)
        return [Term("diffusion", self.masked_nats(net, batch, masked, weight), batch.scored)]

    @property
    def exact_passes(self) -> int:
        return 2**self.block_size - 1

    def exact_nats(self, net: Forward, batch: Batch) -> Tensor:
        """-log p(x) by one pass for each set of masks in a block.

        In a block f(S), the mean over the orders of S of the probability to draw its tokens first, is 1 for the empty
        set and otherwise the sum over j in S of f(S - j) p(x^j | S - j), divided by the size of S.
        """
        x, size = batch.x, self.block_size
        if size > MOST_ENUMERATED:
            raise ValueError(
                f"the exact likelihood of blocks of {size} tokens takes 2^{size} - 1 passes; at most blocks of "
                f"{MOST_ENUMERATED} are enumerated: use the estimator nelbo"
            )
        self._check_length(x.shape[1])
        scored, places = batch.scored.unflatten(1, (-1, size)), range(size)
        log_f = torch.full((2**size, *scored.shape[:2]), -torch.inf, dtype=torch.float64, device=x.device)
        log_f[0] = 0
        for known in range(2**size - 1):  # as bits; every subset of a set is a smaller number
            left = [j for j in places if not known >> j & 1]
            if known:
                log_f[known] -= math.log(size - len(left))
            hidden = torch.tensor([j in left for j in places], device=x.device)
            masked = (scored & hidden).flatten(1)
            nats = self.masked_nats(net, batch, masked, torch.ones(masked.shape, device=x.device))
            for j, each in zip(left, nats.double().unflatten(1, (-1, size))[..., left].unbind(-1), strict=True):
                log_f[known | 1 << j] = torch.logaddexp(log_f[known | 1 << j], log_f[known] - each)
        return (math.log(size) - log_f[-1]).sum(1)

    def masked_nats(self, net: Forward, batch: Batch, masked: Tensor, weight: Tensor) -> Tensor:
        """The nats of masked tokens given the others of their block and the blocks before it, times weight, [B, L]."""
        x, valid, _ = batch
        length = x.shape[1]
        z_t = torch.where(masked, self.mask_id, x)
        position = torch.arange(length, device=x.device)[None]
        visibility = self._visibility(length, valid, x.device)
        rows = Rows(slice(0, length), masked.flatten().nonzero()[:, 0])
        score = Score(x[masked], self.mask_id, weight.expand_as(x)[masked])
        nats = net(torch.cat([z_t, x], 1), position.repeat(1, 2), visibility, out=rows, score=score)
        return place_nats(nats, masked, position.expand_as(x), length)

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        """num_steps is T, the steps of the whole sequence: T' = T L'/L of them in each block.

        If T is no multiple of the number of blocks, some blocks take one step more than others, evenly spread.
        """
        num_steps, given_order = request.options.num_steps, request.options.given_order
        default = "first_hitting" if num_steps is None else "ancestral"
        sampler = request.choose_sampler(self.name, self.samplers, default)
        self._check_length(request.x.shape[1])
        steps = None
        if sampler == "ancestral":
            blocks = -(-request.valid.sum(1, keepdim=True) // self.block_size)  # of each row
            if num_steps is None:
                steps = torch.full_like(blocks, self.block_size)
            elif num_steps < (most := int(blocks.max())):
                raise ValueError(f"num_steps is {num_steps}; {most} blocks need at least {most}")
            else:
                block = torch.arange(request.x.shape[1])[None] // self.block_size
                steps = (block + 1) * num_steps // blocks - block * num_steps // blocks  # of each position's block
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
