"""A sampling request, and what one pass of a sampler commits.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..core.draw import Draw


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
