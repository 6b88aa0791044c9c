"""D3PM: diffusion in T discrete steps, with absorbing or uniform noise (Austin et al. 2021).

Shapes: B batch, L length, R rows that get logits, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core import steps
from ..core.batch import Batch
from ..core.float64 import to_device, wide
from ..core.noise import mask_by_rate
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.uniform import Uniform
from ..core.visibility import full
from ..net.conditionals import place_nats
from ..net.denoiser import Rows
from ..net.head import RowLoss, Score
from ..net.protocol import Forward, Network
from ..sampling.chain import Reverse, UniformReverse, chain_plan, redraw
from ..sampling.chooser import Chooser
from ..sampling.request import Request, Step
from . import System, _uniform
from ._chains import AbsorbReverse, GreedyLast, masked_share

NOISES = ("absorb", "uniform")


@dataclass(frozen=True)
class D3PM(System):
    """The network predicts x from z_t; the bound is T times the KL of one step, plus a cross entropy in training."""

    noise: Literal["absorb", "uniform"] = "absorb"
    """What a step does to a token: it becomes the mask, or is drawn again from all tokens."""
    num_steps: int = 1000
    """T, steps of the forward process; sampling may take fewer."""
    schedule: Literal["standard", "cosine"] = "standard"
    """Share of clean tokens after step t: 1 - t/T, or by the cosine."""
    hybrid: float | None = None
    """Weight of -log p(x | z_t) beside one step of the bound in training; null is 0.01 for absorb and 0 for uniform."""
    bound: Literal["strict", "authors"] = "strict"
    """The validation bound. strict: one step for each example, drawn at random. authors: the sum of all T steps, in T
    passes; the expectation is the same."""
    noise_mask: bool = False
    """Uniform noise: whether the mask id is one of the tokens that noise draws."""
    mask_id: int = -1
    vocab_size: int = -1

    samplers: ClassVar = {"ancestral": ("num_steps",), "greedy_tail": ("num_steps",)}
    timed = True

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 1")
        if self.noise not in NOISES or self.schedule not in steps.RATES or self.bound not in _uniform.BOUNDS:
            raise ValueError(
                f"noise is {self.noise!r}, schedule {self.schedule!r} and bound {self.bound!r}; they must be one of "
                f"{', '.join(NOISES)}, one of {', '.join(steps.RATES)} and one of {', '.join(_uniform.BOUNDS)}"
            )
        if self.hybrid is not None and self.hybrid < 0:
            raise ValueError(f"hybrid is {self.hybrid}; it must be 0 or more")

    @property
    def masks(self) -> bool:
        return self.noise == "absorb"

    @property
    def states(self) -> Uniform:
        """The states of uniform noise."""
        return _uniform.states(self.vocab_size, self.mask_id, self.noise_mask)

    @property
    def hybrid_weight(self) -> float:
        """lambda, the weight of the cross entropy."""
        if self.hybrid is None:
            return 0.01 if self.noise == "absorb" else 0.0
        return self.hybrid

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        tokens = int(scored.sum())
        return {"diffusion": tokens, "hybrid": tokens} if self.hybrid_weight else {"diffusion": tokens}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """T L_t with one step t for each example; in training also the hybrid term, at the same scale."""
        scored = batch.scored
        examples = rng.examples(len(scored))
        if self.bound == "authors" and not train:
            nats = torch.zeros(scored.shape, device=scored.device)
            for t in range(self.num_steps):
                step = torch.full((len(scored), 1), t)
                nats = nats + self.step_nats(net, batch, rng.at("step", t), step, False)[..., 0]
            return [Term("diffusion", nats, scored)]
        u = rng.at("time").times(examples, rng.total)
        step = (u * self.num_steps).long().clamp_max(self.num_steps - 1)
        found = self.step_nats(net, batch, rng, step, train and self.hybrid_weight > 0) * self.num_steps
        terms = [Term("diffusion", found[..., 0], scored)]
        return [*terms, Term("hybrid", self.hybrid_weight * found[..., 1], scored)] if found.shape[-1] > 1 else terms

    def step_nats(self, net: Forward, batch: Batch, rng: Randomness, step: Tensor, hybrid: bool) -> Tensor:
        """L_t for the step t of each row, int [B, 1], and with `hybrid` also -log p(x | z_t): [B, L, 1 or 2]."""
        x, valid, _ = batch
        scored, length = batch.scored, x.shape[1]
        kept = kept_of(self.schedule, self.num_steps)
        before, after = (kept[t].to(wide(x.device)).to(x.device) for t in (step, step + 1))
        u = to_device(rng.at("mask").uniform(rng.examples(len(x)), length), x.device)
        position = torch.arange(length, device=x.device)[None]
        seen, time = full(length, valid, x.device), self.time(step[:, 0]).to(before)
        if self.noise == "absorb":
            masked = mask_by_rate(scored, after, u)
            z, rows = torch.where(masked, self.mask_id, x), scored if hybrid else masked
            out = Rows(slice(0, length), rows.flatten().nonzero()[:, 0])
            nats = net(z, position, seen, time=time, out=out, score=Score(x[rows], self.mask_id))
            weight = (masked * steps.reveal_chance(before, after))[rows].to(nats.dtype)
            found = [weight * nats, nats] if hybrid else [weight * nats]
        else:
            rows, z = scored, torch.where(scored, self.states.corrupt(x, after, u), x)
            out = Rows(slice(0, length), rows.flatten().nonzero()[:, 0])
            inputs = (x[rows], z[rows], (after / before).expand_as(u)[rows], before.expand_as(u)[rows])
            score = RowLoss(functools.partial(self._row_nats, hybrid), inputs, columns=1 + hybrid)
            found = list(net(z, position, seen, time=time, out=out, score=score).unbind(-1))
        return torch.stack([place_nats(each, rows, position.expand_as(x), length) for each in found], -1)

    def _row_nats(self, hybrid: bool, logits: Tensor, x: Tensor, z: Tensor, ratio: Tensor, kept: Tensor) -> Tensor:
        """L_t of uniform noise and, with `hybrid`, -log p(x | z_t): [R, 1 or 2]."""
        nats = steps.uniform_step_nats(self.states, logits, x, z, ratio, kept)
        if not hybrid:
            return nats[:, None]
        return torch.stack([nats, -self.states.log_p(logits).gather(1, x[:, None])[:, 0].to(nats.dtype)], 1)

    def time(self, step: Tensor) -> Tensor:
        """What the network is fed for z_(t+1): 1000 (t + 1) / T."""
        return 1000 * (step.double() + 1) / self.num_steps

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        return self.terms(net, batch, rng, train=False)

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        return chain_plan(self.name, self.samplers, request, redraws=self.noise == "uniform", most=self.num_steps)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """The reverse chain, in steps of about the same length; greedy_tail takes the likeliest tokens in the last."""
        count = schedule.sizes.shape[1]
        reverse = self.reverse(request, count)
        if request.options.sampler == "greedy_tail":
            reverse = GreedyLast(reverse, count)
        choose = Chooser.of(request, rng, self.mask_id)
        return redraw(net, request.x, request.valid, schedule, choose, reverse)

    def reverse(self, request: Request, count: int) -> Reverse:
        """The chain z_T, …, z_0 in `count` steps."""
        index = torch.linspace(self.num_steps, 0, count + 1, dtype=torch.float64).round().long()
        kept = kept_of(self.schedule, self.num_steps)[index]
        times = self.time(index[:-1] - 1).tolist()
        if self.noise == "absorb":
            reveal = steps.reveal_chance(kept[1:], kept[:-1])
            return AbsorbReverse(self.mask_id, request.draw, lambda step, _: reveal[step], times)
        return UniformReverse(self.states, request.draw, kept.tolist(), times)

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        """Absorbing noise only: at the time at which the share of masks is that of the sequence."""
        if self.noise == "uniform":
            return super().logits(net, batch, sigma)
        if sigma is not None:
            raise ValueError("sigma is an order of positions, and d3pm has none: leave it out")
        share = masked_share(batch, self.mask_id)
        gone = (1 - kept_of(self.schedule, self.num_steps)).contiguous()
        step = torch.searchsorted(gone, share.cpu().double()).clamp(1, self.num_steps) - 1
        length, device = batch.x.shape[1], batch.x.device
        position = torch.arange(length, device=device)[None]
        return net(
            batch.x, position, full(length, batch.valid, device), time=self.time(step).to(wide(device)).to(device)
        )


@functools.cache
def kept_of(schedule: str, num_steps: int) -> Tensor:
    """The probability that a token has not been redrawn after 0 .. T steps, float64 [T + 1]."""
    return steps.kept_after(steps.RATES[schedule](num_steps))
