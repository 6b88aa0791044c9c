"""The folded network is the network at time zero, in every precision and through every sampler.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention

from esolm.core.order import inverse
from esolm.core.randomness import Randomness
from esolm.core.visibility import Packed, Part, Visibility, block, by_order, causal, full, hide, sorted_two_stream
from esolm.net import attention
from esolm.net import fold as folding
from esolm.net.denoiser import Denoiser, Rows
from esolm.net.fold import Int8Linear, PackedLinear, PlainLinear, fold
from esolm.net.head import Score
from esolm.net.protocol import trainable
from esolm.sampling.request import Request
from support import toy

B, L, V = 3, 8, 7
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
NETS = {
    "AdaLN": {},
    "plain": {"adaln": False},
    "one layer, one head": {"layers": 1, "heads": 1},
    "wide": {"layers": 3, "heads": 4, "mlp_ratio": 4},
    **{name: shape for name, shape in toy.SHAPES.items() if shape},
}
STEP = inverse(toy.permutations(B, L))
PATTERNS = {
    "full": full(L),
    "padded": hide(full(L), toy.padding(B, L)),
    "causal": causal(L),
    "order": by_order(STEP),
    "two streams": sorted_two_stream(L, 3),
    "two streams (A)": sorted_two_stream(L, L, torch.tensor([0, 3, 8])),
    "blocks": block(L, 2),
}
ROWS = {
    "all": None,
    "span": Rows(slice(1, 5)),
    "some": Rows(slice(0, L), torch.tensor([2 * L, 1, 5])),
    "none": Rows(slice(0, L), torch.zeros(0, dtype=torch.long)),
}


@pytest.fixture(params=NETS)
def net(request: pytest.FixtureRequest) -> Denoiser:
    return toy.network(**NETS[request.param])


def inputs(visibility: Visibility, batch: int = B) -> tuple[Tensor, Tensor, Visibility]:
    slots = visibility.rank.shape[1]
    return toy.text(batch, slots), torch.arange(slots)[None] % L, visibility


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_is_the_network_at_time_zero(net: Denoiser, pattern: str, rows: str) -> None:
    given = inputs(PATTERNS[pattern])
    expected = net(*given, time=torch.zeros(1, dtype=torch.float64), out=ROWS[rows])
    found = fold(net)(*given, out=ROWS[rows])
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not found.requires_grad


def test_soft_tokens(net: Denoiser) -> None:
    tokens, *rest = inputs(full(L))
    soft = 0.5 * one_hot(tokens, V).double() + 0.5 * one_hot((tokens + 1) % V, V)
    torch.testing.assert_close(fold(net)(soft, *rest), net(soft, *rest), **CLOSE)


def test_nats(net: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time, and all at once."""
    target = toy.text(B).flatten()
    for score in (Score(target, V - 1), Score(target, V - 1, torch.linspace(0, 1, B * L))):
        expected = net(*inputs(causal(L)), score=score)
        for chunk in (5, 512):
            monkeypatch.setattr(folding, "CHUNK", chunk)
            torch.testing.assert_close(fold(net)(*inputs(causal(L)), score=score), expected, **CLOSE)


@pytest.mark.parametrize("ragged", [False, True])
def test_with_a_cache(net: Denoiser, ragged: bool) -> None:
    """Pass after pass, with masks that are overwritten and rows that commit different numbers of tokens."""
    sigma = toy.permutations(B, L)
    tokens = toy.text(B).gather(1, sigma)
    nets = net, fold(net)
    caches = [each.new_cache(B, 2 * L) for each in nets]
    done = torch.zeros(B, dtype=torch.long)
    for count in ([2, 1, 2], [1, 1, 1], [0, 2, 1]) if ragged else ([2] * B, [1] * B, [0] * B):
        place = done[:, None] + torch.arange(3)
        call = tokens.gather(1, place), sigma.gather(1, place), by_order(place if ragged else place[:1])
        results = []
        for each, cache in zip(nets, caches, strict=True):
            results.append(each(*call, cache=cache, out=Rows(slice(1, 3))))
            kept = torch.tensor(count)
            cache.commit(kept, max(count), int((done + kept).max())) if ragged else cache.commit(count[0])
        torch.testing.assert_close(results[1], results[0], **CLOSE)
        done = done + torch.tensor(count)
    for one, two in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        torch.testing.assert_close(two, one, **CLOSE)


@pytest.mark.parametrize(("label", "name", "options"), toy.untimed(), ids=lambda v: v if isinstance(v, str) else "")
def test_samplers_draw_the_same_tokens(label: str, name: str, options: dict) -> None:
    net, found, rng = toy.network(), toy.make(name, V - 1, **options), Randomness(3, 0, B)
    given = torch.zeros(B, L, dtype=torch.bool)
    given[:, :2] = True
    request = Request(toy.text(B), given, torch.ones_like(given))
    schedule = found.plan(request, rng)
    with torch.inference_mode():
        one, two = ([step.token for step in found.sample(n, request, schedule, rng)] for n in (net, fold(net)))
    assert len(one) == len(two) > 0
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("rows", [(0,), (1,), (1, 2), (2, 3, 5)])
def test_packed_weights_are_the_same_weights(rows: tuple[int, ...], gelu: bool) -> None:
    if not folding.packs(torch.float32, torch.device("cpu")):
        pytest.skip("this PyTorch has no packed weights")
    weight, bias, x = torch.randn(24, 16), torch.randn(24), torch.randn(*rows, 16)
    for b in (None, bias):
        expected = PlainLinear(weight, b, gelu)(x)
        torch.testing.assert_close(PackedLinear(weight, b, gelu)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_packed_only_where_this_cpu_can_read_them(dtype: torch.dtype) -> None:
    """oneDNN packs bf16 only with AVX-512; where it cannot, the plain product is used."""
    if folding.packs(dtype, torch.device("cpu")):
        assert PackedLinear(torch.ones(8, 8, dtype=dtype), None, False)(torch.ones(1, 8, dtype=dtype))[0, 0] == 8
    assert not folding.packs(dtype, torch.device("meta"))
    kind = PackedLinear if folding.packs(dtype, torch.device("cpu")) else PlainLinear
    assert isinstance(fold(toy.network(dtype=torch.float32), {torch.float32: "float32"}.get(dtype, "bf16")).head, kind)


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("inputs", [7, 36, 40, 144])
def test_int8_with_any_number_of_inputs(inputs: int) -> None:
    """PyTorch's kernel for few rows crashed or read foreign memory where inputs did not fill its vectors."""
    weight, x = torch.randn(33, inputs), torch.randn(2, inputs).bfloat16()
    found = Int8Linear(weight, None, False)
    expected = x.float() @ (found.weight.float() * found.scale.float()[:, None]).T
    assert ((found(x).float() - expected).abs() <= 2**-6 * (expected.abs() + 1)).all()


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("rows", [1, 2, folding.FEW, folding.FEW + 1, 40])
def test_int8_weights_are_off_by_half_a_step_at_most(rows: int) -> None:
    """Both kernels equal the product with the rounded weights but for bf16 outputs, which round up to three times."""
    weight, bias, x = torch.randn(24, 16), torch.randn(24).bfloat16(), torch.randn(rows, 16).bfloat16()
    weight[3] = 0
    found = Int8Linear(weight, bias, False)
    rounded = found.weight.float() * found.scale.float()[:, None]
    assert ((rounded - weight).abs() <= 0.502 * found.scale.float()[:, None] + 1e-30).all()
    expected = x.float() @ rounded.T
    error = (found(x).float() - expected - bias.float()).abs()
    assert (error <= 3 * 2**-8 * (expected.abs() + bias.float().abs()) + 1e-6).all()
    assert found(x[None]).shape == (1, rows, 24)


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("shape", toy.SHAPES)
@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("bf16", 0.03), ("int8", 0.06)])
def test_low_precision_is_close(precision: str, bound: float, shape: str) -> None:
    """Relative to the spread of this random network's logits, for every pattern and with a cache."""
    sizes = {"width": 32, "head_width": 32, "mlp_width": 64}  # norms of a few numbers magnify rounding
    net = toy.network(dtype=torch.float32, **{**toy.SHAPES[shape], **sizes})
    low = fold(net, precision)
    for visibility in PATTERNS.values():
        expected = net(*inputs(visibility))
        assert (low(*inputs(visibility)).float() - expected).norm() < bound * expected.norm()
    cache, expected = low.new_cache(B, L), net(*inputs(causal(L)))
    assert cache.keys[0].dtype == low.dtype
    tokens, position, _ = inputs(causal(L))
    for i in range(L):
        found = low(tokens[:, i : i + 1], position[:, i : i + 1], by_order(torch.tensor([[i]])), cache=cache)
        cache.commit(1)
        assert (found[:, 0].float() - expected[:, i]).norm() < bound * expected[:, i].norm()


def test_what_it_refuses() -> None:
    net = toy.network()
    with pytest.raises(ValueError, match=r"int3.*float32, bf16, int8"):
        fold(net, "int3")
    with pytest.raises(ValueError, match="time"):
        fold(net)(*inputs(full(L)), time=torch.zeros(1))


def test_packed_inputs() -> None:
    """Several inputs in one pass, as `together` lays them out, give the logits of each alone."""
    net = toy.network()
    tokens, position, whole = inputs(causal(L), 1)
    other = inputs(full(4), 1)
    both = Packed((Part(1, whole, slice(0, L)), Part(1, other[2], slice(0, 4))))
    joined = [torch.cat([a, b], 1) for a, b in ((tokens, other[0]), (position, other[1]))]
    for network in (net, fold(net)):
        found = network(*joined, both)
        torch.testing.assert_close(found[:, :L], network(tokens, position, whole), **CLOSE)
        torch.testing.assert_close(found[:, L:], network(*other), **CLOSE)


def test_only_the_denoiser_has_parameters() -> None:
    net = toy.network()
    assert trainable(net) is net
    with pytest.raises(ValueError, match="Folded"):
        trainable(fold(net))


def test_it_is_a_copy() -> None:
    net = toy.network()
    folded, given = fold(net), inputs(full(L))
    before = folded(*given)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(folded(*given), before)


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_new_rows_are_attended_as_one_call_would(rows: int, labels: int) -> None:
    """Two rows have a way of their own in bf16; outputs are averages, and so below 1. Keys are some slots of a buffer,
    which is read where it is."""
    batch, keys = 3, 40
    q, k, v = (torch.randn(batch, 2, n, 8).tanh() for n in (rows, keys + 9, keys + 9))
    seen = torch.rand(labels, 1, rows, keys) < 0.8
    seen[..., 0] = True
    bias = folding.as_bias(seen, torch.float32)
    expected = scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys], attn_mask=seen)
    torch.testing.assert_close(attention.attend_cached(q, k[:, :, :keys], v[:, :, :keys], bias), expected)
    low = [t.bfloat16() for t in (q, k, v, bias)]
    found = attention.attend_cached(low[0], low[1][:, :, :keys], low[2][:, :, :keys], low[3])
    assert found.shape == expected.shape
    assert (found.float() - expected).abs().max() < 0.02
