"""Diffusion-LM's process: embeddings of tokens turn into Gaussian noise in T steps.

A token w has the noisy embedding `start` ~ N(E(w), s0^2), and x_t = sqrt(abar_t) start + sqrt(1 - abar_t) noise for
t = 0 .. T-1. The reverse chain leads from x_(T-1) to x_0 and, in step 0, from x_0 to the start, which a rounding layer
turns into a token. The network predicts the start.

Shapes: T steps, R rows, D width of an embedding, V vocabulary. Steps t are int tensors on the CPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .terms import without_id

Variance = Literal["small", "word"]


@dataclass(frozen=True, eq=False)
class GaussianSteps:
    """The process with abar_t after each of its steps, float64 [T]; fewer steps skip some of the original ones."""

    kept: Tensor
    start_variance: Tensor
    """s0^2, the variance of the start about the embedding."""

    @functools.cached_property
    def before(self) -> Tensor:
        """abar_(t-1), with abar_(-1) = 1."""
        return torch.cat([torch.ones_like(self.kept[:1]), self.kept[:-1]])

    @functools.cached_property
    def beta(self) -> Tensor:
        """Variance of the noise that each step adds."""
        return 1 - self.kept / self.before

    @functools.cached_property
    def of_start(self) -> Tensor:
        """Weight of the start in the mean of x_(t-1) given x_t and the start."""
        return self.beta * self.before.sqrt() / (1 - self.kept)

    @functools.cached_property
    def of_noisy(self) -> Tensor:
        """Weight of x_t in that mean."""
        return (1 - self.before) * (1 - self.beta).sqrt() / (1 - self.kept)

    @functools.cached_property
    def posterior(self) -> Tensor:
        """Variance of x_(t-1) given x_t and the start; zero in step 0."""
        return self.beta * (1 - self.before) / (1 - self.kept)

    @functools.cached_property
    def of_word(self) -> Tensor:
        """Variance of the start given x_t and the word."""
        return 1 / (1 / self.start_variance + self.kept / (1 - self.kept))

    def variance(self, kind: Variance) -> Tensor:
        """Variance of the model's steps, [T]. small: that of the posterior, and step 0 has that of step 1, as in the
        authors' code. word: that of x_(t-1) given x_t and the word, which no step that knows the word can improve."""
        if kind == "word":
            return self.posterior + self.of_start**2 * self.of_word
        return torch.cat([self.posterior[1:2], self.posterior[1:]])

    def respaced(self, index: Tensor) -> GaussianSteps:
        """The process of some of the steps, ascending int [K]."""
        return GaussianSteps(self.kept[index], self.start_variance)

    def noised(self, start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t, [..., D]; t broadcasts with [...]."""
        kept = self.kept[t][..., None]
        return kept.sqrt().to(start) * start + (1 - kept).sqrt().to(start) * noise.to(start)

    def prior_nats(self, mean: Tensor, variance: Tensor) -> Tensor:
        """KL of N(mean, variance) from the standard Gaussian, summed over D: [R]."""
        return 0.5 * (variance - 1 - variance.log() + mean**2).sum(-1)


@functools.cache
def sqrt_steps(num_steps: int) -> GaussianSteps:
    """The authors' schedule: abar(u) = 1 - sqrt(u + 0.0001) at u = t/T; the last step keeps at least 0.1 %."""
    u = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    level = 1 - (u + 1e-4).sqrt()
    kept = (1 - (1 - level[1:] / level[:-1]).clamp_max(0.999)).cumprod(0)
    return GaussianSteps(kept, 1 - kept[0])


def nearest(x: Tensor, table: Tensor, exclude: int | None) -> Tensor:
    """The token with the nearest embedding, int [R]; x [R, D], table [V, D]."""
    return without_id(x @ table.T - 0.5 * (table**2).sum(-1), exclude).argmax(-1)


def training_terms(steps: GaussianSteps, t: Tensor, clean: Tensor, start: Tensor, predicted: Tensor) -> list[Tensor]:
    """The authors' loss without the rounding term, each a mean over D, [R]: the squared error of the prediction (in
    step 0, of the embedding itself), and the squared mean of the last x_t."""
    target = torch.where(_first(t, start)[:, None], clean, start)
    return [((target - predicted) ** 2).mean(-1), steps.kept[-1].item() * (start**2).mean(-1)]


def authors_terms(steps: GaussianSteps, t: Tensor, clean: Tensor, start: Tensor, predicted: Tensor) -> list[Tensor]:
    """One step of the authors' bound and its prior term, in nats, [R]. Step 0 compares the law of the
    start with a prediction that comes from another start, which costs more than the bound does."""
    variance = steps.variance("small")
    weight = (steps.of_start**2 / variance)[t].to(start)
    later = 0.5 * weight * ((start - predicted) ** 2).sum(-1)
    ratio = (steps.start_variance / variance[0]).item()
    spread = 0.5 * (ratio - 1 - math.log(ratio)) * start.shape[-1]
    first = spread + 0.5 / variance[0].item() * ((clean - predicted) ** 2).sum(-1)
    last = steps.kept[-1].to(start)
    return [torch.where(_first(t, start), first, later), steps.prior_nats(last.sqrt() * start, 1 - last)]


@dataclass(frozen=True, eq=False)
class StrictBound:
    """The NELBO of a token, with every expectation that has a closed form given x_t and the word.

    -log p(w) <= KL(q(x_(T-1) | w) || p) + sum_t E KL(q(x_(t-1) | x_t, w) || p(x_(t-1) | x_t)) + E[-log p(w | start)],
    where x_(-1) is the start. The Gaussians differ in mean and in variance; what the variances cost does not depend on
    the network.
    """

    steps: GaussianSteps
    kind: Variance

    @functools.cached_property
    def weight(self) -> Tensor:
        """Nats of step t for a squared error of 2 in the predicted mean of the start, [T]."""
        return self.steps.of_start**2 / self.steps.variance(self.kind)

    @functools.cached_property
    def spread(self) -> float:
        """Nats of all variances, for each of the D dimensions."""
        ratio = self.steps.variance("word") / self.steps.variance(self.kind)
        return float(0.5 * (ratio - 1 - ratio.log()).sum())

    @functools.cached_property
    def chance(self) -> Tensor:
        """How likely each step is drawn, [T]: in proportion to the root of its weight, since a network errs less where
        there is little noise and the weights are large."""
        root = self.weight.sqrt()
        return root / root.sum()

    def mean_nats(self, t: Tensor, clean: Tensor, noisy: Tensor, predicted: Tensor) -> Tensor:
        """The KL of step t that is due to the means, [R]."""
        steps, kept = self.steps, self.steps.kept[t]
        own, seen = steps.of_word[t] / steps.start_variance, steps.of_word[t] * kept.sqrt() / (1 - kept)
        mean = own[:, None].to(clean) * clean + seen[:, None].to(clean) * noisy
        return 0.5 * self.weight[t].to(clean) * ((mean - predicted) ** 2).sum(-1)

    def prior_nats(self, clean: Tensor) -> Tensor:
        """The KL of the last x_t from the prior, [R]."""
        last = self.steps.kept[-1]
        variance = (last * self.steps.start_variance + 1 - last).to(clean)
        return self.steps.prior_nats(last.sqrt().to(clean) * clean, variance)


def ancestral_step(steps: GaussianSteps, t: int, noisy: Tensor, predicted: Tensor, spread: Tensor) -> Tensor:
    """x_(t-1), or the start after step 0, with `spread`: noise times its standard deviation."""
    return steps.of_start[t].item() * predicted + steps.of_noisy[t].item() * noisy + spread


def ddim_step(steps: GaussianSteps, t: int, noisy: Tensor, predicted: Tensor) -> Tensor:
    """x_(t-1) with the noise that x_t has."""
    kept, before = steps.kept[t].item(), steps.before[t].item()
    noise = (noisy - kept**0.5 * predicted) / (1 - kept) ** 0.5
    return before**0.5 * predicted + (1 - before) ** 0.5 * noise


def _first(t: Tensor, like: Tensor) -> Tensor:
    return (t == 0).to(like.device)
