"""Numbers from the authors' code, and how near ours must be.

Shapes: B batch, L length.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

FILES = Path(__file__).parents[1] / "golden"
DOUBLE, SINGLE = 1e-10, 1e-5
"""Tolerances of float64 and float32 files, relative to max(1, |value|)."""


class Golden(dict[str, Tensor]):
    """The tensors of a file, and the names of those that were read."""

    def __init__(self, name: str) -> None:
        super().__init__(load_file(FILES / f"{name}.safetensors"))
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Check that two tensors agree."""
    assert found.shape == expected.shape
    error = ((found.double() - expected.double()).abs() / expected.double().abs().clamp_min(1)).max().item()
    assert error <= tolerance, error


def rows(t: Tensor) -> Tensor:
    """[B, L, ...] -> [B L, ...]."""
    return t.flatten(0, 1)
