"""Esoteric Language Models: any-order and masked-diffusion language models in PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.batch import Batch
    from .core.draw import Draw
    from .core.order import Schedule
    from .core.randomness import Randomness
    from .core.visibility import Visibility
    from .generation.samples import Samples
    from .likelihood.orders import LogProb
    from .model import LanguageModel, load
    from .net.config import DenoiserConfig
    from .net.denoiser import Denoiser, Rows
    from .sampling.options import SamplingOptions
    from .systems import AnyOrder, System
    from .training.config import RunConfig
    from .training.trainer import Trainer

__version__ = "0.2.0"

_HOME = {
    "AnyOrder": "systems",
    "Batch": "core.batch",
    "Denoiser": "net.denoiser",
    "DenoiserConfig": "net.config",
    "Draw": "core.draw",
    "LanguageModel": "model",
    "LogProb": "likelihood.orders",
    "Randomness": "core.randomness",
    "Rows": "net.denoiser",
    "RunConfig": "training.config",
    "Samples": "generation.samples",
    "SamplingOptions": "sampling.options",
    "Schedule": "core.order",
    "System": "systems",
    "Trainer": "training.trainer",
    "Visibility": "core.visibility",
    "load": "model",
}

__all__ = [
    "AnyOrder",
    "Batch",
    "Denoiser",
    "DenoiserConfig",
    "Draw",
    "LanguageModel",
    "LogProb",
    "Randomness",
    "Rows",
    "RunConfig",
    "Samples",
    "SamplingOptions",
    "Schedule",
    "System",
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
