"""The spindle schedule of DiffusionBERT: frequent tokens are masked later than rare ones.

A token of the weight c, about zero on average, is kept after t of T steps with the probability

    k_t = 1 - t/T + spindle sin(pi t/T) c,    at most 0.999 after the first step and at least 0;  k_0 = 1, k_T = 0.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frequency(counts: Tensor) -> Tensor:
    """log(count + 1) over the largest of them, float64 [V]: in 0 .. 1."""
    log = torch.log1p(counts.double())
    return log / log.max().clamp_min(1e-30)


def spindle_kept(step: Tensor, num_steps: int, spindle: float, c: Tensor) -> Tensor:
    """k_t for t = step, of the broadcast shape of step and c."""
    share = step.to(c.dtype) / num_steps
    wave = torch.where(step == num_steps, 0.0, torch.sin(math.pi * share))  # sin(pi) is not zero in floating point
    kept = (1 - share + spindle * wave * c).clamp(0, 0.999)
    return torch.where(step == 0, 1.0, kept)


def spindle_step_nats(log_p: Tensor, x: Tensor, reveal: Tensor) -> Tensor:
    """KL of one reverse step of a masked token, [R]: it was revealed in this step or not.

    log_p [R, V]; reveal [R, V]: the probability u_v that the mask hides what was still the token v one step before.
    The network reveals v with probability p_v u_v. Where u_v is 1 for all v this is -log p_x.
    """
    own = reveal.gather(1, x[:, None])[:, 0]
    log_x = log_p.gather(1, x[:, None])[:, 0].to(own.dtype)
    stays = (log_p.exp() * (1 - reveal).to(log_p.dtype)).sum(-1).to(own.dtype)  # 1 - sum_v p_v u_v
    hidden = torch.where(own < 1, (1 - own) * ((1 - own).clamp_min(1e-30).log() - stays.clamp_min(1e-30).log()), 0.0)
    return (hidden - own * log_x).clamp_min(0)


def authors_weight(step: Tensor, num_steps: int, kept: Tensor) -> Tensor:
    """The weight of a masked token's nats in the sum of DiffusionBERT's authors; kept: k_t, of the step's beginning.

    It takes the one-step chance of the plain schedule, 1 / (T - t), and so does not add up to a bound: over all steps
    a rare token weighs less than 1 and a frequent one more.
    """
    rate = 1 / (num_steps - step).to(kept.dtype)
    return rate * kept / (rate * kept + 1 - kept)
