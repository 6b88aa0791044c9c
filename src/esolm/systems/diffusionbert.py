"""DiffusionBERT: absorbing diffusion in T steps, in which rare tokens are masked first (He et al. 2023).

Shapes: B batch, L length, R rows that get logits, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core import spindle, steps
from ..core.batch import Batch
from ..core.float64 import to_device, wide
from ..core.noise import mask_by_rate
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term, without_id
from ..core.visibility import full
from ..net.conditionals import place_nats
from ..net.denoiser import Rows
from ..net.head import RowLoss
from ..net.protocol import Forward, Network
from ..sampling.chain import chain_plan, redraw
from ..sampling.chooser import Chooser
from ..sampling.request import Request, Step
from . import System
from ._chains import AbsorbReverse


@dataclass(frozen=True)
class DiffusionBERT(System):
    """D3PM with absorbing noise, a schedule for each token, and a network that is not told the time."""

    num_steps: int = 2048
    """T, steps of the forward process; sampling may take fewer."""
    spindle: float = 0.3
    """lambda: how much later frequent tokens are masked than rare ones."""
    hybrid: float = 0.01
    """Weight of -log p(x | z_t) beside one step of the bound in training."""
    bound: Literal["strict", "authors"] = "strict"
    """The loss and the validation figure. strict: the bound of this schedule. authors: the sum of their code, which is
    no bound."""
    mask_id: int = -1
    token_counts: str = ""
    """How often each token occurs in the training data, separated by spaces; without counts all are alike."""

    samplers: ClassVar = {"ancestral": ("num_steps",)}

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 1")
        if self.hybrid < 0:
            raise ValueError(f"hybrid is {self.hybrid}; it must be 0 or more")
        if not 0 <= self.spindle < 1 / math.pi:
            raise ValueError(f"spindle is {self.spindle}; it must be at least 0 and below 1/pi: masks stay masked")

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        tokens = int(scored.sum())
        return {"diffusion": tokens, "hybrid": tokens} if self.hybrid else {"diffusion": tokens}

    def weight_of(self, x: Tensor) -> Tensor:
        """The logarithmic frequency of tokens, about its mean over the training data."""
        if not self.token_counts:
            return torch.zeros(x.shape, dtype=wide(x.device), device=x.device)
        return centred_frequency(self.token_counts).to(wide(x.device)).to(x.device)[x]

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """T L_t with one step t for each example; in training also the hybrid term, at the same scale."""
        x, valid, _ = batch
        scored, length = batch.scored, x.shape[1]
        examples = rng.examples(len(x))
        t = (rng.at("time").times(examples, rng.total) * self.num_steps).long().clamp_max(self.num_steps - 1)
        t, u = t.to(x.device), to_device(rng.at("mask").uniform(examples, length), x.device)
        c = self.weight_of(x)
        if self.bound == "authors":  # about the mean of the sentence
            real = torch.ones_like(scored) if valid is None else valid
            c = c - (c * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)
        masked = mask_by_rate(scored, self.kept(t + 1, c), u)
        z, hybrid = torch.where(masked, self.mask_id, x), train and self.hybrid > 0
        rows = scored if hybrid else masked
        function = functools.partial(self.row_nats, hybrid)
        inputs = tuple(value.expand_as(x)[rows] for value in (x, t, c, masked))
        position = torch.arange(length, device=x.device)[None]
        out = Rows(slice(0, length), rows.flatten().nonzero()[:, 0])
        nats = net(
            z, position, full(length, valid, x.device), out=out, score=RowLoss(function, inputs, columns=1 + hybrid)
        )
        found = [place_nats(each, rows, position.expand_as(x), length) for each in nats.unbind(-1)]
        return [Term(name, value, scored) for name, value in zip(("diffusion", "hybrid"), found, strict=False)]

    def row_nats(self, hybrid: bool, logits: Tensor, x: Tensor, t: Tensor, c: Tensor, masked: Tensor) -> Tensor:
        """T L_t of rows and, with `hybrid`, the cross entropy at the same scale: [R, 1 or 2]."""
        log_p = without_id(logits, self.mask_id).log_softmax(-1)
        cross_entropy = -log_p.gather(1, x[:, None])[:, 0].to(c.dtype)
        if self.bound == "authors":
            nats = spindle.authors_weight(t, self.num_steps, self.kept(t, c)) * cross_entropy
        else:
            every = self.weight_of(torch.arange(logits.shape[-1], device=x.device))
            before, after = (self.kept(step[:, None], every) for step in (t, t + 1))
            nats = spindle.spindle_step_nats(log_p, x, steps.reveal_chance(before, after))
        found = [nats * masked, self.hybrid * cross_entropy] if hybrid else [nats * masked]
        return self.num_steps * torch.stack(found, 1)

    def kept(self, step: Tensor, c: Tensor) -> Tensor:
        """The probability that tokens of the weight c are not masked after some steps."""
        return spindle.spindle_kept(step, self.num_steps, self.spindle, c)

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        return self.terms(net, batch, rng, train=False)

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        return chain_plan(self.name, self.samplers, request, redraws=False, most=self.num_steps)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """The reverse chain of the strict bound, in steps of about the same length."""
        count = schedule.sizes.shape[1]
        index = torch.linspace(self.num_steps, 0, count + 1, dtype=torch.float64).round().long()

        def reveal(step: int, logits: Tensor) -> Tensor:
            every = self.weight_of(torch.arange(logits.shape[-1], device=logits.device))
            before, after = (self.kept(index[k].to(logits.device), every) for k in (step + 1, step))
            return steps.reveal_chance(before, after)

        reverse = AbsorbReverse(self.mask_id, request.draw, reveal, [None] * count)
        choose = Chooser.of(request, rng, self.mask_id)
        return redraw(net, request.x, request.valid, schedule, choose, reverse)

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        if sigma is not None:
            raise ValueError("sigma is an order of positions, and diffusionbert has none: leave it out")
        length = batch.x.shape[1]
        position = torch.arange(length, device=batch.x.device)[None]
        return net(batch.x, position, full(length, batch.valid, batch.x.device))


@functools.cache
def centred_frequency(token_counts: str) -> Tensor:
    """The frequency of each token minus its mean over the data, float64 [V]."""
    counts = torch.tensor([int(count) for count in token_counts.split()])
    found = spindle.frequency(counts)
    return found - (found * counts).sum() / counts.sum().clamp_min(1)
