"""What a system is: a frozen dataclass of hyperparameters with a loss and a sampler.

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..sampling.request import Request, Step


class System(Protocol):
    """A way to train a Denoiser and to draw from it. The mask id is part of it; the network knows none."""

    mask_id: int

    def terms(
        self, net: Any, x: Tensor, valid: Tensor | None, given: Tensor | None, rng: Randomness, train: bool
    ) -> list[Term]:
        """Named terms of the loss (train) or of the bound (not train) of x [B, L].

        valid, bool [B, L] or None for all: padding is neither seen nor scored.
        given, bool [B, L] or None for nothing: given tokens are seen and not scored.
        In training the network is called once, whatever the rows: processes that share its weights must keep step.
        """
        ...

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        """Per term, the number of tokens it is normalised by, for scored = valid & ~given, bool [B, L]."""
        ...

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        """The complete denoising schedule of a request; raises ValueError for what this system cannot do."""
        ...

    def sample(self, net: Any, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Carry out a schedule, one network call per step."""
        ...


def names() -> list[str]:
    """The systems of the package, by module name."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def find(name: str) -> type:
    """The class of a system: the name of a module in `esolm.systems`, or `package.module.Class` elsewhere."""
    if name in names():
        return importlib.import_module(f"esolm.systems.{name}").System
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"no system {name!r}: choose one of {', '.join(names())}, or give package.module.Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no system {name!r}: {error}") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"system {name!r} is not a dataclass: its fields are its options")
    return found
