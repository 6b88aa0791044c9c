"""Orders: sigma[:, l] is the position that is denoised l-th. Only ever permutations, 0-based.

Shapes: B batch, L length.
"""

from __future__ import annotations

import torch
from torch import Tensor

GIVEN, CLEAN, MASKED, PADDING = range(4)
"""The groups of an order, one after another."""


def inverse(sigma: Tensor) -> Tensor:
    """sigma_inv[:, i] is the step at which position i is denoised, int [B, L]."""
    steps = torch.arange(sigma.shape[1], device=sigma.device).expand_as(sigma)
    return torch.empty_like(sigma).scatter_(1, sigma, steps)


def groups(masked: Tensor, valid: Tensor | None, given: Tensor | None) -> Tensor:
    """The group of each position, int [B, L]."""
    group = torch.where(masked, MASKED, CLEAN)
    if given is not None:
        group = torch.where(given, GIVEN, group)
    return group if valid is None else torch.where(valid, group, PADDING)


def sort(group: Tensor, u: Tensor, ascending: bool = False) -> Tensor:
    """sigma with the groups in turn, each in random order by u in (0, 1); `ascending` keeps MASKED left to right."""
    if ascending:
        length = group.shape[1]
        u = torch.where(group == MASKED, torch.arange(length, device=u.device) / length, u)
    return (group + u).argsort(-1)


def draw(alpha_0: float, u: Tensor, clean: Tensor, valid: Tensor | None, given: Tensor | None) -> Tensor:
    """sigma ~ P_L^alpha_0: each position is clean with probability alpha_0; the clean in random order, then the rest
    ascending. Given positions come first, padding last. u, clean: two independent uniforms [B, L]."""
    return sort(groups(clean >= alpha_0, valid, given), u, ascending=True)
