"""Duo: uniform noise as the argmax of Gaussian noise, with a curriculum of softened inputs (Sahoo et al. 2025).

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core import gaussian
from ..core.batch import Batch
from ..core.float64 import wide
from ..core.order import Schedule
from ..core.randomness import Randomness, uniform
from ..core.terms import Term
from ..core.uniform import Uniform
from ..net.protocol import Forward, Network
from ..sampling.chain import chain_plan
from ..sampling.request import Request, Step
from . import System, _uniform

CHUNK = 1 << 24, 1 << 18
"""Gaussian numbers that are drawn at once, on a GPU and on a CPU, where they should stay in its cache."""


@dataclass(frozen=True)
class Duo(System):
    """The process and bound of UDLM. Until `curriculum_end` training feeds softmax(w_t / tau) of the Gaussian latents
    in place of tokens, which lowers the variance of the gradient; from then on, and in every bound, tokens.

    As in UDLM, noise cannot mark what is given: train on data with given tokens if you want to prompt the model.
    """

    curriculum_end: int = 0
    """Training steps with softened inputs; 0 is UDLM's training. The authors take half of a million steps."""
    curriculum_start: int = 0
    """The step at which tau begins to move from tau_start to tau_end."""
    tau_start: float = 1e-3
    """Temperature of the softened inputs."""
    tau_end: float = 1e-3
    """Temperature at the end of the curriculum; between the two, its logarithm is linear in the step."""
    gamma_min: float | None = None
    """Log noise-to-signal ratio of the latents at t = 0; null: that at which alpha is 0.95 for this vocabulary."""
    gamma_max: float | None = None
    """Log noise-to-signal ratio of the latents at t = 1; null: that at which alpha is 0.05 for this vocabulary."""
    t_min: float = 1e-3
    """Smallest time in training without softened inputs and in the integral of the bound."""
    eps: float = 1e-3
    """alpha_1, the share of tokens that are still clean at t = 1."""
    bound: Literal["strict", "authors"] = "strict"
    """strict: an upper bound, with two passes. authors: the mean of the integrand over t, which omits what happens
    before t_min and is therefore a little lower; for comparisons with published tables."""
    noise_mask: bool = False
    """Whether the mask id is one of the tokens that noise draws, as in the released checkpoints."""
    mask_id: int = -1
    vocab_size: int = -1

    samplers: ClassVar = {"ancestral": ("num_steps",), "greedy_tail": ("num_steps",)}
    masks = False
    timed = True

    def __post_init__(self) -> None:
        _uniform.check(self.t_min, self.eps, self.bound)
        if not 0 <= self.curriculum_start <= self.curriculum_end:
            start, end = self.curriculum_start, self.curriculum_end
            raise ValueError(f"curriculum_start {start} and curriculum_end {end} must satisfy 0 <= start <= end")
        if min(self.tau_start, self.tau_end) <= 0:
            raise ValueError(f"tau_start is {self.tau_start} and tau_end {self.tau_end}; both must be above 0")

    @property
    def noise(self) -> Uniform:
        """The states of the noise."""
        return _uniform.states(self.vocab_size, self.mask_id, self.noise_mask)

    @property
    def soft_inputs(self) -> bool:
        return self.curriculum_end > 0

    @property
    def gammas(self) -> tuple[float, float]:
        """gamma at t = 0 and at t = 1."""
        ends = zip((self.gamma_min, self.gamma_max), reversed(gaussian.ALPHAS), strict=True)
        low, high = (gaussian.gamma_of(a, self.noise.states) if own is None else own for own, a in ends)
        if low >= high:
            raise ValueError(f"gamma_min is {low:g} and gamma_max {high:g}; gamma_min must be lower")
        return low, high

    def at_step(self, step: int) -> Duo:
        """With the temperature of this step, or without a curriculum once it has ended."""
        if step >= self.curriculum_end:
            return dataclasses.replace(self, curriculum_start=0, curriculum_end=0)
        length = self.curriculum_end - self.curriculum_start
        done = max(step - self.curriculum_start, 0) / length if length else 0.0
        tau = self.tau_start ** (1 - done) * self.tau_end**done
        return dataclasses.replace(self, tau_start=tau, tau_end=tau)

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum())}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """The NELBO, with one time per example; in training with softened inputs while the curriculum lasts."""
        if train and self.soft_inputs:
            return [Term("diffusion", self._softened(net, batch, rng), batch.scored)]
        mean = train or self.bound == "authors"
        return _uniform.nelbo(net, batch, rng, self.noise, self.eps, self.t_min, mean)

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        mean = self.bound == "authors"
        return _uniform.nelbo(net, batch, rng, self.noise, self.eps, self.t_min, mean, independent)

    def _softened(self, net: Forward, batch: Batch, rng: Randomness) -> Tensor:
        """The integrand at the alpha of the Gaussian latents, with their softmax as input, [B, L]."""
        low, high = self.gammas
        t = _uniform.draw_times(rng, len(batch.x), self.t_min, torch.device("cpu"))[:, 0]
        gamma = low + (high - low) * t
        size = self.noise.states
        alpha, dalpha = gaussian.alpha(gamma, size), (high - low) * gaussian.dalpha(gamma, size)
        soft, z = self.latents(batch, gamma, rng.at("noise"))
        alpha, dalpha = (value[:, None].to(batch.x.device, wide(batch.x.device)) for value in (alpha, dalpha))
        return _uniform.row_nats(net, batch, self.noise.rate, soft, z, alpha, dalpha)

    def latents(self, batch: Batch, gamma: Tensor, rng: Randomness) -> tuple[Tensor, Tensor]:
        """softmax(w_t / tau) [B, L, V] and argmax w_t [B, L] of the scored tokens, x elsewhere; gamma [B]."""
        device = batch.x.device if wide(batch.x.device) == torch.float64 else torch.device("cpu")
        x, scored, gamma = batch.x.to(device), batch.scored.to(device), gamma.to(device)
        soft, z = torch.zeros(*x.shape, self.vocab_size, device=device).scatter_(2, x[..., None], 1.0), x.clone()
        row, position = scored.nonzero(as_tuple=True)
        number, ids = rng.examples(len(x)).to(device), torch.arange(self.vocab_size, device=device)
        count = max(1, CHUNK[device.type == "cpu"] // self.vocab_size)
        for b, at in zip(row.split(count), position.split(count), strict=True):
            u = uniform(rng.key, number[b, None], at[:, None] * self.vocab_size + ids)
            w = gaussian.latent(x[b, at], torch.special.ndtri(u), gamma[b])
            if self.noise.exclude is not None:
                w[:, self.noise.exclude] = -math.inf
            soft[b, at], z[b, at] = gaussian.soften(w, self.tau_start).float(), w.argmax(-1)
        return soft.to(batch.x.device), z.to(batch.x.device)

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        return chain_plan(self.name, self.samplers, request)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Every step draws all positions again. The last one leaves clean tokens, or takes the likeliest ones."""
        tail = request.options.sampler == "greedy_tail"
        return _uniform.sample(net, request, schedule, rng, self.noise, self.eps, self.mask_id, tail)
