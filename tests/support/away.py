"""A device that refuses float64, as MPS does: it computes on the CPU, and a float64 tensor on it raises TypeError."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # the only one that is neither the CPU nor needs a driver


class AwayTensor(Tensor):
    """A tensor on the device, with its values on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> AwayTensor:
        if values.dtype == torch.float64:
            raise TypeError("this device has no float64")
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device=DEVICE, requires_grad=values.requires_grad,
        )  # fmt: skip
        made.values = values
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AwayTensor({self.values!r})"

    def tolist(self) -> Any:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Away(TorchDispatchMode):
    """While this is on, tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU; what belongs on the device is wrapped."""
    found: dict[int, AwayTensor] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, AwayTensor):
            return value
        found[id(value.values)] = value
        return value.values

    inner, options = tree_map(unwrap, (args, dict(kwargs)))
    device = options.get("device")
    away = bool(found) if device is None else torch.device(device) == DEVICE
    if device is not None:
        options["device"] = torch.device("cpu")

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, AwayTensor):
            return value
        return found[id(value)] if id(value) in found else AwayTensor(value)

    result = func(*inner, **options)
    return tree_map(wrap, result) if away else result
