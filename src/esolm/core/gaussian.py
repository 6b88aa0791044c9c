"""Duo's Gaussian process behind uniform noise: w_t = atil x + stil eps of one-hot x, whose argmax is a noisy token.

gamma_t rises from gamma_min to gamma_max, atil^2 = sigmoid(-gamma_t) and stil^2 = sigmoid(gamma_t). The argmax is the
clean token with probability P and otherwise uniform, so it follows the uniform process with alpha = (N P - 1)/(N - 1).

Shapes: G values of gamma, V vocabulary.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

POINTS, LOW, HIGH = 4201, -12.0, 30.0
"""The trapezoidal rule: its error is below 1e-12 for all N up to 100,000, since the integrand is smooth and vanishes at
both ends."""
ALPHAS = 0.05, 0.95
"""The range of alpha that a curriculum covers if no range of gamma is given."""


@functools.lru_cache(maxsize=8)
def _nodes(states: int) -> tuple[Tensor, Tensor]:
    """The points u, and the logarithm of Phi(u)^(N-1) times the step, [POINTS]."""
    u = torch.linspace(LOW, HIGH, POINTS, dtype=torch.float64)
    return u, (states - 1) * torch.special.log_ndtr(u) + (u[1] - u[0]).log()


def alpha(gamma: Tensor, states: int) -> Tensor:
    """alpha of the uniform process with N states, float64 [G]."""
    return _transform(gamma, states)[0]


def dalpha(gamma: Tensor, states: int) -> Tensor:
    """The derivative of alpha by gamma, float64 [G]."""
    return _transform(gamma, states)[1]


def _transform(gamma: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """P = E[Phi(u)^(N-1)] for u ~ N(mu, 1), mu = atil / stil = exp(-gamma / 2), and its derivative."""
    u, weight = _nodes(states)
    mu = (-0.5 * gamma.double().cpu()).exp()[:, None]
    if gamma.numel() and float(mu.max()) > HIGH - 10:
        raise ValueError(f"gamma is {float(gamma.min()):g}; it must be above {-2 * math.log(HIGH - 10):.3g}")
    power = weight - 0.5 * (u - mu) ** 2 - 0.5 * math.log(2 * math.pi)
    density = power.clamp_min_(-200).exp_()  # numbers that underflow are slow
    scale = states / (states - 1)
    found = scale * density.sum(1) - 1 / (states - 1), scale * (-0.5 * mu * (u - mu) * density).sum(1)
    return found[0].to(gamma.device), found[1].to(gamma.device)


@functools.lru_cache(maxsize=64)
def gamma_of(target: float, states: int) -> float:
    """The gamma at which alpha is `target`, by search in ever finer grids: alpha falls as gamma rises."""
    low, high = -5.9, 40.0
    for _ in range(6):
        grid = torch.linspace(low, high, 65, dtype=torch.float64)
        above = int((alpha(grid, states) > target).sum().clamp(1, 64))
        low, high = grid[above - 1].item(), grid[above].item()
    return (low + high) / 2


def latent(x: Tensor, eps: Tensor, gamma: Tensor) -> Tensor:
    """w_t of tokens x [...], given Gaussian noise eps [..., V]; gamma broadcasts with x."""
    spread = torch.sigmoid(gamma).sqrt()[..., None]
    return (spread * eps).scatter_add(-1, x[..., None], torch.sigmoid(-gamma).sqrt().expand(x.shape)[..., None])


def soften(w: Tensor, tau: float) -> Tensor:
    """softmax(w / tau), [..., V]; in the type of w, since a small tau overflows half precision."""
    return (w / tau).softmax(-1)
