"""Uniform noise: with probability 1 - alpha_t a token is replaced by one drawn uniformly from N states.

The marginals, posteriors and terms of the bound that D3PM, SEDD, UDLM and Duo share. A prediction p = x_theta takes the
place of the unknown clean token in the posterior. The best prediction is p(x^l | z_t without z_t^l), which ignores the
noisy token at its own position: the posterior applies the evidence of that token.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .float64 import wide


@dataclass(frozen=True, slots=True)
class LogLinear:
    """alpha_t = 1 - (1 - eps) t, from 1 at t = 0 to eps at t = 1; sigma_t = -log alpha_t."""

    eps: float = 1e-3

    def alpha(self, t: Tensor) -> Tensor:
        """alpha_t, of the shape of t."""
        return 1 - (1 - self.eps) * t

    def dalpha(self, t: Tensor) -> Tensor:
        """The derivative of alpha_t, of the shape of t."""
        return torch.full_like(t, self.eps - 1)

    def at(self, t: float) -> float:
        """alpha_t as a number."""
        return 1 - (1 - self.eps) * t


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform noise over all ids of a vocabulary, or over all but `exclude`."""

    vocab_size: int
    exclude: int | None = None  # the mask id, which is no state

    @property
    def states(self) -> int:
        """N."""
        return self.vocab_size - (self.exclude is not None)

    def draw(self, u: Tensor) -> Tensor:
        """States from uniforms in (0, 1), int of the same shape."""
        index = (u * self.states).long().clamp_max(self.states - 1)
        return index if self.exclude is None else index + (index >= self.exclude)

    def corrupt(self, x: Tensor, alpha: Tensor, u: Tensor) -> Tensor:
        """z ~ q(z_t | x): x with probability alpha, else a state; one uniform in (0, 1) draws both."""
        return torch.where(u < alpha, x, self.draw((u - alpha) / (1 - alpha)))

    def marginal(self, p: Tensor, alpha: Tensor | float) -> Tensor:
        """q(z_t) if x ~ p [R, V]: alpha p + (1 - alpha) / N, zero at the excluded id."""
        found = alpha * p + (1 - alpha) / self.states
        return found if self.exclude is None else _without(found, self.exclude)

    def posterior(self, p: Tensor, z: Tensor, alpha_s: Tensor | float, keep: Tensor | float) -> Tensor:
        """q(z_s | z_t = z, x ~ p), [R, V]; p [R, V], z int [R].

        alpha_s and keep = alpha_t / alpha_s: numbers, or [R, 1]. A one-hot p gives the posterior of the forward process
        and a prediction the reverse transition, normalised after mixing.
        """
        jump = (torch.zeros_like(p) + (1 - keep) / self.states).scatter_add(-1, z[:, None], _column(keep, p))
        found = jump * self.marginal(p, alpha_s)
        return found / found.sum(-1, keepdim=True)

    def rate(self, logits: Tensor, x: Tensor, z: Tensor, alpha: Tensor, dalpha: Tensor) -> Tensor:
        """The integrand of the NELBO at a time t, in nats [R]: the rate of KL(q(z_s | z, x) || q(z_s | z, p)) at s = t.

        logits [R, V] of p; x, z int [R]; alpha, dalpha [R]: alpha_t and its derivative by t. Written with
        log(1 + c p) for c = N alpha / (1 - alpha), so that nothing of size N log N cancels.
        """
        log_p = self.log_p(logits)
        size, kind = self.states, wide(logits.device)
        alpha, dalpha = alpha.to(kind), dalpha.to(kind)
        c = size * alpha / (1 - alpha)
        own_x, own_z = (log_p.gather(1, t[:, None])[:, 0].to(kind).exp() for t in (x, z))
        log_x, log_z = torch.log1p(c * own_x), torch.log1p(c * own_z)
        spread = torch.log1p(c.to(log_p.dtype)[:, None] * log_p.exp()).sum(1).to(kind)
        g = size * log_z - spread
        most, theta_z = size * alpha + 1 - alpha, (1 - alpha) * (1 + c * own_z)
        k = (1 - alpha) / most
        stayed = size / most - size / theta_z - k * g - (size - 1) * k * k.log()
        moved = size / (1 - alpha) - size / theta_z - g - c * (log_z - log_x) + k.log() / k
        return (dalpha / (size * alpha) * torch.where(x == z, stayed, moved)).clamp_min(0)

    def last_jump(self, logits: Tensor, x: Tensor, z: Tensor, alpha: Tensor) -> Tensor:
        """-log q(x | z_t = z, p) with alpha_s = 1, in nats [R]: from time t to the clean token in one step."""
        log_p, kind = self.log_p(logits), wide(logits.device)
        alpha = alpha.to(kind)
        own_x, own_z = (log_p.gather(1, t[:, None])[:, 0].to(kind) for t in (x, z))
        rest = (1 - alpha) / self.states
        return -(torch.where(x == z, alpha + rest, rest).log() + own_x - (alpha * own_z.exp() + rest).log())

    def prior_nats(self, alpha: float) -> float:
        """KL(q(z_1 | x) || uniform) for alpha = alpha_1, of each token."""
        size = self.states
        stay, leave = alpha + (1 - alpha) / size, (size - 1) * (1 - alpha) / size
        return stay * math.log(size * alpha + 1 - alpha) + (leave * math.log1p(-alpha) if leave else 0.0)

    def log_p(self, logits: Tensor) -> Tensor:
        """log softmax in at least float32, -inf at the excluded id."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.exclude is not None:
            column = torch.arange(logits.shape[-1], device=logits.device) == self.exclude
            logits = logits.masked_fill(column, float("-inf"))
        return logits.log_softmax(-1)


def _without(p: Tensor, exclude: int) -> Tensor:
    return p.masked_fill(torch.arange(p.shape[-1], device=p.device) == exclude, 0)


def _column(value: Tensor | float, like: Tensor) -> Tensor:
    """A number, or [R, 1], as [R, 1]."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(len(like), 1)
