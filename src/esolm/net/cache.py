"""The KV cache: keys and values of committed tokens, owned by the caller; and one with a slot for each position.

Shapes: B batch, H heads, C capacity, N new slots, S slots in use, D head width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.visibility import HIDDEN, Visibility


class KVCache:
    """One preallocated buffer per layer. New slots are written after each row's committed ones; `commit` keeps the
    first of them, and the next pass overwrites the rest. Rows may hold different numbers of tokens."""

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch, heads, capacity, head_width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._clear()

    def _clear(self) -> None:
        batch, _, capacity, _ = self.keys[0].shape
        device = self.keys[0].device
        self.ranks = torch.full((batch, capacity), HIDDEN, dtype=torch.long, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.extent = 0  # the longest row, known without a device synchronisation
        self.even = True  # all rows have the same length
        self.shared = True  # and the same ranks
        self._slot: Tensor | None = None  # the slots that this pass writes, int [B, N]; None if all rows are even
        self._new: Tensor | None = None  # the ranks of this pass

    def again(self) -> KVCache:
        """An empty cache on the memory of this one; both share the same buffers."""
        found = copy.copy(self)
        found._clear()
        return found

    def part(self, rows: slice, lengths: Sequence[int]) -> KVCache:
        """Consecutive rows, on the memory of this cache; `lengths` of their slots are committed."""
        found = copy.copy(self)
        found.keys, found.values = [t[rows] for t in self.keys], [t[rows] for t in self.values]
        found.ranks = self.ranks[rows]
        found.lengths = torch.tensor(lengths, device=self.lengths.device)
        found.extent, found.even, found.shared = max(lengths), len(set(lengths)) == 1, len(lengths) == 1
        found._slot = found._new = None
        return found

    def slots(self, new: int) -> Tensor:
        """The slots that a pass over `new` slots writes to, int [B, N]."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def window(self, length: int, slot: Tensor) -> Window:
        """The first `length` slots, to be written at `slot`, int [B, N]; holds no reference to this object."""
        return Window([t[:, :, :length] for t in self.keys], [t[:, :, :length] for t in self.values], slot)

    def begin(self, visibility: Visibility) -> None:
        """Begin a pass; raises ValueError if its slots do not fit."""
        assert visibility.inner is None, "inner labels are for passes without a cache"
        new = visibility.rank.shape[1]
        used = self.extent + new
        if used > self.ranks.shape[1]:
            raise ValueError(
                f"the cache has {self.ranks.shape[1]} slots and this pass needs {used}: raise its capacity"
            )
        self._new, self._slot = visibility.rank, None if self.even else self.slots(new)

    def place(self, visibility: Visibility) -> Tensor:
        """Begin a pass; returns the attention mask of new slots over committed and new ones, bool [B|1, 1, N, S]."""
        self.begin(visibility)
        if self._slot is None:
            one = self.shared and visibility.rank.shape[0] == 1
            past = self.ranks[: 1 if one else None, : self.extent]
            rows = past.shape[0]
            rank = torch.cat([past, visibility.rank.expand(rows, -1)], 1)
            clique = torch.cat([torch.full_like(past, -1), visibility.clique.expand(rows, -1)], 1)
        else:
            rows, used = self.lengths.shape[0], self.extent + visibility.rank.shape[1]
            column = torch.arange(used, device=self.lengths.device)
            past = torch.where(column < self.lengths[:, None], self.ranks[:, :used], HIDDEN)
            rank = past.scatter(1, self._slot, visibility.rank.expand(rows, -1))
            clique = torch.full_like(rank, -1).scatter(1, self._slot, visibility.clique.expand(rows, -1))
        horizon, mine = visibility.horizon[:, :, None], visibility.clique[:, :, None]
        return ((rank[:, None] <= horizon) | ((clique[:, None] == mine) & (mine >= 0)))[:, None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, H, N, D] into the new slots; returns views of all keys and values, [B, H, S, D]."""
        end = self.extent + k.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        if self._slot is None:
            keys[:, :, self.extent : end] = k
            values[:, :, self.extent : end] = v
        else:
            Window(self.keys, self.values, self._slot).extend(layer, k, v)
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, count: int | Tensor, most: int | None = None, longest: int | None = None) -> None:
        """Keep the first `count` new slots of every row; count: int, or int [B] for each row. With counts per row,
        `most` is the largest and `longest` the longest row afterwards, which saves a device synchronisation."""
        assert self._new is not None, "commit before place"
        kept = count if isinstance(count, int) else most
        end = self.extent + count if isinstance(count, int) else longest
        assert kept is not None, "per-row counts need `most`"
        assert end is not None, "per-row counts need `longest`"
        if self._slot is None:
            self.ranks[:, self.extent : self.extent + kept] = self._new[:, :kept]
        else:
            slot = self._slot[:, :kept]
            self.ranks.scatter_(1, slot, self._new[:, :kept].expand_as(slot))
        self.even = self.even and isinstance(count, int)
        self.shared = self.shared and self._new.shape[0] == 1
        self.lengths = self.lengths + count
        self.extent = end
        self._new = None

    def restore(self, ranks: Tensor) -> None:
        """Commit the first S slots of every row, whatever they hold, with these ranks, int [B, S]."""
        self.extent, self.even, self.shared = ranks.shape[1], True, False
        self.ranks[:, : self.extent] = ranks
        self.lengths = torch.full_like(self.lengths, self.extent)


class PositionCache:
    """A cache whose slot i holds position i: a pass replaces the keys and values of the positions that it feeds.

    New ones are written behind all positions and moved to their places afterwards, so that every engine can do it.
    """

    def __init__(self, slots: KVCache, valid: Tensor) -> None:
        """slots: room for twice as many slots as positions. valid: bool [B, L]; the others are never seen."""
        self.slots, self.length = slots, valid.shape[1]
        self.rank = torch.where(valid, 0, HIDDEN)
        self._moved: Tensor | None = None

    def begin(self, position: Tensor, first: int | None = None) -> None:
        """Prepare a pass over these positions, int [B, N], padded with L; it must not see their old keys and values.

        first: every row feeds the positions from `first` on, which are then overwritten in place.
        """
        self._moved = position if first is None else None
        if first is not None:
            self.slots.restore(self.rank[:, :first])
            return
        old = F.pad(self.rank, (0, 1)).scatter(1, position, HIDDEN)
        self.slots.restore(old[:, : self.length])

    def keep(self) -> None:
        """Keep the keys and values of the pass."""
        if self._moved is None:
            return
        end = self.length + self._moved.shape[1]
        slot = self._moved[:, None, :, None]
        for t in (*self.slots.keys, *self.slots.values):
            new = t[:, :, self.length : end].clone()
            t.scatter_(2, slot.expand_as(new), new)


class Window(NamedTuple):
    """A fixed range of slots of a cache, all of which are read: the slots that a pass writes are data, not shapes."""

    keys: list[Tensor]
    values: list[Tensor]
    slot: Tensor  # int [B, N], the slots that are written

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, H, N, D]; returns all keys and values, [B, H, S, D]."""
        keys, values = self.keys[layer], self.values[layer]
        slot = self.slot[:, None, :, None].expand_as(k)
        keys.scatter_(2, slot, k.to(keys.dtype))
        values.scatter_(2, slot, v.to(values.dtype))
        return keys, values
