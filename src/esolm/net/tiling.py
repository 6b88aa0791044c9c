"""Sorted attention patterns as calls of the CPU flash kernel, each over no more keys than its rows can see.

Shapes: B batch, N queries, L slots of x.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.visibility import Visibility


class Tile(NamedTuple):
    """One call of the kernel: a block of rows over a range of keys of x."""

    rows: slice
    keys: slice
    sees: Literal["all", "causal", "bias"]  # all keys; row i the first i + 1; or by the bias


class Tiling(NamedTuple):
    """Sorted queries over x in blocks of rows, each over no more keys than its rows can see."""

    tiles: tuple[Tile, ...]
    bias: Tensor | None  # [B|1, 1, N, L], of the tiles that need one
    backward: tuple[tuple[Tile, bool, bool], ...]  # and whether its rows, and its keys, are in no earlier tile
    rows_left: bool  # some row, or some key, is in no backward tile
    keys_left: bool

    def mask(self, tile: Tile) -> Tensor | None:
        """The bias of a tile, or None if it needs none."""
        return self.bias[:, :, tile.rows, tile.keys] if self.bias is not None and tile.sees == "bias" else None


@functools.lru_cache(maxsize=8)
def tile_rows(visibility: Visibility, start: int, stop: int, dtype: torch.dtype) -> Tiling:
    """The tiles of the queries from start to stop over x. The bias is finite: a query that sees no x gets a log-sum-exp
    of -1e9, which has no weight once its own key is merged in. Cached, because all layers of a pass share it."""
    num_z, kind = visibility.num_z, visibility.kind
    keys, queries = visibility.rank.shape[1] - num_z, stop - start
    size, whole = block_rows(keys), start == 0 and stop == num_z + keys
    every, z, x = slice(0, keys), slice(0, num_z), slice(num_z, queries)
    if whole and kind in ("full", "causal"):
        tiles = [Tile(every, every, "causal" if kind == "causal" else "all")]
        columns = _columns(every, 0, 0, keys, size) if kind == "causal" else tiles
        return _with_backward(tiles, None, columns, queries, keys)
    if whole and kind == "two_stream" and size < keys:  # x is causal and needs no bias
        above = tile_rows(visibility, 0, num_z, dtype)
        columns = [*_columns(x, 0, 0, keys, size), *_columns(z, keys - num_z, 1, keys, size)]
        return _with_backward([Tile(x, every, "causal"), *above.tiles], above.bias, columns, queries, keys)
    rank, horizon = visibility.rank[:, num_z:], visibility.horizon[:, start:stop]
    hidden = rank[:, None] > horizon[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=rank.device).masked_fill_(hidden, -1e9)[:, None]
    reach = (~hidden).sum(-1).amax(0).clamp_min(1).tolist()
    starts = (*range(0, num_z, size), *range(num_z, queries, size)) if size < queries else (0,)
    rows = (slice(i, j) for i, j in pairwise(sorted({*starts, queries})))
    tiles = sorted((Tile(at, slice(0, max(reach[at])), "bias") for at in rows), key=lambda tile: -tile.keys.stop)
    by_column = kind == "two_stream" and size < keys
    return _with_backward(tiles, bias, _columns(z, keys - num_z, 1, keys, size) if by_column else tiles, queries, keys)


def _columns(rows: slice, place: int, strict: int, keys: int, size: int) -> list[Tile]:
    """Tiles of a range of keys and all rows that see any of them; the rows start at index `place` of the order and see
    what comes before them, and themselves unless strict. The kernel's backward pass is faster with these than with
    row blocks."""
    starts = ((rows.start + first - place + strict, first) for first in range(place, keys, size))
    found = [Tile(slice(i, rows.stop), slice(j, min(j + size, keys)), "causal") for i, j in starts if i < rows.stop]
    return [Tile(rows, slice(0, place), "all"), *found] if place else found


def _with_backward(tiles: list[Tile], bias: Tensor | None, backward: list[Tile], queries: int, keys: int) -> Tiling:
    rows_done: set[int] = set()
    keys_done: set[int] = set()
    marked = []
    for tile in backward:
        rows_now, keys_now = range(queries)[tile.rows], range(keys)[tile.keys]
        marked.append((tile, rows_done.isdisjoint(rows_now), keys_done.isdisjoint(keys_now)))
        rows_done.update(rows_now)
        keys_done.update(keys_now)
    return Tiling(tuple(tiles), bias, tuple(marked), len(rows_done) < queries, len(keys_done) < keys)


def block_rows(keys: int) -> int:
    """Rows of a block; measured: for short sequences, more calls cost more than the skipped pairs save."""
    return 256 if keys >= 768 else 2 * keys
