"""Esoteric Language Models: any-order and masked-diffusion language models in PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .draw import Draw
    from .model import LanguageModel, Samples, load
    from .net.denoiser import Denoiser, DenoiserConfig, Rows
    from .order import Schedule
    from .randomness import Randomness
    from .visibility import Visibility

__version__ = "0.1.0"

_HOME = {
    "Denoiser": "net.denoiser",
    "DenoiserConfig": "net.denoiser",
    "Draw": "draw",
    "LanguageModel": "model",
    "Randomness": "randomness",
    "Rows": "net.denoiser",
    "Samples": "model",
    "Schedule": "order",
    "Visibility": "visibility",
    "load": "model",
}

__all__ = [
    "Denoiser",
    "DenoiserConfig",
    "Draw",
    "LanguageModel",
    "Randomness",
    "Rows",
    "Samples",
    "Schedule",
    "Visibility",
    "load",
]


def __getattr__(name: str) -> Any:
    # PyTorch is loaded with the first name that needs it, so that `esolm --help` answers at once.
    if name in _HOME:
        return getattr(importlib.import_module(f"esolm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'esolm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
