"""A sample while it is being made, and what its passes cost.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
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
    log_q: Sequence[float] | None = None  # with a pattern: log-probability of the draws of each row so far


@dataclass(frozen=True)
class Speculation:
    """What the speculative sampler tried for each sample; drafts behind a rejected one are dropped without a check."""

    fed: list[int]  # tokens and masks, in all passes
    drafted: list[int]
    accepted: list[int]
    rejected: list[int]


def until(ids: list[int], end: int | None, drawn: Container[int] | None = None) -> list[int]:
    """The tokens before the first end token; of those at drawn positions, if these are given."""
    ends = (i for i, token in enumerate(ids) if token == end and (drawn is None or i in drawn))
    return ids[: next(ends, None)]


class Work:
    """What the passes of one batch did: counts for each row, and of samplers that choose positions, their choices."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # int [B, 5]
        self.speculative = False
        self.steps: list[list[list[int]]] | None = None
        self.fed: list[list[int]] | None = None

    def add(self, step: Step) -> None:
        """Add one pass."""
        counts = tally(step)
        self.counts = counts if self.counts is None else self.counts + counts
        self.speculative |= step.drafts is not None
        if step.candidates is None:
            return
        if self.steps is None or self.fed is None:
            self.steps, self.fed = [[] for _ in counts], [[] for _ in counts]
        for row, fed in enumerate(step.candidates.fed.tolist()):
            if fed:
                self.steps[row].append(step.position[row][step.drawn[row]].tolist())
                self.fed[row].append(fed)


def costs(work: Sequence[Work]) -> tuple[list[int], Speculation | None, list[list[int]] | None]:
    """`nfe`, `speculation` and `fed` of the samples of all batches."""
    counts = [each.counts for each in work if each.counts is not None]
    nfe, *tried = torch.cat(counts).T.tolist()
    speculation = Speculation(*tried) if any(each.speculative for each in work) else None
    if all(each.fed is None for each in work):
        return nfe, speculation, None
    found = list[list[int]]()
    for each, rows in zip(work, counts, strict=True):  # a batch in which everything is given has no counts
        found += [[] for _ in rows] if each.fed is None else each.fed
    return nfe, speculation, found


def tally(step: Step) -> Tensor:
    """Of each row, int [B, 5]: whether it needed the pass, and what was fed, drafted, accepted and rejected."""
    got = step.needed.long()
    if step.drafts is None:
        return F.pad(got[:, None], (0, 4))
    drafted, accepted = step.drafts.drawn.sum(1), step.drafts.accepted
    return torch.stack([got, step.drafts.fed, drafted, accepted, (accepted < drafted).long()], 1)
