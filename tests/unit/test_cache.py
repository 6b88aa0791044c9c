"""The cache against a model of it: lists of (rank, key) per row.

Every key carries a number, so that what a query sees can be read off: the keys where the mask is true.

Shapes: B batch, H heads, N new slots, S slots in use, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esolm.core.visibility import HIDDEN, Visibility, causal, full, hide
from esolm.net.cache import KVCache, PositionCache
from support import toy

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH = 2, 2, 4


class Pass(NamedTuple):
    """New slots and how many of them stay."""

    visibility: Visibility
    keep: int | list[int]


def new_cache(batch: int, capacity: int, dtype: torch.dtype = torch.float64) -> KVCache:
    return KVCache(LAYERS, batch, HEADS, capacity, WIDTH, dtype, CPU)


def keys_of(first: int, batch: int, new: int) -> Tensor:
    """Keys [B, H, N, D] that all carry their number, counted over rows and slots."""
    number = first + torch.arange(batch * new, dtype=torch.float64).view(batch, 1, new, 1)
    return number.expand(batch, HEADS, new, WIDTH).clone()


@st.composite
def passes(draw: st.DrawFn, batch: int, ragged: bool) -> list[Pass]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(1, 4))
        rows = draw(st.sampled_from([1, batch]))

        def labels(values: Any, rows: int = rows, new: int = new) -> Tensor:
            return torch.tensor([[draw(values) for _ in range(new)] for _ in range(rows)])

        rank = labels(st.integers(0, 5) | st.just(HIDDEN))
        visibility = Visibility(rank, labels(st.integers(-1, 6)), labels(st.integers(-1, 1)))
        keep: int | list[int] = draw(st.integers(0, new))
        if ragged and draw(st.booleans()):
            keep = [draw(st.integers(0, new)) for _ in range(batch)]
        found.append(Pass(visibility, keep))
    return found


def check(batch: int, several: list[Pass]) -> KVCache:
    """Run the passes through a cache and through lists."""
    rows: list[list[tuple[int, float]]] = [[] for _ in range(batch)]
    capacity = sum(p.visibility.rank.shape[1] for p in several)
    cache = new_cache(batch, capacity)
    buffers = [t.data_ptr() for t in (*cache.keys, *cache.values, cache.ranks)]
    first = 1
    for visibility, keep in several:
        new = visibility.rank.shape[1]
        seen = cache.place(visibility)
        fresh = keys_of(first, batch, new)
        first += batch * new
        for layer in range(LAYERS):
            k, v = cache.extend(layer, fresh + 1000 * layer, -fresh - 1000 * layer)
            assert seen.shape[2:] == (new, k.shape[2])
            assert torch.equal(k, -v)
            assert k.data_ptr() == cache.keys[layer].data_ptr()  # views, not copies
            for b in range(batch):
                rank, horizon, clique = (
                    t[b if len(t) > 1 else 0].tolist() for t in (visibility.rank, visibility.horizon, visibility.clique)
                )
                mine = fresh[b, 0, :, 0].tolist()
                for i in range(new):
                    expected = {key for r, key in rows[b] if r <= horizon[i]}
                    expected |= {mine[j] for j in range(new) if rank[j] <= horizon[i]}
                    expected |= {mine[j] for j in range(new) if clique[i] == clique[j] >= 0}
                    mask = seen[b if len(seen) > 1 else 0, 0, i]
                    for head in range(HEADS):
                        assert set((k[b, head, mask, 0] - 1000 * layer).tolist()) == expected
        for b in range(batch):
            count = keep if isinstance(keep, int) else keep[b]
            rank = visibility.rank[b if len(visibility.rank) > 1 else 0].tolist()
            rows[b] += list(zip(rank[:count], fresh[b, 0, :count, 0].tolist()))
        if isinstance(keep, int):
            cache.commit(keep)
        else:
            cache.commit(torch.tensor(keep), max(keep), max(map(len, rows)))
        assert cache.lengths.tolist() == [len(row) for row in rows]
        assert cache.extent == max(map(len, rows))
    assert buffers == [t.data_ptr() for t in (*cache.keys, *cache.values, cache.ranks)]
    return cache


@given(st.data(), st.integers(1, 3))
def test_even_rows(data: st.DataObject, batch: int) -> None:
    """All rows keep as many; labels are one for all rows or one for each, in any succession."""
    assert check(batch, data.draw(passes(batch, ragged=False))).even


@given(st.data(), st.integers(1, 3))
def test_rows_of_their_own_length(data: st.DataObject, batch: int) -> None:
    check(batch, data.draw(passes(batch, ragged=True)))


def test_a_pass_that_commits_nothing_leaves_no_trace() -> None:
    cache = new_cache(2, 6)
    cache.place(causal(2))
    for layer in range(LAYERS):
        cache.extend(layer, keys_of(1, 2, 2), keys_of(1, 2, 2))
    cache.commit(2)
    before = [t[:, :, :2].clone() for t in (*cache.keys, *cache.values)]
    for _ in range(3):
        seen = cache.place(Visibility(torch.tensor([[2, 3]]), torch.tensor([[2, 3]]), torch.tensor([[-1, -1]])))
        assert seen.shape == (1, 1, 2, 4)
        for layer in range(LAYERS):
            cache.extend(layer, keys_of(50, 2, 2), keys_of(50, 2, 2))
        cache.commit(0)
    assert cache.extent == 2
    for was, now in zip(before, (*cache.keys, *cache.values)):
        assert torch.equal(was, now[:, :, :2])


def test_it_is_as_large_as_asked_and_of_the_networks_precision() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        net = toy.network(dtype=dtype, layers=3)
        cache = net.new_cache(5, 11)
        assert len(cache.keys) == len(cache.values) == 3
        for t in (*cache.keys, *cache.values):
            assert t.shape == (5, 2, 11, 8)
            assert t.dtype == dtype


@pytest.mark.parametrize("even", [True, False])
def test_no_room(even: bool) -> None:
    cache = new_cache(2, 5)
    cache.place(causal(3))
    cache.commit(3) if even else cache.commit(torch.tensor([3, 1]), 3, 3)
    assert cache.place(causal(2)).shape[-1] == 5
    with pytest.raises(ValueError, match=r"5 slots.* 6"):
        cache.place(causal(3))


def test_commit_before_place() -> None:
    cache = new_cache(1, 4)
    with pytest.raises(AssertionError, match="commit before place"):
        cache.commit(1)
    cache.place(causal(2))
    cache.commit(2)
    with pytest.raises(AssertionError, match="commit before place"):
        cache.commit(1)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_slot_for_each_position(in_place: bool) -> None:
    """The fed positions are replaced, and nothing else; a pass sees the new ones once and the others as they are."""
    valid = torch.tensor([[True] * 5, [True] * 4 + [False]])
    cache = PositionCache(new_cache(2, 10), valid)
    cache.begin(torch.arange(5).expand(2, -1), first=0)
    cache.slots.place(hide(full(5), valid))
    for layer in range(LAYERS):
        cache.slots.extend(layer, keys_of(1, 2, 5), keys_of(1, 2, 5))
    cache.keep()
    before = [t[:, :, :5].clone() for t in (*cache.slots.keys, *cache.slots.values)]
    at = torch.tensor([[3, 4], [3, 4]] if in_place else [[1, 3], [2, 5]])  # 5 is padding
    real = torch.tensor([[True, True], [True, False]])
    cache.begin(at, first=3 if in_place else None)
    seen = cache.slots.place(hide(full(2), real))[:, 0, 0]
    assert seen.sum(1).tolist() == [5, 4]  # each valid position once
    for layer in range(LAYERS):
        cache.slots.extend(layer, keys_of(50, 2, 2), keys_of(50, 2, 2))
    cache.keep()
    new = keys_of(50, 2, 2)
    for was, now in zip(before, (*cache.slots.keys, *cache.slots.values), strict=True):
        for row in range(2):
            for position in range(4):
                column = at[row].tolist().index(position) if position in at[row].tolist() else None
                expected = was[row, :, position] if column is None else new[row, :, column]
                assert torch.equal(now[row, :, position], expected)
