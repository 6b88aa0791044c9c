"""Several inputs of different shapes in one pass, so that every linear layer processes all their rows at once.

Shapes: B batch, N network input, R rows that get logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.float64 import wide
from ..core.visibility import Packed, Part, Visibility
from .denoiser import Rows
from .head import Score
from .protocol import Forward


class Call(NamedTuple):
    """The arguments of a network for the nats of some rows of one input."""

    tokens: Tensor  # int [B, N]
    position: Tensor  # int [B, N]
    visibility: Visibility
    out: Rows  # with an index
    score: Score


def together(net: Forward, calls: Sequence[Call]) -> Sequence[Tensor]:
    """The nats [R] of each call, in one pass for all."""
    if len(calls) == 1:
        call = calls[0]
        return [net(call.tokens, call.position, call.visibility, out=call.out, score=call.score)]
    index, parts, first = [], [], 0
    for call in calls:
        batch, slots = call.tokens.shape
        asked, rows = call.out.span, call.out.index
        assert rows is not None
        width = asked.stop - asked.start
        index.append(first + rows // width * slots + rows % width + asked.start)
        parts.append(Part(batch, call.visibility, asked))
        first += batch * slots
    targets, excluded, weights = zip(*(call.score for call in calls), strict=True)
    kind = wide(targets[0].device)
    every = [torch.ones_like(t, dtype=kind) if w is None else w.to(kind) for t, w in zip(targets, weights, strict=True)]
    nats = net(
        torch.cat([call.tokens.flatten() for call in calls])[None],
        torch.cat([call.position.flatten() for call in calls])[None],
        Packed(tuple(parts)),
        out=Rows(slice(0, first), torch.cat(index)),
        score=Score(torch.cat(targets), excluded[0], torch.cat(every)),
    )
    return nats.split([len(rows) for rows in index])
