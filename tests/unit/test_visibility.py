"""Information flows as the labels say: what is hidden changes nothing, what is visible changes something.

Shapes: B batch, N slots, L length.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import one_hot, scaled_dot_product_attention

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
from support import paper, toy

L = 6


def patterns() -> dict[str, Visibility]:
    """Every pattern that the systems use, for L tokens (and two halves where there are two)."""
    sigma = torch.tensor([[2, 0, 5, 3, 4, 1]])
    ascending = torch.tensor([[2, 0, 5, 1, 3, 4]])
    step, num_clean = order.inverse(sigma), torch.tensor([3])
    down = order.inverse(ascending)
    valid = torch.tensor([[True, True, False, True, True, False]])
    return {
        "full": full(L),
        "full, padded": full(L, valid),
        "causal": causal(L),
        "causal, padded": hide(causal(L), valid),
        "by order": by_order(step),
        "prefix": prefix(step, num_clean),
        "prefix, sorted": prefix(torch.arange(L)[None], num_clean),
        "two streams, natural": two_stream(down, down, down),
        "two streams, sorted": sorted_two_stream(L, L),
        "two streams, three masks": sorted_two_stream(L, 3),
        "two streams, one mask": sorted_two_stream(L, 1),
        "two streams of (A), natural": two_stream(prefix(down, num_clean).rank, down, down),
        "two streams of (A), three masks": sorted_two_stream(L, 3, num_clean),
        "blocks of 1": block(L, 1),
        "blocks of 2": block(L, 2),
        "blocks of 3": block(L, 3),
        "one block": block(L, L),
        "blocks of 2, padded": hide(block(L, 2), valid.repeat(1, 2)),
    }


PATTERNS = patterns()


@pytest.fixture(params=PATTERNS)
def visibility(request: pytest.FixtureRequest) -> Visibility:
    return PATTERNS[request.param]


@pytest.fixture(scope="module")
def net():
    return toy.network(length=L)


def test_changing_a_token_changes_exactly_the_logits_that_see_it(net, visibility: Visibility) -> None:
    slots = visibility.rank.shape[1]
    reach = paper.flow(visibility.dense()[0, 0], net.config.layers)
    tokens, position = toy.text(1, slots), torch.arange(slots)[None] % L
    changed = tokens.repeat(slots, 1)
    changed[range(slots), range(slots)] = (changed.diagonal() + 1) % 6
    with torch.no_grad():
        # both of the same shape: another batch size may round differently
        base, other = (net(x, position, visibility) for x in (tokens.repeat(slots, 1), changed))
    change = (other - base).abs().amax(-1).T  # [query, changed key]
    assert torch.equal(change[~reach], torch.zeros_like(change[~reach]))
    assert (change[reach] > 1e-6).all()


def test_the_gradient_reaches_exactly_the_tokens_that_are_seen(net, visibility: Visibility) -> None:
    slots = visibility.rank.shape[1]
    reach = paper.flow(visibility.dense()[0, 0], net.config.layers)
    tokens = one_hot(toy.text(1, slots), 7).double().requires_grad_()
    out = net(tokens, torch.arange(slots)[None] % L, visibility)
    probe = torch.randn(7, dtype=torch.float64)
    for i in range(slots):
        (grad,) = torch.autograd.grad(out[0, i] @ probe, tokens, retain_graph=True)
        size = grad[0].abs().amax(-1)
        assert torch.equal(size[~reach[i]], torch.zeros_like(size[~reach[i]]))
        assert (size[reach[i]] > 1e-8).all()


def test_the_network_equals_the_naive_one(net, visibility: Visibility) -> None:
    """Every kernel, against the transformer with every softmax written out over the dense pattern."""
    slots = visibility.rank.shape[1]
    tokens, position = toy.text(1, slots), torch.arange(slots)[None] % L
    with torch.no_grad():
        out = net(tokens, position, visibility)[0]
    expected = paper.logits(net, tokens[0].tolist(), position[0].tolist(), visibility.dense()[0, 0])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore")
def test_flex_equals_dense(visibility: Visibility, dtype: torch.dtype) -> None:
    """FlexAttention without a compiler, which runs on the CPU too; compiled, it serves the GPU."""
    slots = visibility.rank.shape[1]
    q, k, v = (torch.randn(2, 2, slots, 8, dtype=dtype) for _ in range(3))
    rows = Visibility(*(t.expand(2, -1) for t in (visibility.rank, visibility.horizon, visibility.clique)))
    dense = scaled_dot_product_attention(q, k, v, attn_mask=visibility.dense())
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for labels in (visibility, rows):
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=labels.flex()), dense, **close)


@pytest.mark.filterwarnings("ignore")
def test_flex_masks_are_per_row() -> None:
    step = order.inverse(toy.permutations(3, 7))
    labels = two_stream(step, step, step)
    q, k, v = (torch.randn(3, 1, 14, 4, dtype=torch.float64) for _ in range(3))
    dense = scaled_dot_product_attention(q, k, v, attn_mask=labels.dense())
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=labels.flex()), dense, rtol=1e-10, atol=1e-10)
    assert not torch.equal(labels.dense()[0], labels.dense()[1])


def test_a_span_of_query_rows(visibility: Visibility) -> None:
    rows = slice(1, 4)
    assert torch.equal(visibility.dense(span=rows), visibility.dense()[:, :, rows])


def test_cached_keys_are_seen_by_rank() -> None:
    """Of two rows with ranks of their own; the last committed key of each is hidden."""
    cache = KVCache(1, 2, 1, 8, 2, torch.float32, torch.device("cpu"))
    cache.place(by_order(torch.tensor([[0, 4, HIDDEN], [5, 3, HIDDEN]])))
    cache.commit(3)
    found = cache.place(by_order(torch.tensor([[3, 5], [4, 2]])))
    assert found.shape == (2, 1, 2, 5)
    expected = [[[1, 0, 0, 1, 0], [1, 1, 0, 1, 1]], [[0, 1, 0, 1, 1], [0, 0, 0, 0, 1]]]
    assert found[:, 0].int().tolist() == expected


def test_what_a_row_did_not_commit_is_not_seen() -> None:
    """Rows of different lengths; all ranks are alike, so that only the lengths can tell."""
    cache, alike = KVCache(1, 2, 1, 8, 2, torch.float32, torch.device("cpu")), torch.zeros(2, 3, dtype=torch.long)
    cache.place(by_order(alike))
    cache.commit(torch.tensor([2, 0]), 2, 2)
    assert cache.place(by_order(alike[:, :1]))[:, 0].int().tolist() == [[[1, 1, 1]], [[1, 0, 0]]]


@pytest.mark.parametrize("num_z", [0, -1, 7])
def test_a_z_half_of_no_or_too_many_slots_is_refused(num_z: int) -> None:
    with pytest.raises(ValueError, match=f"num_z is {num_z}"):
        sorted_two_stream(6, num_z)
