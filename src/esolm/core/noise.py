"""The masking process: the share of clean tokens at time t, and which tokens are masked.

Shapes: B batch, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """alpha_t = alpha_0 (1 - t): the expected share of clean tokens at time t, from alpha_0 at t = 0 to 0 at t = 1."""

    alpha_0: float = 1.0

    def alpha(self, t: Tensor) -> Tensor:
        """alpha_t, of the shape of t."""
        return self.alpha_0 * (1 - t)

    def dalpha(self, t: Tensor) -> Tensor:
        """The derivative of alpha_t, of the shape of t."""
        return torch.full_like(t, -self.alpha_0)

    def weight(self, t: Tensor) -> Tensor:
        """-alpha'_t / (1 - alpha_t), the weight of a masked token's nats in the NELBO."""
        return -self.dalpha(t) / (1 - self.alpha(t))


def mask_by_rate(scored: Tensor, alpha_t: Tensor | float, u: Tensor) -> Tensor:
    """Mask each scored token with probability 1 - alpha_t; u uniform [B, L] -> bool [B, L]."""
    return scored & (u >= alpha_t)


def mask_by_count(scored: Tensor, t: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Masks for the NELBO of alpha_t = 1 - t with the time integrated out, so that its weights are bounded.

    The number of masks m is uniform in 1 .. n, where n counts the scored tokens of the last dimension, and their nats
    have weight n/m: E_t[1/t sum_masked] = E_m[n/m sum_masked]. t uniform [..., 1], u uniform [..., L] ->
    bool [..., L], weight [..., 1].
    """
    n = scored.sum(-1, keepdim=True)
    m = (1 + (n * t).floor()).clamp_max(n)
    place = torch.where(scored, u, 2.0).argsort(-1).argsort(-1)
    return scored & (place < m), n / m.clamp_min(1)


def mask_within(scored: Tensor, t: Tensor, u: Tensor, number: Tensor, low: float, high: float) -> Tensor:
    """Mask each scored token with probability t, given that the share of masks lies between low and high.

    The number of masks comes from the binomial distribution restricted to that range, which is what drawing again until
    the share fits would give; where no number fits, it is not restricted. t and number: uniform [..., 1]; u: uniform
    [..., L] -> bool [..., L].
    """
    n = scored.sum(-1, keepdim=True).to(t.dtype)
    m = torch.arange(scored.shape[-1] + 1, device=t.device, dtype=t.dtype)
    log_p = torch.xlogy(m, t) + torch.xlogy(n - m, 1 - t)
    log_p = log_p - torch.lgamma(m + 1) - torch.lgamma((n - m).clamp_min(0) + 1)
    possible = m <= n
    fits = possible & (m >= low * n - 1e-9) & (m <= high * n + 1e-9)
    allowed = torch.where(fits.any(-1, keepdim=True), fits, possible)
    share = log_p.masked_fill(~allowed, -torch.inf).softmax(-1).cumsum(-1)
    count = torch.searchsorted(share, number * share[..., -1:])
    place = torch.where(scored, u, 2.0).argsort(-1).argsort(-1)
    return scored & (place < count)
