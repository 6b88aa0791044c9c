"""A sample while it is being made, and when it is finished.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.order import Schedule
from .request import Step


class Event(NamedTuple):
    """One step of a running sample: what it committed, and all tokens so far.

    With a schedule that rewrites, later steps may change the tokens of this one.
    """

    step: int  # 0-based, of this batch
    steps: int  # of the row with the most; where rows differ, bd3lm and variant A may need more
    committed: Step
    tokens: Tensor  # int [B, L]; the mask id where nothing is decided yet; the next event overwrites it
    schedule: Schedule
    first: int  # index of the first sample of this batch
    seconds: float = 0.0  # spent in the model since the event before


@dataclass(frozen=True)
class Speculation:
    """What the speculative sampler tried for each sample; drafts behind a rejected one are dropped without a check."""

    fed: list[int]  # tokens and masks, in all passes
    drafted: list[int]
    accepted: list[int]
    rejected: list[int]


@dataclass(frozen=True, repr=False)
class Samples:
    """Generated texts with their tokens and their cost."""

    texts: list[str]
    tokens: list[list[int]]
    nfe: list[int]  # network evaluations that each row needed
    passes: int  # network calls of all batches
    steps: list[list[list[int]]]  # the schedule of each row: the positions of each step
    seconds: float
    speculation: Speculation | None = None  # of sampler speculative

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        first = repr(self.texts[0] if len(self.texts[0]) <= 60 else f"{self.texts[0][:60]}…") if self.texts else ""
        more = f", and {len(self) - 1} more" if len(self) > 1 else ""
        return f"Samples({first}{more}; {self.passes} passes, {self.seconds:.2f} s)"


def until(ids: list[int], end: int | None, drawn: Container[int] | None = None) -> list[int]:
    """The tokens before the first end token; of those at drawn positions, if these are given."""
    ends = (i for i, token in enumerate(ids) if token == end and (drawn is None or i in drawn))
    return ids[: next(ends, None)]


def tally(step: Step) -> Tensor:
    """Of each row, int [B, 5]: whether it needed the pass, and what was fed, drafted, accepted and rejected."""
    got = step.needed.long()
    if step.drafts is None:
        return F.pad(got[:, None], (0, 4))
    drafted, accepted = step.drafts.drawn.sum(1), step.drafts.accepted
    return torch.stack([got, step.drafts.fed, drafted, accepted, (accepted < drafted).long()], 1)
