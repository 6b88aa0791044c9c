"""Linear layers with adapters: peft replaces a layer by one that wraps it and adds a product of two thin matrices.

The wrapper's `weight` is that of the layer alone, so whatever reads weights must go through these functions.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


def is_adapted(layer: Any) -> bool:
    """Whether the layer has adapters of peft."""
    return hasattr(layer, "base_layer")


def some_outputs(linear: Any, x: Tensor, rows: slice) -> Tensor:
    """linear(x)[..., rows], without the cost of the other outputs if the layer is plain or has plain LoRA adapters."""
    if not is_adapted(linear):
        return F.linear(x, linear.weight[rows], None if linear.bias is None else linear.bias[rows])
    if not _is_plain_lora(linear):
        return linear(x)[..., rows]
    found = some_outputs(linear.base_layer, x, rows)
    dtype = found.dtype
    for name in linear.active_adapters:
        if name in linear.lora_A:
            down, up = linear.lora_A[name], linear.lora_B[name]
            thin = down(linear.lora_dropout[name](x.to(down.weight.dtype)))
            found = found + F.linear(thin, up.weight[rows]) * linear.scaling[name]
    return found.to(dtype)


def _is_plain_lora(linear: Any) -> bool:
    """Whether the adapters add scaling * B A x to the outputs of an ordinary linear layer, and nothing else."""
    if not hasattr(linear, "lora_A") or linear.merged or linear.disable_adapters or linear.fan_in_fan_out:
        return False
    others = getattr(linear, "lora_variant", None) or any(linear.use_dora.values())
    biased = any(up.bias is not None for up in linear.lora_B.values())
    return type(linear.base_layer) is nn.Linear and not others and not biased


def without_adapters(linear: Any) -> Any:
    """The layer, or a copy of it with its adapters merged into its weight."""
    if not is_adapted(linear):
        return linear
    merged = copy.deepcopy(linear)
    if not (merged.merged or merged.disable_adapters):
        merged.merge()
    return merged.get_base_layer()
