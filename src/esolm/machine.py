"""Where the arithmetic runs: device, precision, and a fixed order of summation on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def pick_device(name: str) -> torch.device:
    """The named device; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {name!r}: {str(error).splitlines()[0]}; use auto, cpu, cuda or mps") from error


def pick_precision(name: str, device: torch.device) -> str:
    """`float32` or `bf16`; `auto` is bf16 where the machine has instructions for it."""
    if name not in ("auto", "float32", "bf16"):
        raise ValueError(f"no precision {name!r}: choose auto, float32 or bf16")
    if name == "auto":
        return "bf16" if fast_bf16(device) else "float32"
    return name


def fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are faster than float32 ones there."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        # These probes are private to PyTorch and come and go with its versions.
        probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        return any(getattr(torch.cpu, probe, bool)() for probe in probes)
    return False


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context for forward passes: bf16 matrix products or nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On the CPU, scattered additions run in a fixed order, so that a step gives the same bits each time."""
    if device.type != "cpu":
        yield
        return
    settings: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill
