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


def target_of(noise: str, vocab_size: int, mask_id: int, like: Tensor) -> Tensor:
    """m of `absorb` or `uniform`, [V]; the mask is no state of uniform noise."""
    mask = F.one_hot(torch.tensor(mask_id % vocab_size), vocab_size).to(like)
    return mask if noise == "absorb" else (1 - mask) / (vocab_size - 1)


def blend(p: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    """q(z_t | x) averaged over x ~ p: p [..., V], kept [...] -> [..., V]."""
    return kept[..., None] * p + (1 - kept)[..., None] * target


def posterior(z: Tensor, p: Tensor, ratio: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    """The distribution of z_t given the later z, with p [..., V] in the place of x; normalised after the mixing.

    z int, ratio and kept float, [...]: those of the steps between the two and of z_t.
    """
    chance = (ratio[..., None] * F.one_hot(z, p.shape[-1])) + ((1 - ratio) * target[z])[..., None]
    weights = chance * blend(p, kept, target)
    return weights / weights.sum(-1, keepdim=True)


def divergence(q: Tensor, p: Tensor) -> Tensor:
    """KL(q || p) over the last dimension, [..., V] -> [...]."""
    return (q * ((q + 1e-20).log() - (p + 1e-20).log())).sum(-1).clamp_min(0)


def reveal_weight(before: Tensor, after: Tensor) -> Tensor:
    """The probability that a token which is masked after a step was masked in it; before, after: `kept` around it."""
    return (before - after) / (1 - after)


def uniform_statistics(logits: Tensor, x: Tensor, z: Tensor, odds: Tensor, mask_id: int | None) -> Tensor:
    """What the losses of uniform noise need of a row: log p_x, log p_z and sum_v log(1 + odds p_v), [R, 3].

    logits [R, V]; x, z int [R]; odds [R], those of a kept token to a particular redrawn one. The mask has no
    probability.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if mask_id is not None:
        logits = logits.index_fill(-1, torch.tensor(mask_id % logits.shape[-1], device=logits.device), float("-inf"))
    log_p = logits.log_softmax(-1)
    total = torch.log1p(odds.to(log_p.dtype)[:, None] * log_p.exp()).sum(-1)
    return torch.stack([log_p.gather(1, x[:, None])[:, 0], log_p.gather(1, z[:, None])[:, 0], total], 1)


def uniform_odds(kept: Tensor, num_states: int) -> Tensor:
    """N kept / (1 - kept), and zero where nothing was redrawn."""
    return torch.where(kept < 1, num_states * kept / (1 - kept).clamp_min(1e-30), 0.0)


def uniform_step_nats(
    statistics: Tensor, x: Tensor, z: Tensor, ratio: Tensor, kept: Tensor, num_states: int
) -> Tensor:
    """One term of the bound under uniform noise, [R]: KL(q || p) of z_t given z = z_(t+1), or -log p(x | z) for t = 0.

    statistics: of `uniform_statistics`, with `uniform_odds(kept, num_states)`. kept, ratio: [R], of z_t and of the
    step; kept is 1 exactly where t = 0.
    """
    kind = wide(statistics.device)
    log_px, log_pz, total = statistics.to(kind).unbind(1)
    ratio, kept = ratio.to(kind), kept.to(kind)
    n, first, same = num_states, kept == 1, x == z
    redrawn = (1 - ratio) / n
    after = (1 - ratio * kept) / n
    log_zp = (ratio * kept * log_pz.exp() + after).log()
    last_jump = log_zp - (redrawn + ratio * same).log() - log_px

    kept = torch.where(first, 0.5, kept)  # any other value: these rows are not used
    odds = uniform_odds(kept, n)
    log_b = ((1 - kept) / n).log()
    zq = ratio * kept * same + (1 - ratio * kept) / n
    log_zp = (ratio * kept * log_pz.exp() + (1 - ratio * kept) / n).log()
    change = log_zp - zq.log()  # log q - log p of a token is this plus log(1 + odds x_v) - log(1 + odds p_v)
    at_z, at_x = torch.log1p(odds * log_pz.exp()), torch.log1p(odds * log_px.exp())
    other = redrawn * log_b.exp() / zq
    stays = (ratio + redrawn) * torch.where(same, kept + log_b.exp(), log_b.exp()) / zq
    kl = stays * (change + torch.where(same, torch.log1p(odds), 0.0) - at_z)
    kl = kl + other * ((n - 1) * change - (total - at_z))
    moved = torch.log1p(odds)  # z != x: the token x is likelier than the others
    correction = redrawn * (kept + log_b.exp()) / zq * (change + moved - at_x) - other * (change - at_x)
    kl = kl + torch.where(same, 0.0, correction)
    return torch.where(first, last_jump, kl.clamp_min(0))
