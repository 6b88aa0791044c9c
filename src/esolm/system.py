"""What a system is: a frozen dataclass of hyperparameters with a loss and a sampler.

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .draw import Draw
from .order import Schedule
from .randomness import Randomness
from .terms import Term


class Drafts(NamedTuple):
    """What one speculative pass drafted: of a row's drafts the first `accepted` are kept, the next one is rejected and
    replaced, and those behind it are dropped without a judgement."""

    position: Tensor  # int [B, d]
    token: Tensor  # int [B, d]
    drawn: Tensor  # bool [B, d]; False is fill
    accepted: Tensor  # int [B]
    fed: Tensor  # int [B]: tokens and masks of the row in this pass


class Step(NamedTuple):
    """What one pass committed."""

    position: Tensor  # int [B, m]
    token: Tensor  # int [B, m]
    drawn: Tensor  # bool [B, m]; False is fill, in rows that commit fewer
    drafts: Drafts | None = None  # of a speculative pass


@dataclass(frozen=True)
class Request:
    """What to sample: the given tokens of x, which positions exist, and how. None leaves it to the system."""

    x: Tensor  # int [B, L]
    given: Tensor  # bool [B, L]
    valid: Tensor  # bool [B, L]; a row's positions 0 .. its length
    sampler: str | None = None
    alpha_0: float | None = None
    num_steps: int | None = None
    parallelism: int | None = None
    order: Tensor | None = None  # int [B|1, L]
    window: int | None = None
    given_order: str = "ascending"
    draw: Draw = field(default_factory=Draw)

    def __post_init__(self) -> None:
        if self.alpha_0 is not None and not 0 <= self.alpha_0 <= 1:
            raise ValueError(f"alpha_0 is {self.alpha_0}; it must be between 0 and 1")
        for name in ("num_steps", "parallelism", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def check(self, system: str, samplers: Mapping[str, tuple[str, ...]], sampler: str) -> str:
        """The sampler, if this system has it and every option that is set belongs to it."""
        if sampler not in samplers:
            raise ValueError(f"{system} has no sampler {sampler!r}; it has {', '.join(samplers)}")
        for name in ("alpha_0", "num_steps", "parallelism", "order", "window"):
            if getattr(self, name) is not None and name not in samplers[sampler]:
                allowed = ", ".join(samplers[sampler]) or "none of these options"
                raise ValueError(f"sampler {sampler} of {system} does not use {name}; it takes {allowed}")
        return sampler


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
    from . import systems

    return sorted(m.name for m in pkgutil.iter_modules(systems.__path__) if not m.name.startswith("_"))


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
