"""The sampling options, declared once for Python, the command line and the benchmarks.

Imports nothing heavy, so that `esolm sample --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

OF_SOME_SAMPLERS = ("alpha_0", "num_steps", "parallelism", "order", "window")
"""Options that only some samplers take; a system lists them in `System.samplers`."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample. Null leaves the choice to the system."""

    sampler: str | None = None
    """ancestral, first_hitting, block, left_to_right, order or speculative, as far as the system has them."""
    alpha_0: float | None = None
    """Share of the tokens that diffusion generates; null is the share the model was trained with."""
    num_steps: int | None = None
    """Diffusion steps T; null draws one token at a time."""
    parallelism: int | None = None
    """Sampler block: tokens drawn together."""
    order: Sequence[int] | None = None
    """Samplers order and speculative: all positions in turn, as in 2,0,1."""
    window: int | None = None
    """Sampler speculative: tokens drafted ahead of a pass; null adapts it."""
    given_order: Literal["ascending", "random"] = "ascending"
    """Order among the given tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability mass."""
    top_k: int | None = None
    """Keep this many of the most likely tokens."""
    seed: int = 0
    """Determines every sample, each on its own."""
    batch_size: int = 32
    """Samples computed together; their text does not depend on it."""

    def __post_init__(self) -> None:
        if self.alpha_0 is not None and not 0 <= self.alpha_0 <= 1:
            raise ValueError(f"alpha_0 is {self.alpha_0}; it must be between 0 and 1")
        for name in ("num_steps", "parallelism", "window", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


class SamplingKeywords(TypedDict, total=False):
    """`SamplingOptions` as keyword arguments, for editors and type checkers; a test compares the two."""

    sampler: str | None
    alpha_0: float | None
    num_steps: int | None
    parallelism: int | None
    order: Sequence[int] | None
    window: int | None
    given_order: Literal["ascending", "random"]
    temperature: float
    top_p: float
    top_k: int | None
    seed: int
    batch_size: int
