"""Double precision where a device has none: MPS, the GPU of Apple silicon, computes in float32 at most."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def wide(device: torch.device) -> torch.dtype:
    """The widest float type of the device: float64, or float32 where that is missing."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def to_device(u: Tensor, device: torch.device) -> Tensor:
    """Uniforms in (0, 1), float64 on the CPU, on a device in its widest type.

    In float32 they are kept so far inside (0, 1) that u + 3, the largest key that an order is sorted by, is below 4.
    """
    if wide(device) == torch.float64:
        return u.to(device)
    return u.float().clamp_(2.0**-21, 1 - 2.0**-21).to(device)
