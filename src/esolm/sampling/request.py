"""A sampling request, and what one pass of a sampler commits.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..constraints.guide import Guide, Limits
from ..core.draw import Draw
from .options import OF_SOME_SAMPLERS, SamplingOptions


class Drafts(NamedTuple):
    """The drafts of one speculative pass. Of each row the first `accepted` are kept, the next one is rejected and
    replaced, and those behind it are dropped without a check."""

    position: Tensor  # int [B, d]
    token: Tensor  # int [B, d]
    drawn: Tensor  # bool [B, d]; False is padding
    accepted: Tensor  # int [B]
    fed: Tensor  # int [B]: tokens and masks of the row in this pass


class Candidates(NamedTuple):
    """What a pass of a sampler that chooses positions by confidence considered. The tokens of its step come in falling
    confidence."""

    position: Tensor  # int [B, C]: the candidates of each row, ascending
    asked: Tensor  # bool [B, C]; False is padding. Row by row, the asked ones are the rows of the pass's logits
    confidence: Tensor  # float [B, C], on the CPU; -inf at padding
    column: Tensor  # int [B, m]: the candidate that each token of the step was
    fed: Tensor  # int [B]: positions of the row that the pass fed


class Step(NamedTuple):
    """The tokens that one pass committed."""

    position: Tensor  # int [B, m]
    token: Tensor  # int [B, m]
    drawn: Tensor  # bool [B, m]; False is padding, in rows that commit fewer
    drafts: Drafts | None = None  # of a speculative pass
    candidates: Candidates | None = None  # of a pass that chose its positions
    fed: Tensor | None = None  # bool [B]: rows that needed this pass; None: those that committed a token

    @property
    def needed(self) -> Tensor:
        """Rows that needed this pass, bool [B]."""
        return self.drawn.any(1) if self.fed is None else self.fed


@dataclass(frozen=True)
class Request:
    """What to sample: the given tokens of x, which positions exist, and how."""

    x: Tensor  # int [B, L]
    given: Tensor  # bool [B, L]
    valid: Tensor  # bool [B, L]; of each row the positions 0 .. its length - 1
    options: SamplingOptions = field(default_factory=SamplingOptions)
    draw: Draw = None  # type: ignore[assignment]  # by default as the options say
    order: Tensor | None = None  # int [B|1, L]; by default that of the options
    limits: Limits | None = None  # of each row, the spans that must match a pattern

    def __post_init__(self) -> None:
        o = self.options
        if self.draw is None:
            object.__setattr__(self, "draw", Draw(o.temperature, o.top_p, o.top_k))
        if self.order is None and o.order is not None:
            object.__setattr__(self, "order", torch.tensor([o.order]))

    def guide(self) -> Guide | None:
        """A guide of its own for a run of the request, or None without limits. Raises ValueError if nothing matches."""
        return None if self.limits is None else self.limits.begin(self.x, self.given)

    def refuse_limits(self, system: str, why: str) -> None:
        """Raise ValueError if the request has limits."""
        if self.limits is not None:
            raise ValueError(f"regex and json_schema are not possible with {system}, {why}: use a masked system")

    def choose_sampler(self, system: str, samplers: Mapping[str, tuple[str, ...]], default: str) -> str:
        """The requested sampler or the default; raises ValueError if the system lacks it or it ignores an option."""
        sampler = self.options.sampler or default
        if sampler not in samplers:
            raise ValueError(f"{system} has no sampler {sampler!r}: choose one of {', '.join(samplers)}")
        given = {name: getattr(self.options, name) for name in OF_SOME_SAMPLERS} | {"order": self.order}
        for name, value in given.items():
            if value is not None and name not in samplers[sampler]:
                others = [other for other, taken in samplers.items() if name in taken]
                advice = f", or choose the sampler {' or '.join(others)}" if others else ""
                raise ValueError(f"sampler {sampler} of {system} does not use {name}: leave it out{advice}")
        return sampler
