"""Score entropy (SEDD): schedules, the loss of a token, and the weights of a sampling step.

The forward process redraws a token at the rate sigma'(t) from a fixed distribution m, the `target` (steps.py): all mass
on the mask, or the same on every token. After the total noise sigma a token is kept with probability e^-sigma. The
network estimates s_y, the logarithm of p_t(z with y in this place) / p_t(z).

Shapes: R rows, N tokens without the mask, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .float64 import wide
from .terms import without_id
from .uniform import Uniform


class LogLinearNoise(NamedTuple):
    """e^-sigma = 1 - (1 - eps) t."""

    eps: float = 1e-3

    def sigma(self, t: Tensor) -> Tensor:
        """The total noise at time t, of the shape of t."""
        return -torch.log1p(-(1 - self.eps) * t)

    def dsigma(self, t: Tensor) -> Tensor:
        """The rate of noise at time t, the derivative of sigma."""
        return (1 - self.eps) / (1 - (1 - self.eps) * t)


class GeometricNoise(NamedTuple):
    """sigma = low^(1 - t) high^t."""

    low: float = 1e-4
    high: float = 20.0

    def sigma(self, t: Tensor) -> Tensor:
        """The total noise at time t, of the shape of t."""
        return self.low ** (1 - t) * self.high**t

    def dsigma(self, t: Tensor) -> Tensor:
        """The rate of noise at time t, the derivative of sigma."""
        return self.sigma(t) * math.log(self.high / self.low)


def absorb_log_score(logits: Tensor, z: Tensor, sigma: Tensor, num_states: int) -> Tensor:
    """s of absorbing noise, [..., V]: zero logits stand for equal probabilities; the entry of z is 0. sigma [...]."""
    log_score = logits - (sigma.expm1().log() + math.log(num_states))[..., None]
    return log_score.scatter(-1, z[..., None], 0.0)


def uniform_log_score(logits: Tensor, z: Tensor) -> Tensor:
    """s of uniform noise, [..., V]: the logits, with 0 at z."""
    return logits.scatter(-1, z[..., None], 0.0)


def absorb_entropy(logits: Tensor, x: Tensor, mask_id: int) -> Tensor:
    """The score entropy of a mask, [R], in units of 1 / (e^sigma - 1); logits [R, V].

    With Z the summed exponentials of the logits over N it is -log p_x + (Z - 1 - log Z): MDLM's nats and a penalty that
    vanishes for Z = 1.
    """
    logits = without_id(logits, mask_id) - math.log(logits.shape[-1] - 1)
    log_sum, at_x = (v.to(wide(v.device)) for v in (logits.logsumexp(-1), logits.gather(1, x[:, None])[:, 0]))
    return log_sum.exp() - at_x - 1


def uniform_entropy(noise: Uniform, logits: Tensor, x: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
    """The score entropy of a token under uniform noise, [R]; logits [R, V], sigma [R]."""
    s = uniform_log_score(without_id(logits, noise.exclude, 0.0), z)
    kind, n = wide(s.device), noise.states
    others = without_id(s, noise.exclude).scatter(-1, z[:, None], float("-inf"))
    sums = others.logsumexp(-1), s.sum(-1), s.gather(1, x[:, None])[:, 0]
    log_sum, log_score, at_x = (v.to(kind) for v in sums)
    score = log_sum.exp()
    grown = sigma.to(kind).expm1()
    k = grown / (grown + n)  # p(y) / p(x) for any y other than x
    kept = -k * log_score + (n - 1) * k * (k.log() - 1)
    moved = -(log_score - at_x) - at_x / k - (k.log() + 1) / k - (n - 2)
    return ((score + torch.where(x == z, kept, moved)) / n).clamp_min(0)


def uniform_jump_nats(noise: Uniform, logits: Tensor, x: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
    """-log p(x | z), [R], of one step that removes all the noise sigma [R] by the scores (`analytic_weights`).

    Wrong scores may make weights negative; the least one counts as 1e-8 of the mean, so that the bound stays finite.
    """
    logits = without_id(logits, noise.exclude, float("-inf")).to(wide(logits.device))
    score = uniform_log_score(logits, z).exp()
    target = target_of("uniform", noise.exclude, score)
    undone = undo(score, sigma, target).clamp_min(1e-8 * score.sum(-1, keepdim=True) / noise.states)
    weights = undone * chance_of(z, sigma, target)
    return weights.sum(-1).log() - weights.gather(1, x[:, None])[:, 0].log()


def target_of(noise: str, mask_id: int | None, like: Tensor) -> Tensor:
    """m, [V]: all mass on the mask for `absorb`; for `uniform` the same on every id but the mask, if there is one."""
    ids = torch.arange(like.shape[-1], device=like.device)
    mask = torch.zeros_like(ids).to(like) if mask_id is None else (ids == mask_id).to(like)
    return mask if noise == "absorb" else (1 - mask) / (1 - mask).sum()


def euler_weights(score: Tensor, z: Tensor, step: Tensor, target: Tensor) -> Tensor:
    """The Euler step: one-hot z plus `step` (dt sigma') times the rates m_z e^s_y out of z. score [..., V], step [...].

    Like the two below, the weights need not add up to one, and too long a step or a wrong score makes some negative.
    """
    rates = (target[z] * step)[..., None] * score
    rates = rates.scatter(-1, z[..., None], 0.0)
    return F.one_hot(z, score.shape[-1]) + rates.scatter(-1, z[..., None], -rates.sum(-1, keepdim=True))


def analytic_weights(score: Tensor, z: Tensor, step: Tensor, target: Tensor) -> Tensor:
    """The Tweedie step that removes the noise `step`, a difference of sigmas [...]: exact for one token with the true
    scores [..., V]."""
    return undo(score, step, target) * chance_of(z, step, target)


def undo(score: Tensor, step: Tensor, target: Tensor) -> Tensor:
    """The inverse of the forward process over the noise `step`, applied to the scores."""
    grow = step.to(score.dtype).exp()[..., None]
    return grow * score + (1 - grow) * target * score.sum(-1, keepdim=True)


def chance_of(z: Tensor, step: Tensor, target: Tensor) -> Tensor:
    """q(z | y) over the noise `step` for every y, [..., V]."""
    keep = (-step.to(target.dtype)).exp()
    return keep[..., None] * F.one_hot(z, len(target)) + ((1 - keep) * target[z])[..., None]
