"""Every pattern of the paper equals its equations, over random masks, orders and lengths.

Shapes: L length, N slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esolm.core import order
from esolm.core.visibility import (
    HIDDEN,
    Visibility,
    block,
    by_order,
    causal,
    full,
    hide,
    prefix,
    sorted_two_stream,
    two_stream,
)
from esolm.net.cache import KVCache
from support import paper


class Example(NamedTuple):
    """A masked sequence and an order with its clean tokens first; the masks of z_0 left to right, of z_t anyhow."""

    masked: list[bool]
    sigma: list[int]

    @property
    def step(self) -> Tensor:
        return order.inverse(torch.tensor([self.sigma]))

    @property
    def num_clean(self) -> Tensor:
        return torch.tensor([self.masked.count(False)])


@st.composite
def examples(draw: st.DrawFn, ascending: bool) -> Example:
    masked = draw(st.lists(st.booleans(), min_size=1, max_size=9))
    clean = draw(st.permutations(paper.positions(masked, False)))
    masks = paper.positions(masked, True)
    return Example(masked, [*clean, *(masks if ascending else draw(st.permutations(masks)))])


def seen(visibility: Visibility) -> Tensor:
    """The pattern as a matrix, which is what the labels say one pair at a time."""
    dense = visibility.dense()[0, 0]
    rank, horizon, clique = (t[0].tolist() for t in (visibility.rank, visibility.horizon, visibility.clique))
    for i, row in enumerate(dense.tolist()):
        for j, found in enumerate(row):
            assert found == (rank[j] <= horizon[i] or clique[i] == clique[j] >= 0)
    return dense


@given(st.integers(1, 12))
def test_mdlm_and_ar(length: int) -> None:
    assert torch.equal(seen(full(length)), paper.bidirectional(length))
    assert torch.equal(seen(causal(length)), paper.left_to_right(length))


@given(examples(ascending=False))
def test_diffusion_phase(example: Example) -> None:
    masked, sigma = example
    b, a = by_order(example.step), prefix(example.step, example.num_clean)
    assert torch.equal(seen(b), paper.diffusion_b(sigma))
    assert torch.equal(seen(a), paper.diffusion_a(sigma, masked))
    # sorted by sigma: the same matrices with rows and columns permuted
    length = len(sigma)
    assert torch.equal(seen(causal(length)), seen(b)[sigma][:, sigma])
    assert torch.equal(seen(prefix(torch.arange(length)[None], example.num_clean)), seen(a)[sigma][:, sigma])


@given(examples(ascending=True))
def test_sequential_phase(example: Example) -> None:
    masked, sigma = example
    length, step = len(masked), example.step
    free = torch.tensor([not m for m in masked] + [False] * length)  # clean tokens of z may see anything
    b = seen(two_stream(step, step, step))
    a = seen(two_stream(prefix(step, example.num_clean).rank, step, step))
    assert torch.equal(b[~free], paper.sequential_b(sigma, masked)[~free])
    assert torch.equal(a[~free], paper.sequential_a(masked)[~free])
    for found in (a, b):  # and nobody sees them but they themselves
        assert torch.equal(found[:, :length] & free[:length], torch.eye(2 * length, length, dtype=bool) & free[:length])
    both = torch.tensor([*sigma, *(length + s for s in sigma)])
    assert torch.equal(seen(sorted_two_stream(length, length)), b[both][:, both])
    assert torch.equal(seen(sorted_two_stream(length, length, example.num_clean)), a[both][:, both])
    num_z = masked.count(True)
    if num_z:
        kept = both[length - num_z :]
        assert torch.equal(seen(sorted_two_stream(length, num_z)), b[kept][:, kept])
        assert torch.equal(seen(sorted_two_stream(length, num_z, example.num_clean)), a[kept][:, kept])


@given(st.permutations(range(7)), st.integers(1, 7))
def test_any_order_likelihood(sigma: list[int], num_z: int) -> None:
    """Any order, every token scored: a mask sees itself and the clean tokens before it; those are causal in sigma."""
    step = paper.invert(sigma)
    expected = paper.none(14)
    for i in range(7):
        for j in range(7):
            expected[i, j] = i == j
            expected[i, 7 + j] = step[i] > step[j]
            expected[7 + i, 7 + j] = step[i] >= step[j]
    inverse = torch.tensor([step])
    assert torch.equal(seen(two_stream(inverse, inverse, inverse)), expected)
    kept = torch.tensor([*sigma[7 - num_z :], *(7 + s for s in sigma)])
    assert torch.equal(seen(sorted_two_stream(7, num_z)), expected[kept][:, kept])


@given(st.integers(1, 5), st.integers(1, 4))
def test_block_diffusion(size: int, count: int) -> None:
    length = size * count
    assert torch.equal(seen(block(length, size)), paper.blocks(length, size))
    if count == 1:  # one block is MDLM on the z half
        assert torch.equal(seen(block(length, size))[:length, :length], paper.bidirectional(length))
        assert not seen(block(length, size))[:length, length:].any()
    if size == 1:  # blocks of one are the left-to-right mask queries
        ordered = torch.arange(length)[None]
        assert torch.equal(seen(block(length, 1)), seen(two_stream(ordered, ordered, ordered)))


@given(st.permutations(range(8)), st.integers(0, 7), st.integers(1, 8))
def test_sampling_b(sigma: list[int], decoded: int, now: int) -> None:
    """On the tokens decoded so far and those of this step, in natural order; and as new slots behind a cache."""
    tokens, expected = paper.sampling_b(sigma, decoded, now)
    step = order.inverse(torch.tensor([sigma]))[:, tokens]
    assert torch.equal(seen(by_order(step)), expected)
    rows = sorted(range(len(tokens)), key=lambda i: step[0, i])
    new, old = step[:, rows[decoded:]], step[:, rows[:decoded]]
    cache = KVCache(1, 1, 1, 8, 2, torch.float32, torch.device("cpu"))
    cache.place(by_order(old))
    cache.commit(decoded)
    assert torch.equal(cache.place(by_order(new))[0, 0], expected[rows[decoded:]][:, rows])


@given(examples(ascending=True), st.data())
def test_sampling_a(example: Example, data: st.DataObject) -> None:
    """In the diffusion phase some of the clean tokens are decoded; in the sequential phase all, and some masks."""
    masked, sigma = example
    num_clean = masked.count(False)
    if num_clean and (num_clean == len(sigma) or data.draw(st.booleans())):
        by_diffusion, left_to_right = data.draw(st.integers(0, num_clean - 1)), 0
        now = data.draw(st.integers(1, num_clean - by_diffusion))
    else:
        by_diffusion, left_to_right, now = num_clean, data.draw(st.integers(0, len(sigma) - num_clean - 1)), 1
    tokens, expected = paper.sampling_a(sigma, by_diffusion, left_to_right, now)
    step = example.step[:, tokens]
    assert torch.equal(seen(prefix(step, torch.tensor([by_diffusion]))), expected)


@given(st.permutations(range(8)), st.integers(0, 7), st.integers(1, 8))
def test_masks_hidden_from_each_other(sigma: list[int], decoded: int, now: int) -> None:
    """Parallel sampling of the any-order loss: every mask sees all decoded tokens and itself."""
    now = min(now, 8 - decoded)
    if not decoded:
        return
    places = torch.arange(decoded)[None]
    found = seen(two_stream(places, torch.full((1, now), decoded), places))
    expected = paper.none(now + decoded)
    expected[:now, :now] = torch.eye(now, dtype=torch.bool)
    expected[:now, now:] = True
    expected[now:, now:] = paper.left_to_right(decoded)
    assert torch.equal(found, expected)


@settings(max_examples=50)
@given(examples(ascending=True), st.data())
def test_hidden_slots_see_and_are_seen_by_themselves_only(example: Example, data: st.DataObject) -> None:
    masked, step = example.masked, example.step
    length = len(masked)
    valid = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    for found, keep in [
        (full(length), valid),
        (causal(length), valid),
        (by_order(step), valid),
        (two_stream(step, step, step), valid.repeat(1, 2)),
        (block(length, 1), valid.repeat(1, 2)),
    ]:
        expected = seen(found) & keep[0] & keep[0][:, None]
        expected |= torch.diag(~keep[0])
        hidden = hide(found, keep)
        assert torch.equal(seen(hidden), expected)
        assert hidden.rank.max() <= HIDDEN


@settings(max_examples=50)
@given(examples(ascending=True))
def test_no_pattern_leaks_through_an_intermediate_token(example: Example) -> None:
    """What reaches a query through any number of layers is what it sees directly; never the token it predicts."""
    masked, step = example.masked, example.step
    length = len(masked)
    streams = [two_stream(step, step, step), two_stream(prefix(step, example.num_clean).rank, step, step)]
    for found in [full(length), by_order(step), prefix(step, example.num_clean), block(length, 1), *streams]:
        slots = found.rank.shape[1]
        direct = seen(found)
        assert direct.diagonal().all()
        assert torch.equal(paper.flow(direct, slots), direct)
    for found in streams:
        for i in paper.positions(masked, True):
            assert not paper.flow(seen(found), 2 * length)[i, length + i]


def test_labels_of_several_rows_are_several_patterns() -> None:
    sigma = torch.stack([torch.randperm(6) for _ in range(5)])
    step, num_clean = order.inverse(sigma), torch.tensor([0, 1, 3, 5, 6])
    masked = step >= num_clean[:, None]
    together = prefix(step, num_clean).dense()
    streams = two_stream(prefix(step, num_clean).rank, step, step).dense()
    for b in range(5):
        assert torch.equal(together[b, 0], paper.diffusion_a(sigma[b].tolist(), masked[b].tolist()))
        one = prefix(step[b : b + 1], num_clean[b : b + 1])
        assert torch.equal(streams[b], two_stream(one.rank, step[b : b + 1], step[b : b + 1]).dense()[0])
