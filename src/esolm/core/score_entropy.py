"""Score entropy (SEDD): schedules, the loss of a token, and the weights of a sampling step.

The forward process redraws a token at the rate sigma'(t) from a fixed distribution m, the `target` (steps.py): all mass
on the mask, or the same on every token. After the total noise sigma a token is kept with probability e^-sigma. The
network estimates s_y, the logarithm of p_t(z with y in this place) / p_t(z).

Shapes: R rows, N tokens without the mask, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LogLinear:
    """e^-sigma = 1 - (1 - eps) t."""

    eps: float = 1e-3

    def sigma(self, t: Tensor) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * t)

    def dsigma(self, t: Tensor) -> Tensor:
        return (1 - self.eps) / (1 - (1 - self.eps) * t)


@dataclass(frozen=True, slots=True)
class Geometric:
    """sigma = low^(1 - t) high^t."""

    low: float = 1e-4
    high: float = 20.0

    def sigma(self, t: Tensor) -> Tensor:
        return self.low ** (1 - t) * self.high**t

    def dsigma(self, t: Tensor) -> Tensor:
        return self.sigma(t) * math.log(self.high / self.low)


def absorb_log_score(logits: Tensor, z: Tensor, sigma: Tensor, num_states: int) -> Tensor:
    """s of absorbing noise, [..., V]: zero logits stand for equal probabilities, and the entry of z is 0. sigma [...]."""
    log_score = logits - (sigma.expm1().log() + math.log(num_states))[..., None]
    return log_score.scatter(-1, z[..., None], 0.0)


def uniform_log_score(logits: Tensor, z: Tensor) -> Tensor:
    """s of uniform noise, [..., V]: the logits, with 0 at z."""
    return logits.scatter(-1, z[..., None], 0.0)


def absorb_statistics(logits: Tensor, x: Tensor, mask_id: int) -> Tensor:
    """Of the rows of masks: the logarithm of the summed exponentials without the mask, and the logit of x, [R, 2]."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    column = torch.tensor(mask_id % logits.shape[-1], device=logits.device)
    logits = logits.index_fill(-1, column, float("-inf"))
    return torch.stack([logits.logsumexp(-1), logits.gather(1, x[:, None])[:, 0]], 1)


def absorb_entropy(statistics: Tensor, num_states: int) -> Tensor:
    """The score entropy of a mask, [R], in units of 1 / (e^sigma - 1).

    With Z the summed exponentials of the logits over N it is -log p_x + (Z - 1 - log Z): MDLM's nats and a penalty that
    vanishes for Z = 1.
    """
    log_sum, at_x = (statistics - math.log(num_states)).unbind(1)
    return log_sum.exp() - at_x - 1


def uniform_score_statistics(logits: Tensor, x: Tensor, z: Tensor, mask_id: int | None) -> Tensor:
    """Of each row, over y other than z and the mask: the sum of e^s, the sum of s, and s_x, which is 0 if x = z: [R, 3]."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    s = uniform_log_score(logits, z)
    score = s.exp().scatter(-1, z[:, None], 0.0)
    if mask_id is not None:
        column = torch.tensor(mask_id % logits.shape[-1], device=logits.device)
        s, score = s.index_fill(-1, column, 0.0), score.index_fill(-1, column, 0.0)
    return torch.stack([score.sum(-1), s.sum(-1), s.gather(1, x[:, None])[:, 0]], 1)


def uniform_entropy(statistics: Tensor, x: Tensor, z: Tensor, sigma: Tensor, num_states: int) -> Tensor:
    """The score entropy of a token under uniform noise, [R]; sigma [R]."""
    score, log_score, at_x = statistics.unbind(1)
    n, noise = num_states, sigma.expm1()
    k = noise / (noise + n)  # p(y) / p(x) for any y other than x
    kept = -k * log_score + (n - 1) * k * (k.log() - 1)
    moved = -(log_score - at_x) - at_x / k - (k.log() + 1) / k - (n - 2)
    return (score + torch.where(x == z, kept, moved)) / n


def prior_nats(sigma: float, num_states: int) -> float:
    """KL of a token after the noise sigma from the uniform distribution."""
    kept = math.exp(-sigma)
    own, other = kept + (1 - kept) / num_states, (1 - kept) / num_states
    return own * math.log(num_states * own) + (num_states - 1) * other * math.log(num_states * other)


def euler_weights(score: Tensor, z: Tensor, step: Tensor, target: Tensor) -> Tensor:
    """The Euler step: one-hot z plus `step` (dt sigma') times the rates m_z e^s_y out of z. score [..., V], step [...].

    Like the two below, the weights need not add up to one, and too long a step or a wrong score makes some negative.
    """
    rates = (target[z] * step)[..., None] * score
    rates = rates.scatter(-1, z[..., None], 0.0)
    return F.one_hot(z, score.shape[-1]) + rates.scatter(-1, z[..., None], -rates.sum(-1, keepdim=True))


def analytic_weights(score: Tensor, z: Tensor, step: Tensor, target: Tensor) -> Tensor:
    """The Tweedie step that undoes the noise `step`, a difference of sigmas: exact for one token with the true scores.

    The inverse of the forward process, applied to the scores, times the probability of z.
    """
    grow = step.exp()[..., None]
    undone = grow * score + (1 - grow) * target * score.sum(-1, keepdim=True)
    keep = (-step).exp()
    return undone * (keep[..., None] * F.one_hot(z, score.shape[-1]) + ((1 - keep) * target[z])[..., None])
