"""Diffusion in T discrete steps, as in D3PM: schedules, posteriors and the terms of the bound.

A step blends the state with a fixed distribution m, the `target`: all mass on the mask, or the same on every token.
Step t leads from z_t to z_(t+1), t = 0 .. T - 1, and z_0 = x. `kept` is the probability that a token has never been
redrawn before z_t; `ratio` is that of one step, or of several.

    q(z_t | x) = kept_t x + (1 - kept_t) m        q(z_(t+1) | z_t) = ratio z_t + (1 - ratio) m

Shapes: R rows, N tokens without the mask, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .float64 import wide
from .uniform import Uniform


def standard_rates(num_steps: int) -> Tensor:
    """beta_t = 1 / (T - t), so that kept_t = 1 - t / T: float64 [T]."""
    return 1 / torch.arange(num_steps, 0, -1, dtype=torch.float64)


def cosine_rates(num_steps: int) -> Tensor:
    """beta_t = 1 - f(t + 1) / f(t), at most 0.999, with f(t) = cos((t / T + 0.008) / 1.008 pi / 2): float64 [T].

    The angle is rounded to float32, as in the authors' code: at T = 1000 it changes the last rates by 1e-5.
    """
    share = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    f = torch.cos(((share + 0.008) / 1.008 * math.pi / 2).float().double())
    return (1 - f[1:] / f[:-1]).clamp(0, 0.999)


RATES = {"standard": standard_rates, "cosine": cosine_rates}


def kept_after(rates: Tensor) -> Tensor:
    """The products of 1 - beta, [T] -> [T + 1]. The last one is set to zero, as D3PM does: z_T has forgotten x."""
    kept = F.pad((1 - rates).cumprod(0), (1, 0), value=1.0)
    kept[-1] = 0
    return kept


def blend(p: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    """q(z_t | x) averaged over x ~ p: p [..., V], kept [...] -> [..., V]."""
    return kept[..., None] * p + (1 - kept)[..., None] * target


def posterior(z: Tensor, p: Tensor, ratio: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    """The distribution of z_t given the later z, with p [..., V] in the place of x; normalised after the mixing.

    z int, ratio and kept float, [...]: those of the steps between the two and of z_t.
    """
    chance = ratio[..., None] * F.one_hot(z, p.shape[-1]) + ((1 - ratio) * target[z])[..., None]
    weights = chance * blend(p, kept, target)
    return weights / weights.sum(-1, keepdim=True)


def divergence(q: Tensor, p: Tensor) -> Tensor:
    """KL(q || p) over the last dimension, [..., V] -> [...]."""
    return (q * ((q + 1e-20).log() - (p + 1e-20).log())).sum(-1).clamp_min(0)


def reveal_chance(before: Tensor, after: Tensor) -> Tensor:
    """The probability that a token which is masked after a step was not masked before it; `kept` around the step."""
    return (before - after) / (1 - after)


def uniform_step_nats(noise: Uniform, logits: Tensor, x: Tensor, z: Tensor, ratio: Tensor, kept: Tensor) -> Tensor:
    """One term of the bound under uniform noise, [R]: KL(q || p) of z_t given z = z_(t+1), or -log p(x | z) for t = 0.

    logits [R, V]; x, z int [R]; ratio, kept [R]: of the step and of z_t, so that kept is 1 where t = 0. The KL is
    written with sum_v log(1 + odds p_v), where odds = N kept / (1 - kept), instead of the two distributions.
    """
    log_p, kind, n = noise.log_p(logits), wide(logits.device), noise.states
    ratio, kept = ratio.to(kind), kept.to(kind)
    log_x, log_z = (log_p.gather(1, t[:, None])[:, 0].to(kind) for t in (x, z))
    first, same = kept == 1, x == z
    redrawn = (1 - ratio) / n
    last_jump = (ratio * log_z.exp() + redrawn).log() - (redrawn + ratio * same).log() - log_x

    kept = torch.where(first, 0.5, kept)  # any other value: these rows are not used
    blank = (1 - kept) / n
    odds = kept / blank
    spread = torch.log1p(odds.to(log_p.dtype)[:, None] * log_p.exp()).sum(1).to(kind)
    at_x, at_z = torch.log1p(odds * log_x.exp()), torch.log1p(odds * log_z.exp())
    total_q = ratio * kept * same + (1 - ratio * kept) / n
    total_p = ratio * kept * log_z.exp() + (1 - ratio * kept) / n
    change = (total_p / total_q).log()  # log q - log p is this plus log(1 + odds x_v) - log(1 + odds p_v)
    own = torch.log1p(odds)
    stays = (ratio + redrawn) * (blank + kept * same) / total_q
    other, moves = redrawn * blank / total_q, redrawn * (blank + kept) / total_q  # to a token that is not z: is it x?
    kl = stays * (change + own * same - at_z) + other * ((n - 1) * change - (spread - at_z))
    kl = kl + torch.where(same, 0.0, moves * (change + own - at_x) - other * (change - at_x))
    return torch.where(first, last_jump, kl.clamp_min(0))
