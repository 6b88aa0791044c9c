"""Every kernel of attend equals the dense mask, forward and backward.

Shapes: B batch, H heads, N slots, D head width, L length.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from esolm.core.visibility import Packed, Part, Visibility, block, by_order, causal, full, prefix, sorted_two_stream
from esolm.net import attention
from esolm.net import tiling as tiling_module
from esolm.net.attention import attend, dense
from esolm.net.tiling import tile_rows
from support import toy

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CASES: dict[str, Visibility] = {
    "full": full(7),
    "one slot": full(1),
    "causal": causal(7),
    "labels": by_order(toy.permutations(2, 7)),
    "prefix": prefix(torch.arange(7)[None], torch.tensor([0, 4])),
}
CASES |= {
    f"two streams {m} of {n}": sorted_two_stream(n, m) for n, m in [(7, 7), (7, 4), (7, 1), (8, 8), (1, 1), (2, 2)]
}
CASES |= {f"blocks of {s} in {n}": block(n, s) for n, s in [(8, 4), (8, 2), (7, 1), (7, 7), (9, 3), (1, 1), (2, 1)]}


@pytest.fixture(autouse=True, params=[3, None], ids=["tiling of 3", "tiling"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many short steps, whatever the length, and the steps that the length gets."""
    if request.param:
        for module in (attention, tiling_module):
            monkeypatch.setattr(module, "block_rows", lambda keys: request.param)
    tile_rows.cache_clear()
    yield
    tile_rows.cache_clear()


def inputs(slots: int, heads: int = 2, width: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, heads, slots, width, dtype=dtype).requires_grad_() for _ in range(3)]


def compare(visibility: Visibility, span: slice, heads: int, rows: Tensor | None = None) -> None:
    """Outputs, and gradients of a random function of them; of some rows [B, N] only, where not all are defined."""
    slots = visibility.rank.shape[1]
    q, k, v = inputs(slots, heads)
    probe = torch.randn(2, heads, slots, 4, dtype=torch.float64)[:, :, span]
    if rows is not None:
        probe = probe * rows[:, None, span, None]
    found = []
    for kernel in (attend, dense):
        out = kernel(q[:, :, span], k, v, visibility, span)
        found.append([out * (probe != 0), *torch.autograd.grad((out * probe).sum(), [q, k, v])])
    for ours, slow in zip(*found):
        torch.testing.assert_close(ours, slow, **CLOSE)
    assert found[0][0].abs().max() > 0.01


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense(name: str, heads: int) -> None:
    visibility = CASES[name]
    compare(visibility, slice(0, visibility.rank.shape[1]), heads)


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_on_a_span_of_queries(name: str) -> None:
    visibility = CASES[name]
    slots = visibility.rank.shape[1]
    compare(visibility, slice(0, visibility.num_z or slots), 2)
    if slots > 2:
        compare(visibility, slice(1, slots - 1), 2)
        compare(visibility, slice(slots // 2, slots), 2)


@pytest.mark.parametrize("num_z", [1, 3, 7])
@pytest.mark.parametrize("num_clean", [(0, 0), (7, 2), (4, 4), (6, 5), (1, 0)])
def test_two_streams_with_a_prefix(num_z: int, num_clean: tuple[int, int]) -> None:
    """Eso-LM (A): equal in every row but the z slots at clean places, which are fill."""
    clean = torch.tensor(num_clean)
    visibility = sorted_two_stream(7, num_z, clean)
    place = torch.arange(7 - num_z, 7)
    rows = torch.cat([place >= clean[:, None], torch.ones(2, 7, dtype=torch.bool)], 1)
    compare(visibility, slice(0, num_z + 7), 2, rows)
    if rows[:, :num_z].any():
        compare(visibility, slice(0, num_z), 2, rows)


@pytest.mark.parametrize("length", [3, 10, 33, 64, 130])
def test_equals_dense_at_more_lengths(length: int) -> None:
    """Beyond the flash kernel's own blocks (32 to 256 slots)."""
    for num_z in {1, 2, length // 2, length - 1, length}:
        compare(sorted_two_stream(length, num_z), slice(0, length + num_z), 2)
        compare(sorted_two_stream(length, num_z), slice(0, num_z), 2)
    compare(causal(length), slice(0, length), 2)
    for size in [s for s in range(1, length + 1) if length % s == 0]:
        compare(block(length, size), slice(0, 2 * length), 2)
        compare(block(length, size), slice(0, length), 2)


@pytest.mark.parametrize(("length", "num_z"), [(5, 5), (5, 3), (4, 1), (1, 1)])
def test_gradient_of_two_streams(length: int, num_z: int) -> None:
    """Against finite differences."""
    visibility = sorted_two_stream(length, num_z)
    slots = length + num_z
    assert torch.autograd.gradcheck(lambda *t: attend(*t, visibility, slice(0, slots)), inputs(slots, 1, 2))


@pytest.mark.parametrize(("length", "size"), [(4, 2), (3, 1), (3, 3), (6, 3)])
def test_gradient_of_blocks(length: int, size: int) -> None:
    visibility = block(length, size)
    assert torch.autograd.gradcheck(lambda *t: attend(*t, visibility, slice(0, 2 * length)), inputs(2 * length, 1, 2))


@pytest.mark.parametrize("visibility", [sorted_two_stream(1024, 1024), sorted_two_stream(1024, 600), block(1024, 16)])
def test_tiles_cover_every_row_and_pay_for_fewer_pairs(visibility: Visibility) -> None:
    """At most half more than are seen; the kernel charges three quarters of the pairs for a causal step."""
    queries = visibility.rank.shape[1]
    tiling = tile_rows(visibility, 0, queries, torch.float32)
    assert sorted(i for tile in tiling.tiles for i in range(queries)[tile.rows]) == list(range(queries))
    seen = int(visibility.dense()[..., visibility.num_z :].sum())
    for tiles in (tiling.tiles, [tile for tile, *_ in tiling.backward]):
        sizes = ((rows.stop - rows.start, keys.stop - keys.start, sees) for rows, keys, sees in tiles)
        assert sum(n * m * (0.75 if sees == "causal" and m > 256 else 1.0) for n, m, sees in sizes) <= 1.5 * seen


PARTS = {
    "a full and a causal one": [(full(5), slice(0, 5)), (causal(4), slice(1, 4))],
    "causal and two streams": [(causal(7), slice(2, 7)), (sorted_two_stream(7, 4), slice(0, 4))],
    "two streams and blocks": [(sorted_two_stream(6, 6), slice(0, 6)), (block(6, 2), slice(0, 6))],
    "one without a kernel of its own": [(by_order(toy.permutations(2, 5)), slice(0, 5)), (causal(3), slice(1, 2))],
}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_inputs_in_one_row_are_as_they_are_alone(name: str, asked: bool) -> None:
    """Outputs and gradients; rows that nobody asked for are zero and take no gradient."""
    packed = Packed(tuple(Part(2, visibility, span) for visibility, span in PARTS[name]))
    sizes = [2 * visibility.rank.shape[1] for visibility, _ in PARTS[name]]
    q, k, v = (torch.randn(1, 2, sum(sizes), 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    probe = torch.randn(1, 2, sum(sizes), 4, dtype=torch.float64)
    out = attend(q, k, v, packed, slice(0, sum(sizes)), asked)
    expected = torch.zeros_like(out)
    for (visibility, span), *rows in zip(PARTS[name], *(torch.arange(sum(sizes)).split(sizes),)):
        slots = visibility.rank.shape[1]
        mine = [t[0][:, rows[0]].unflatten(1, (2, slots)).transpose(0, 1) for t in (q, k, v)]
        span = span if asked else slice(0, slots)
        some = dense(mine[0][:, :, span], mine[1], mine[2], visibility, span)
        some = torch.nn.functional.pad(some, (0, 0, span.start, slots - span.stop))
        expected = expected.index_copy(2, rows[0], some.transpose(0, 1).flatten(1, 2)[None])
    torch.testing.assert_close(out, expected, **CLOSE)
    assert out.abs().max() > 0.01
    for ours, slow in zip(*(torch.autograd.grad((each * probe).sum(), (q, k, v)) for each in (out, expected))):
        torch.testing.assert_close(ours, slow, **CLOSE)


def test_scores_far_apart_stay_finite() -> None:
    """One group may outweigh another by hundreds of nats."""
    for visibility in (sorted_two_stream(6, 4), block(6, 2)):
        slots = visibility.rank.shape[1]
        q, k, v = (t.detach() for t in inputs(slots))
        span = slice(0, slots)
        for factor in (300.0, -300.0):
            scaled = k.clone()
            scaled[:, :, : visibility.num_z] *= factor
            out = attend(q, scaled, v, visibility, span)
            torch.testing.assert_close(out, dense(q, scaled, v, visibility, span), **CLOSE)


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize(
    "name", ["full", "causal", "two streams 7 of 7", "two streams 4 of 7", "blocks of 4 in 8", "prefix"]
)
@pytest.mark.parametrize("kept", [0, attention.PRODUCTS], ids=["kernel", "products"])
def test_bfloat16_is_close_to_float32(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs to 2 % and gradients to 4 % of their size: bfloat16 has 8 bits, a unit of 0.4 %."""
    monkeypatch.setattr(attention, "PRODUCTS", kept)
    visibility = CASES[name]
    span = slice(0, visibility.rank.shape[1])
    wide = [t.detach().bfloat16().float().requires_grad_() for t in inputs(span.stop, dtype=torch.float32)]
    probe = torch.randn_like(wide[0]).bfloat16().float()
    half = [t.detach().bfloat16().requires_grad_() for t in wide]
    expected, out = attend(*wide, visibility, span), attend(*half, visibility, span)
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 0.02 * expected.norm()
    for t, h in zip(
        torch.autograd.grad((expected * probe).sum(), wide),
        torch.autograd.grad((out * probe.bfloat16()).sum(), half),
    ):
        assert (h.float() - t).norm() < 0.04 * t.norm()
        assert not torch.equal(h.float(), t)


def test_float32_is_close_to_float64() -> None:
    for visibility in CASES.values():
        span = slice(0, visibility.rank.shape[1])
        q, k, v = (t.detach() for t in inputs(span.stop))
        out = attend(q.float(), k.float(), v.float(), visibility, span)
        torch.testing.assert_close(out.double(), attend(q, k, v, visibility, span), rtol=1e-5, atol=1e-5)
