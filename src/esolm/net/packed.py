"""Several inputs of different shapes in one pass, so that every linear layer processes all their rows at once.

Shapes: B batch, N network input, R rows that get logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.batch import Batch
from ..core.float64 import wide
from ..core.visibility import Packed, Part, Visibility
from .denoiser import Rows
from .head import Score
from .protocol import Forward


class Call(NamedTuple):
    """The arguments of a network for the nats of some rows of one input."""

    tokens: Tensor  # int [B, N]
    position: Tensor  # int [B|1, N]
    visibility: Visibility
    out: Rows
    score: Score


class NatsCall(NamedTuple):
    """A network call whose nats belong at positions of texts."""

    call: Call
    place: Callable[[Tensor], Tensor]  # its nats [R] -> [B, L]


def unpadded(net: Forward, batch: Batch, pending: Callable[[Tensor, Batch], NatsCall]) -> Tensor:
    """Nats [B, L] of rows of different lengths, packed into one pass in which they do not see each other.

    pending(rows, part): the call of the part of the batch with these rows, which all have the length of the part.
    A compiled network gets all rows with their padding, because it would be compiled again for each set of lengths.
    """
    fixed = isinstance(net, nn.Module) and any(is_compiled(module) for module in net.modules())
    parts = [(torch.arange(len(batch.x)), batch)] if fixed else batch.by_length()
    calls = [pending(rows, part) for rows, part in parts]
    if len(calls) == 1 and len(parts[0][0]) == len(batch.x) and parts[0][1].x.shape == batch.x.shape:
        return calls[0].place(*together(net, [calls[0].call]))
    nats = torch.zeros(batch.x.shape, dtype=wide(batch.x.device), device=batch.x.device)
    answers = together(net, [each.call for each in calls]) if calls else []
    for (rows, part), each, found in zip(parts, calls, answers, strict=True):
        own = F.pad(each.place(found), (0, batch.x.shape[1] - part.x.shape[1]))
        nats = nats.to(own.dtype).index_copy(0, rows, own)
    return nats


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiles its calls."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def together(net: Forward, calls: Sequence[Call]) -> Sequence[Tensor]:
    """The nats [R] of each call, in one pass for all."""
    if len(calls) == 1:
        call = calls[0]
        return [net(call.tokens, call.position, call.visibility, out=call.out, score=call.score)]
    index, parts, first = [], [], 0
    for call in calls:
        batch, slots = call.tokens.shape
        asked, rows = call.out.span, call.out.index
        width = asked.stop - asked.start
        rows = torch.arange(batch * width, device=call.tokens.device) if rows is None else rows
        index.append(first + rows // width * slots + rows % width + asked.start)
        parts.append(Part(batch, call.visibility, asked))
        first += batch * slots
    targets, excluded, weights = zip(*(call.score for call in calls), strict=True)
    kind = wide(targets[0].device)
    every = [torch.ones_like(t, dtype=kind) if w is None else w.to(kind) for t, w in zip(targets, weights, strict=True)]
    nats = net(
        torch.cat([call.tokens.flatten() for call in calls])[None],
        torch.cat([call.position.expand_as(call.tokens).flatten() for call in calls])[None],
        Packed(tuple(parts)),
        out=Rows(slice(0, first), torch.cat(index)),
        score=Score(torch.cat(targets), excluded[0], torch.cat(every)),
    )
    return nats.split([len(rows) for rows in index])
