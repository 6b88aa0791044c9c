"""What a pass of Eso-LM is fed: the clean tokens that the step before drew, and queries for those of this step.

A place is an index into the denoising order; tokens stay in the order of the schedule throughout.

Shapes: B batch, L length, K steps, m queries and c clean tokens fed at a step, N = c + m.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.order import Schedule
from ..core.query import Queries
from ..core.visibility import HIDDEN, Visibility, hide_copies
from ..net.cache import KVCache


class Feed(NamedTuple):
    """The input of one pass, clean tokens first."""

    tokens: Tensor  # int [B, N]
    position: Tensor  # int [B, N]
    visibility: Visibility
    num_clean: int
    at: Tensor  # int [B, m], the positions that are asked for
    drawn: Tensor  # bool [B, m]; the others are padding


class Ragged:
    """The passes of rows with different schedules; `tokens` are those that are known, [B, L + 1].

    hide_masks: a query sees the clean tokens and itself only. prefix: the given tokens see each other (variant A).
    """

    def __init__(self, x: Tensor, schedule: Schedule, queries: Queries, hide_masks: bool, prefix: bool) -> None:
        self.schedule, self.queries, self.hide_masks, self.device = schedule, queries, hide_masks, x.device
        self.length = x.shape[1]
        self.starts = schedule.starts
        self.rank = functools.partial(prefix_rank, schedule.given[:, None] if prefix else 1)
        self.begin, self.count = torch.zeros_like(schedule.given), schedule.given
        self.lengths = torch.zeros_like(self.count)
        self.tokens = F.pad(x.cpu().gather(1, schedule.sigma), (0, 1), value=queries.mask_id).to(self.device)

    def feed(self, k: int) -> Feed:
        """The pass of step k; those of all steps before have been written."""
        begin, count, queries = self.begin, self.count, self.queries
        size, most = self.schedule.sizes[:, k], int(count.max())
        clean = places(begin, count, most, self.length)
        self.masks = masks = places(self.starts[:, k], size, int(size.max()), self.length)
        asked = queries.ask(self.tokens, masks, self.starts[:, k, None])
        seen = labels(clean, masks, self.length, self.rank, self.hide_masks, one_row(asked.copies), self.device)
        position = torch.cat([queries.sigma.gather(1, clean), asked.position], 1)
        fed = torch.cat([self.tokens.gather(1, clean.to(self.device)), asked.tokens], 1)
        at, drawn = queries.sigma.gather(1, masks), masks < self.length
        return Feed(fed, position.to(self.device), seen, most, at, drawn)

    def write(self, k: int, token: Tensor, cache: KVCache) -> None:
        """Commit the clean tokens of the pass, and keep the tokens that step k drew, int [B, m]."""
        self.lengths = self.lengths + self.count
        cache.commit(self.count.to(self.device), int(self.count.max()), int(self.lengths.max()))
        self.tokens.scatter_(1, self.masks.to(self.device), token)
        self.begin, self.count = self.starts[:, k], self.schedule.sizes[:, k]


class Even:
    """The passes of rows whose schedules have the same sizes, such as a single row: slices of what `Ragged` gathers."""

    def __init__(self, x: Tensor, schedule: Schedule, queries: Queries, hide_masks: bool, prefix: bool) -> None:
        self.queries, self.hide_masks, self.device = queries, hide_masks, x.device
        length = x.shape[1]
        given, sizes = int(schedule.given[0]), schedule.sizes[0].tolist()
        self.ends = [0, given, *(given + int(n) for n in schedule.sizes[0].cumsum(0))]  # clean tokens at each step
        self.sizes = sizes
        self.place = torch.arange(length)[None]
        rank = prefix_rank(schedule.given[:1, None] if prefix else 1, self.place)
        slots = torch.arange(capacity(schedule), device=self.device)[None]
        self.rank, self.slots, self.none = rank.to(self.device), slots, torch.full_like(slots, -1)
        self.hidden = torch.full_like(slots, HIDDEN)
        self.position = queries.sigma.to(self.device)
        known = x.cpu().gather(1, schedule.sigma)
        self.tokens = torch.where(self.place < given, known, queries.mask_id).to(self.device)
        self.drawn = torch.ones(len(x), max([1, *sizes]), dtype=torch.bool)

    def feed(self, k: int) -> Feed:
        """As `Ragged.feed`."""
        begin, end = self.ends[k], self.ends[k + 1]  # the clean tokens that are fed
        stop = end + self.sizes[k]
        at = self.queries.sigma[:, end:stop]
        fed, position, copies = self.tokens[:, begin:stop], self.position[:, begin:stop], None
        if self.queries.sigma_inv is not None:
            place = self.place[:, end:stop].expand(len(fed), -1)
            asked = self.queries.ask(self.tokens, place, self.place[:, end : end + 1])
            copies = one_row(asked.copies)
            fed = torch.cat([fed[:, : end - begin], asked.tokens], 1)
            position = torch.cat([position[:, : end - begin], asked.position.to(self.device)], 1)
        seen = hide_copies(self._labels(begin, end, stop), copies, end - begin)
        return Feed(fed, position, seen, end - begin, at, self.drawn[:, : stop - end])

    def _labels(self, begin: int, end: int, stop: int) -> Visibility:
        if not self.hide_masks:
            rank = self.rank[:, begin:stop]
            return Visibility(rank, rank, self.none[:, : stop - begin])
        clean, num_clean, num_masks = self.rank[:, begin:end], end - begin, stop - end
        before = (self.rank[:, end : end + 1] - 1).expand(-1, num_masks)
        return Visibility(
            rank=torch.cat([clean, self.hidden[:, :num_masks]], 1),
            horizon=torch.cat([clean, before], 1),
            clique=torch.cat([self.none[:, :num_clean], self.slots[:, num_clean : num_clean + num_masks]], 1),
        )

    def write(self, k: int, token: Tensor, cache: KVCache) -> None:
        """As `Ragged.write`."""
        begin, end = self.ends[k], self.ends[k + 1]
        cache.commit(end - begin)
        self.tokens[:, end : end + self.sizes[k]] = token


def places(begin: Tensor, count: Tensor, most: int, pad: int) -> Tensor:
    """Places begin, begin + 1, ... of each row, int [B, most]; `pad` after the row's own count."""
    offset = torch.arange(most)
    return torch.where(offset < count[:, None], begin[:, None] + offset, pad)


def capacity(schedule: Schedule) -> int:
    """Slots that a cache needs for a schedule: all places, and those that one pass writes after them."""
    most = int(schedule.sizes.max())
    return schedule.sigma.shape[1] + most + max(most, int(schedule.given.max()))


def prefix_rank(num_clean: Tensor | int, place: Tensor) -> Tensor:
    """Variant A's rank: the first num_clean places [B, 1] see each other; 1 gives the place itself, variant B."""
    return (place - num_clean + 1).clamp_min(0)


def labels(
    clean: Tensor,
    masks: Tensor,
    pad: int,
    rank: Callable[[Tensor], Tensor],
    hide_masks: bool,
    copies: Tensor | None,
    device: torch.device,
) -> Visibility:
    """The sampling pattern: causal in the order. hide_masks: a mask sees the clean tokens and itself only.

    copies: bool, of the masks; nobody sees them.
    """
    place = torch.cat([clean, masks], 1)
    slot = torch.arange(place.shape[1]).expand_as(place)
    real = place < pad
    ranks = torch.where(real, rank(place), HIDDEN)
    horizon = torch.where(real, rank(place), -1)
    clique = torch.where(real, -1, slot)
    if hide_masks:
        num_clean = clean.shape[1]
        is_mask = slot >= num_clean
        ranks = torch.where(is_mask, HIDDEN, ranks)
        first = rank(masks[:, :1]) - 1
        horizon = torch.where(is_mask & real, first, horizon)
        clique = torch.where(is_mask, slot, clique)
    found = hide_copies(Visibility(ranks, horizon, clique), copies, clean.shape[1])
    return Visibility(found.rank.to(device), found.horizon.to(device), found.clique.to(device))


def one_row(copies: Tensor | None) -> Tensor | None:
    """Copies, bool [B, M], as one row if all rows are alike: then a mask needs no batch dimension."""
    return copies[:1] if copies is not None and bool((copies == copies[:1]).all()) else copies
