"""Approximate KV caches of MDLM: a pass feeds some positions, and reads old keys and values of the others.

Keys and values of a bidirectional network depend on all tokens, so those that are not computed again are out of date.
What a cache feeds in a pass that is not full:

- prefix (Fast-dLLM): the block and what is behind it. The first pass of a block is full.
- dual (Fast-dLLM): the block alone. The first pass of a block is full.
- delayed (dKV-Cache-Decode): the masks, and the tokens that the pass before decided. The first two passes of a block
  are full, and every 8th.
- frozen (FreeCache): the block and what is behind it. Only the first pass of a sample is full. The first pass of a
  block also feeds the block before, whose keys and values then stay; FreeCache itself does not, and keeps those of the
  pass that drew the block's last tokens, where they were masks.

Shapes: B batch, L length, n fed positions, C candidates, R of all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ..core.visibility import full, hide
from ..net.cache import PositionCache
from ..net.denoiser import Rows
from ..net.protocol import Network
from .confidence import NEVER, Now, Passes, Whole, packed
from .options import SamplingOptions
from .passes import call

DELAYED = 8
"""Passes from one full pass of cache delayed to the next, by default."""


def passes_of(net: Network, valid: Tensor, options: SamplingOptions) -> Passes:
    """The passes of a request, with the cache of its options; valid: bool [B, L]."""
    if options.cache in (None, "none"):
        return Whole(net, valid)
    return Partial(net, valid, options.cache, options.refresh, options.freeze == "last_pass")


def due(kind: str, now: Now, refresh: int | None) -> Tensor:
    """The rows whose pass is full, bool [B]."""
    if kind == "frozen":
        full_pass = now.number % refresh == 0 if refresh else now.number == 0
        return torch.full_like(now.live, full_pass)
    if kind == "delayed":
        return (now.age <= 1) | (now.age % (refresh or DELAYED) == 0)
    return now.age % refresh == 0 if refresh else now.age == 0


def fed_positions(kind: str, now: Now, valid: Tensor, refresh: int | None, last_pass: bool) -> Tensor:
    """What a pass feeds, bool [B, L]; nothing of rows that are finished."""
    position = torch.arange(valid.shape[1])
    begin = now.begin[:, None]
    if kind == "delayed":
        some = now.when >= now.number - 1
    elif kind == "dual":
        some = (position >= begin) & (position < now.end[:, None])
    else:
        if kind == "frozen" and not last_pass:
            begin = now.last.clamp_min(0)[:, None]
        some = position >= begin
    return valid & now.live[:, None] & (due(kind, now, refresh)[:, None] | some)


class Partial:
    """Passes over the positions that a cache feeds."""

    def __init__(self, net: Network, valid: Tensor, kind: str, refresh: int | None, last_pass: bool) -> None:
        self.net, self.valid, self.kind, self.refresh, self.last_pass = net, valid, kind, refresh, last_pass
        batch, length = valid.shape
        self.cache = PositionCache(net.new_cache(batch, 2 * length), valid.to(net.device))

    def logits(self, now: Now) -> Generator[Any, Tensor, tuple[Tensor, Tensor]]:
        """Logits of the candidates, row by row, and how many positions each row fed, from one pass."""
        fed = fed_positions(self.kind, now, self.valid, self.refresh, self.last_pass)
        length, device = fed.shape[1], now.tokens.device
        first = int(fed.any(0).int().argmax())
        # If every row feeds all that it has from `first` on, slots are overwritten in place.
        whole = bool((fed | ~(self.valid & now.live[:, None]))[:, first:].all())
        at = torch.arange(first, length).expand(len(fed), -1) if whole else packed(fed)
        real = fed[:, first:] if whole else at < NEVER
        at = torch.where(at < NEVER, at, length)
        slot = torch.zeros(len(fed), length + 1, dtype=torch.long).scatter_(
            1, at, torch.arange(at.shape[1]).expand_as(at)
        )
        row, column = (now.at < NEVER).nonzero(as_tuple=True)
        index = row * at.shape[1] + slot[row, now.at[row, column]]
        place = at.clamp_max(length - 1).to(device)
        seen = hide(full(at.shape[1], None, device), real.to(device))
        out = Rows(slice(0, at.shape[1]), index.to(device))
        self.cache.begin(at.to(device), first if whole else None)
        logits = yield from call(self.net, now.tokens.gather(1, place), place, seen, out, self.cache.slots)
        self.cache.keep()
        return logits, fed.sum(1)
