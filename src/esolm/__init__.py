"""Esoteric Language Models: any-order and masked-diffusion language models in PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.draw import Draw
    from .core.order import Schedule
    from .core.randomness import Randomness
    from .core.visibility import Visibility
    from .model import LanguageModel, Samples, load
    from .net.denoiser import Denoiser, DenoiserConfig, Rows
    from .training.config import RunConfig
    from .training.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "Denoiser": "net.denoiser",
    "DenoiserConfig": "net.denoiser",
    "Draw": "core.draw",
    "LanguageModel": "model",
    "Randomness": "core.randomness",
    "Rows": "net.denoiser",
    "RunConfig": "training.config",
    "Samples": "model",
    "Schedule": "core.order",
    "Trainer": "training.trainer",
    "Visibility": "core.visibility",
    "load": "model",
}

__all__ = [
    "Denoiser",
    "DenoiserConfig",
    "Draw",
    "LanguageModel",
    "Randomness",
    "Rows",
    "RunConfig",
    "Samples",
    "Schedule",
    "Trainer",
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
