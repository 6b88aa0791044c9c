"""SEDD: the network estimates ratios of probabilities, and learns them by score entropy (Lou et al. 2024).

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

from ..core import score_entropy
from ..core.batch import Batch
from ..core.draw import Draw
from ..core.float64 import to_device, wide
from ..core.noise import mask_by_rate
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.score_entropy import GeometricNoise, LogLinearNoise
from ..core.terms import Term, without_id
from ..core.uniform import Uniform
from ..core.visibility import full
from ..net.conditionals import place_nats
from ..net.denoiser import Rows
from ..net.head import RowLoss, Score, Scoring
from ..net.protocol import Forward, Network
from ..sampling.chain import chain_plan, redraw
from ..sampling.chooser import Chooser
from ..sampling.request import Request, Step
from . import System, _uniform
from ._chains import masked_share

END = 1e-5
"""The time at which the last step of a sampler starts: it removes what is left of the noise."""


@dataclass(frozen=True)
class SEDD(System):
    """Score entropy, in nats of a bound. The network is fed sigma, the total noise."""

    noise: Literal["absorb", "uniform"] = "absorb"
    """What happens to a token: it becomes the mask, or is drawn again from all tokens."""
    schedule: Literal["auto", "loglinear", "geometric"] = "auto"
    """The noise over time; auto is loglinear for absorb and geometric for uniform, as published."""
    eps: float = 1e-3
    """Schedule loglinear: the share of clean tokens at t = 1."""
    sigma_min: float = 1e-4
    """Schedule geometric: the noise at t = 0 and, sigma_max, at t = 1."""
    sigma_max: float = 20.0
    t_min: float = 1e-3
    """Smallest time in training. The bound removes the noise of t_min in one step."""
    bound: Literal["strict", "authors"] = "strict"
    """strict: an upper bound, with two passes. authors: the mean of the loss over t, which omits what happens before
    t_min and the prior; for comparisons with published tables."""
    noise_mask: bool = False
    """Uniform noise: whether the mask id is one of the tokens that noise draws."""
    mask_id: int = -1
    vocab_size: int = -1

    samplers: ClassVar = {"analytic": ("num_steps",), "euler": ("num_steps",)}
    timed = True

    def __post_init__(self) -> None:
        _uniform.check(self.t_min, self.eps, self.bound)
        if self.noise not in ("absorb", "uniform") or self.schedule not in ("auto", "loglinear", "geometric"):
            raise ValueError(
                f"noise is {self.noise!r} and schedule {self.schedule!r}; they must be absorb or uniform, and auto, "
                "loglinear or geometric"
            )
        if not 0 < self.sigma_min < self.sigma_max:
            low, high = self.sigma_min, self.sigma_max
            raise ValueError(f"sigma_min {low} and sigma_max {high} must satisfy 0 < sigma_min < sigma_max")

    @property
    def times(self) -> LogLinearNoise | GeometricNoise:
        """The schedule: sigma and its derivative as functions of t."""
        kind = self.schedule
        if kind == "loglinear" or (kind == "auto" and self.noise == "absorb"):
            return LogLinearNoise(self.eps)
        return GeometricNoise(self.sigma_min, self.sigma_max)

    @property
    def masks(self) -> bool:
        return self.noise == "absorb"

    @property
    def states(self) -> Uniform:
        """The states of uniform noise."""
        return _uniform.states(self.vocab_size, self.mask_id, self.noise_mask)

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum())}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """The score entropy at one time for each example.

        The strict bound integrates from t_min to the end of the noise, and adds the nats of the jump from t_min to x
        and the distance of the end from the prior. Under absorbing noise the end is sigma = infinity: all is masked.
        """
        u = to_device(rng.at("time").times(rng.examples(len(batch.x)), rng.total), batch.x.device)
        t = self.t_min + (1 - self.t_min) * u
        sigma, weight = self.times.sigma(t), self.times.dsigma(t)
        strict = not train and self.bound == "strict"
        if self.noise == "absorb":
            weight = weight / sigma.expm1()
        if strict and self.noise == "absorb":
            least = -math.expm1(-self.sigma_at(self.t_min))
            masked = least + (1 - least) * u  # the probability of a mask; the integral does not depend on the schedule
            sigma, weight = -torch.log1p(-masked), (1 - least) / masked
        elif strict:
            weight = weight * (1 - self.t_min)
        nats = weight * self.nats(net, batch, rng, sigma, jump=False)
        if strict:
            nats = nats + self.nats(
                net, batch, rng.at("jump"), torch.full_like(u, self.sigma_at(self.t_min)), jump=True
            )
            if self.noise == "uniform":
                nats = nats + self.states.prior_nats(math.exp(-self.sigma_at(1.0))) * batch.scored.to(nats)
        return [Term("diffusion", nats, batch.scored)]

    def nats(self, net: Forward, batch: Batch, rng: Randomness, sigma: Tensor, jump: bool) -> Tensor:
        """The score entropy of z ~ q(z | x) after the noise sigma [B, 1], or with `jump` -log p(x | z): [B, L].

        Under absorbing noise the entropy is in units of 1 / (e^sigma - 1).
        """
        x, valid, _ = batch
        scored, length = batch.scored, x.shape[1]
        u = to_device(rng.at("mask").uniform(rng.examples(len(x)), length), x.device)
        keep = (-sigma).exp()
        score: Scoring
        if self.noise == "absorb":
            rows = mask_by_rate(scored, keep, u)
            z = torch.where(rows, self.mask_id, x)
            entropy = functools.partial(score_entropy.absorb_entropy, mask_id=self.mask_id)
            score = Score(x[rows], self.mask_id) if jump else RowLoss(entropy, (x[rows],))
        else:
            rows, z = scored, torch.where(scored, self.states.corrupt(x, keep, u), x)
            function = score_entropy.uniform_jump_nats if jump else score_entropy.uniform_entropy
            score = RowLoss(functools.partial(function, self.states), (x[rows], z[rows], sigma.expand_as(u)[rows]))
        position = torch.arange(length, device=x.device)[None]
        out = Rows(slice(0, length), rows.flatten().nonzero()[:, 0])
        nats = net(z, position, full(length, valid, x.device), time=self.time(sigma[:, 0]), out=out, score=score)
        return place_nats(nats, rows, position.expand_as(x), length)

    def sigma_at(self, t: float) -> float:
        """The noise at a time."""
        return self.times.sigma(torch.tensor(t, dtype=torch.float64)).item()

    def time(self, sigma: Tensor) -> Tensor:
        """What the network is fed: sigma, within the range of training."""
        return sigma.clamp(self.sigma_at(self.t_min), self.sigma_at(1.0))

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        return self.terms(net, batch, rng, train=False)

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        if self.noise == "uniform" and request.draw != Draw():
            raise ValueError(
                "temperature, top_p and top_k shape probabilities of tokens, and sedd with uniform noise has ratios: "
                "leave them out"
            )
        return chain_plan(self.name, self.samplers, request, "analytic", redraws=not self.masks)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Steps of equal time from t = 1 to 1e-5, and a last one that removes the rest of the noise."""
        t = torch.linspace(1, END, schedule.sizes.shape[1], dtype=torch.float64)
        reverse = ScoreReverse(self, request.draw, t, request.options.sampler == "euler")
        choose = Chooser.of(request, rng, self.mask_id)
        return redraw(net, request.x, request.valid, schedule, choose, reverse)

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        """Absorbing noise only: at the time at which the share of masks is that of the sequence."""
        if self.noise == "uniform":
            return super().logits(net, batch, sigma)
        if sigma is not None:
            raise ValueError("sigma is an order of positions, and sedd has none: leave it out")
        noise = -torch.log1p(-masked_share(batch, self.mask_id))
        length, device = batch.x.shape[1], batch.x.device
        position = torch.arange(length, device=device)[None]
        return net(batch.x, position, full(length, batch.valid, device), time=self.time(noise))


@dataclass(frozen=True, eq=False)
class ScoreReverse:
    """A step from t_k to t_(k+1) with the scores at t_k; the last one removes all noise. Negative weights are zero."""

    system: SEDD
    draw: Draw  # absorbing noise: temperature, top_k and top_p shape the tokens, not the rate at which masks go
    t: Tensor  # float64 [K]
    euler: bool

    @property
    def absorbing(self) -> int | None:
        """As `Reverse.absorbing`."""
        return self.system.mask_id if self.system.noise == "absorb" else None

    def start(self, u: Tensor) -> Tensor:
        """As `Reverse.start`."""
        if self.absorbing is None:
            return self.system.states.draw(u)
        return torch.full(u.shape, self.absorbing, device=u.device)

    def time(self, step: int) -> float:
        """As `Reverse.time`."""
        return self.system.time(self.system.times.sigma(self.t[step])).item()

    def weights(self, step: int, logits: Tensor, z: Tensor) -> Tensor:
        """As `Reverse.weights`."""
        noise, mask = self.system.times, self.absorbing
        sigma, last = noise.sigma(self.t[step]), step == len(self.t) - 1
        score = self.score(logits.to(wide(logits.device)), z, sigma.item())
        id = self.system.states.exclude if mask is None else mask
        target = score_entropy.target_of(self.system.noise, id, score)
        if self.euler and not last:
            size = (self.t[step] - self.t[step + 1]) * noise.dsigma(self.t[step])
            weights = score_entropy.euler_weights(score, z, size.to(score).expand(len(z)), target)
        else:
            size = sigma if last else sigma - noise.sigma(self.t[step + 1])
            weights = score_entropy.analytic_weights(score, z, size.to(score).expand(len(z)), target)
        if last and mask is not None:
            weights[:, mask] = 0
        return weights.clamp_min(0)

    def score(self, logits: Tensor, z: Tensor, sigma: float) -> Tensor:
        """The ratios, [R, V]; those of the mask are zero, except 1 for a mask itself."""
        if self.absorbing is None:
            return score_entropy.uniform_log_score(without_id(logits, self.system.states.exclude), z).exp()
        logits = without_id(logits, self.absorbing)
        if self.draw != Draw():
            logits = logits.logsumexp(-1, keepdim=True) + self.draw.probabilities(logits, self.absorbing).log()
        each = torch.full(z.shape, sigma, dtype=logits.dtype, device=z.device)
        return score_entropy.absorb_log_score(logits, z, each, logits.shape[-1] - 1).exp()
