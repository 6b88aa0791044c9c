"""Weights as small whole numbers times a scale.

Shapes: O outputs, I inputs, G groups of 32 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 32
"""Inputs with a common scale in 4 bits."""


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O, I] -> int8 [O, I] from -127 to 127, and a bf16 scale [O] for each output."""
    # The scale is rounded before it is used, so that its being bf16 adds no error.
    scale = (weight.abs().amax(1) / 127).clamp_min(1e-30).to(torch.bfloat16)
    whole = (weight / scale[:, None].to(weight.dtype)).round_().clamp_(-127, 127)
    return whole.to(torch.int8), scale


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O, I] -> uint8 [O, I] from 0 to 15, standing for -8 to 7, and a bf16 scale [O, G] for each group.

    The weight of largest size in a group becomes -8 exactly, so the scale has the opposite sign.
    """
    outputs, inputs = weight.shape
    groups = F.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).to(torch.bfloat16)
    step = scale.to(weight.dtype)
    whole = torch.where(step == 0, 0, groups / step).round_().clamp_(-8, 7) + 8
    return whole.to(torch.uint8).flatten(1)[:, :inputs].contiguous(), scale[:, :, 0].contiguous()


def from_int4(whole: Tensor, scale: Tensor) -> Tensor:
    """The weights that `to_int4` stands for, float32 [O, I]."""
    return (whole.float() - 8) * scale.float().repeat_interleave(GROUP, 1)[:, : whole.shape[1]]
