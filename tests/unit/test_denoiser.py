"""The network: the paper's arithmetic, rows that get logits, time, soft tokens, the cache.

Shapes: B batch, N slots, V vocabulary.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from esolm.core.order import inverse
from esolm.core.visibility import Visibility, block, by_order, causal, full, sorted_two_stream, two_stream
from esolm.net import head, rotary
from esolm.net.denoiser import Denoiser, DenoiserConfig, Rows
from esolm.net.fold import fold
from support import paper, toy

B, L, V = 3, 8, 7
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
POSITION = torch.arange(L)[None]
NETS = {
    "AdaLN": toy.network(),
    "plain": toy.network(adaln=False),
    "one layer, one head": toy.network(layers=1, heads=1),
    "wide MLP": toy.network(layers=3, heads=4, mlp_ratio=4),
    **{name: toy.network(length=3 * L, **shape) for name, shape in toy.SHAPES.items() if shape},
}


@pytest.fixture(params=NETS)
def net(request: pytest.FixtureRequest) -> Denoiser:
    return NETS[request.param]


def same_rows(net: Denoiser, tokens: Tensor, position: Tensor, visibility: Visibility, time: Tensor | None) -> None:
    """Every choice of rows equals a slice of all logits."""
    slots = tokens.shape[1]
    everything = net(tokens, position, visibility, time)
    assert everything.shape == (len(tokens), slots, V)
    for span in (slice(0, slots), slice(0, slots // 2), slice(1, slots - 1), slice(slots - 1, slots)):
        found = net(tokens, position, visibility, time, out=Rows(span))
        torch.testing.assert_close(found, everything[:, span], **CLOSE)
        width = span.stop - span.start
        for rows in (torch.arange(len(tokens) * width), torch.tensor([len(tokens) * width - 1, 0]), torch.tensor([1])):
            if rows.max() >= len(tokens) * width:
                continue
            found = net(tokens, position, visibility, time, out=Rows(span, rows))
            torch.testing.assert_close(found, everything[:, span].flatten(0, 1)[rows], **CLOSE)
    none = torch.zeros(0, dtype=torch.long)
    assert net(tokens, position, visibility, time, out=Rows(slice(0, slots), none)).shape == (0, V)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(
    "visibility", [full(L), causal(L), sorted_two_stream(L, 3), sorted_two_stream(L, L), block(L, 2)]
)
def test_rows_equal_slices_of_all_logits(net: Denoiser, visibility: Visibility, timed: bool) -> None:
    slots = visibility.rank.shape[1]
    tokens, position = toy.text(B, slots), torch.arange(slots)[None] % L
    same_rows(net, tokens, position, visibility, torch.rand(B, dtype=torch.float64) if timed else None)


def test_rows_where_every_example_has_its_own_pattern(net: Denoiser) -> None:
    step = inverse(toy.permutations(B, L))
    same_rows(net, toy.text(B), POSITION, by_order(step), None)
    same_rows(net, toy.text(B, 2 * L), POSITION.repeat(1, 2), two_stream(step, step, step), None)


@pytest.mark.parametrize("time", [0.0, 0.7])
def test_equals_the_naive_network(net: Denoiser, time: float) -> None:
    """Also off the training length, at positions out of order, and at several times at once."""
    tokens, position = toy.text(B, 5), toy.permutations(B, 11)[:, :5]
    times = torch.tensor([time, time / 2, 3 * time], dtype=torch.float64)
    out = net(tokens, position, causal(5), times if time else None)
    for b in range(B):
        expected = paper.logits(net, tokens[b].tolist(), position[b].tolist(), paper.left_to_right(5), times[b].item())
        torch.testing.assert_close(out[b], expected, **CLOSE)
    if net.config.adaln and time:
        assert (out - net(tokens, position, causal(5))).abs().max() > 1e-3


def test_one_time_for_all_is_the_same_time_for_each(net: Denoiser) -> None:
    tokens, time = toy.text(B), torch.tensor([0.3], dtype=torch.float64)
    torch.testing.assert_close(
        net(tokens, POSITION, full(L), time), net(tokens, POSITION, full(L), time.expand(B)), **CLOSE
    )


def test_no_time_is_time_zero(net: Denoiser) -> None:
    tokens, zero = toy.text(B), torch.zeros(B, dtype=torch.float64)
    torch.testing.assert_close(net(tokens, POSITION, full(L), zero), net(tokens, POSITION, full(L)), **CLOSE)


def test_a_certain_probability_vector_is_a_token(net: Denoiser) -> None:
    tokens = toy.text(B)
    soft = one_hot(tokens, V).double()
    expected = net(tokens, POSITION, full(L))
    torch.testing.assert_close(net(soft, POSITION, full(L)), expected, **CLOSE)
    mixed = 0.5 * soft + 0.5 * one_hot((tokens + 1) % V, V)
    assert (net(mixed, POSITION, full(L)) - expected).abs().max() > 1e-3


def test_what_stands_beside_an_example_does_not_matter(net: Denoiser) -> None:
    tokens = toy.text(B)
    together = net(tokens, POSITION, causal(L))
    for b in range(B):
        torch.testing.assert_close(net(tokens[b : b + 1], POSITION, causal(L)), together[b : b + 1], **CLOSE)


def test_only_differences_of_positions_matter(net: Denoiser) -> None:
    if net.config.positions == "learned":
        pytest.skip("learned positions are absolute")
    tokens = toy.text(B)
    expected = net(tokens, POSITION, full(L))
    torch.testing.assert_close(net(tokens, POSITION + 11, full(L)), expected, rtol=1e-9, atol=1e-9)
    assert (net(tokens, POSITION * 2, full(L)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("pieces", [(8,), (1,) * 8, (3, 1, 4), (7, 1)])
def test_a_cache_fed_in_pieces_equals_one_pass(net: Denoiser, pieces: tuple[int, ...]) -> None:
    """Causal in sigma; every piece is also fed with a mask behind it, which is not committed."""
    sigma = toy.permutations(B, L)
    tokens = toy.text(B).gather(1, sigma)
    expected = net(tokens, sigma, causal(L))
    cache = net.new_cache(B, L + 1)
    done = 0
    with torch.no_grad():
        for size in pieces:
            at = slice(done, done + size)
            rank = torch.arange(done, done + size + 1)[None]
            new, place = tokens[:, at], sigma[:, at]
            mask = torch.full((B, 1), V - 1)
            out = net(torch.cat([new, mask], 1), torch.cat([place, place[:, -1:]], 1), by_order(rank), cache=cache)
            torch.testing.assert_close(out[:, :-1], expected[:, at], **CLOSE)
            cache.commit(size)
            done += size
    assert cache.extent == L
    assert torch.equal(cache.ranks[:, :L], torch.arange(L).expand(B, -1))


def test_a_cache_whose_rows_have_lengths_of_their_own(net: Denoiser) -> None:
    """Each row commits as many as it likes; what it does not commit is fed again."""
    sigma = toy.permutations(B, L)
    tokens = toy.text(B).gather(1, sigma)
    expected = net(tokens, sigma, causal(L))
    cache, done = net.new_cache(B, L + 3), torch.zeros(B, dtype=torch.long)
    with torch.no_grad():
        for count in ([3, 1, 2], [0, 3, 1], [3, 3, 3], [2, 1, 2]):
            place = done[:, None] + torch.arange(3)
            at = place.clamp_max(L - 1)
            out = net(tokens.gather(1, at), sigma.gather(1, at), by_order(place), cache=cache)
            fed = (place < L)[..., None].expand_as(out)
            torch.testing.assert_close(out[fed], expected.gather(1, at[..., None].expand_as(out))[fed], **CLOSE)
            done = done + torch.tensor(count)
            cache.commit(torch.tensor(count), max(count), int(done.max()))
    assert torch.equal(cache.lengths, done)
    assert done.tolist() == [L, L, L]


def test_a_cache_sees_only_itself_in_a_clique(net: Denoiser) -> None:
    """Masks that see the committed tokens and themselves, not each other: each as if it were alone."""
    tokens, masks = toy.text(B), torch.full((B, 3), V - 1)
    with torch.no_grad():
        cache = net.new_cache(B, L + 3)
        net(tokens[:, :5], POSITION[:, :5], causal(5), cache=cache)
        cache.commit(5)
        apart = Visibility(torch.full((1, 3), 2**30), torch.full((1, 3), 4), torch.arange(3)[None])
        together = net(masks, POSITION[:, 5:], apart, cache=cache)
        for i in range(3):
            alone = torch.cat([tokens[:, :5], masks[:, :1]], 1)
            place = torch.cat([POSITION[:, :5], POSITION[:, 5 + i : 6 + i]], 1)
            torch.testing.assert_close(together[:, i], net(alone, place, causal(6))[:, -1], **CLOSE)


@pytest.mark.parametrize("labels", [1, 2])
def test_a_cache_with_rows_that_are_not_seen(net: Denoiser, labels: int) -> None:
    """Ragged prompts: padding is committed with a rank that no horizon reaches, in its own row only."""
    tokens, rank = toy.text(2), torch.tensor([[0, 1, 2], [0, 1, 2**30]])
    with torch.no_grad():
        results = []
        for fill in (0, 1):
            prompt = tokens[:, :3].clone()
            prompt[1, 2] = fill
            cache = net.new_cache(2, L)
            net(prompt, POSITION[:, :3], by_order(rank), cache=cache)
            cache.commit(3)
            after = by_order(torch.full((labels, 1), 3))
            results.append(net(tokens[:, 3:4], POSITION[:, 3:4], after, cache=cache))
        torch.testing.assert_close(results[0], results[1], **CLOSE)
        whole = net(tokens[:1, :4], POSITION[:, :4], causal(4))
        torch.testing.assert_close(results[0][0, 0], whole[0, 3], **CLOSE)
        short = net(tokens[1:, [0, 1, 3]], POSITION[:, [0, 1, 3]], causal(3))
        torch.testing.assert_close(results[0][1, 0], short[0, 2], **CLOSE)


def test_a_full_cache_says_so(net: Denoiser) -> None:
    cache = net.new_cache(B, 5)
    with pytest.raises(ValueError, match=r"5 slots.* 8"):
        net(toy.text(B), POSITION, causal(L), cache=cache)
    with torch.no_grad():
        net(toy.text(B, 4), POSITION[:, :4], causal(4), cache=cache)
        cache.commit(4)
        with pytest.raises(ValueError, match=r"5 slots.* 6"):
            net(toy.text(B, 2), POSITION[:, :2], causal(2), cache=cache)


def test_recomputing_activations_changes_nothing() -> None:
    net = toy.network()
    gradients = []
    for recompute in (False, True):
        net.checkpoint_blocks = recompute
        net.zero_grad()
        net(toy.text(B), POSITION, full(L)).pow(2).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for one, two in zip(*gradients):
        torch.testing.assert_close(one, two, **CLOSE)


def test_a_new_network_starts_as_in_the_paper() -> None:
    """Zero modulation and output layer, nothing else: the first logits are zero and the first gradient is not."""
    net = Denoiser(DenoiserConfig(V, L, layers=2, width=16, heads=2, cond_width=4))
    zero = {name for name, p in net.named_parameters() if not p.any()}
    assert zero == {n for n, _ in net.named_parameters() if "modulation" in n or n.startswith("head")}
    out = net(toy.text(B), POSITION, full(L))
    assert not out.any()
    out.logsumexp(-1).sum().backward()
    assert net.head.bias.grad.any()
    bound = 1 / 16**0.5
    assert 0.9 * bound < net.embed.weight.abs().max() <= bound


def test_the_small_initialisation_is_that_of_gpt2() -> None:
    """Normal weights of deviation 0.02, less where a block adds to the residual; only biases and modulation are zero.
    The largest relative error of a deviation over the matrices here, 256 entries at least, is below 5 sigma = 0.22."""
    torch.manual_seed(0)
    net = Denoiser(DenoiserConfig(64, L, layers=2, width=32, heads=2, cond_width=16, init="gpt2"))
    for name, p in net.named_parameters():
        if "modulation" in name or name.endswith("bias"):
            assert not p.any(), name
        elif p.dim() == 2:
            std = 0.01 if "attn_out" in name or "mlp.2" in name else 0.02
            assert abs(p.std().item() / std - 1) < 0.22, name
        else:
            assert (p == 1).all(), name


def test_dropout_only_in_training() -> None:
    net = toy.network(dropout=0.5)
    tokens = toy.text(B)
    assert torch.equal(net(tokens, POSITION, full(L)), net(tokens, POSITION, full(L)))
    net.train()
    assert not torch.equal(net(tokens, POSITION, full(L)), net(tokens, POSITION, full(L)))


@pytest.mark.usefixtures("bf16")
def test_autocast_is_close_to_full_precision() -> None:
    """bfloat16 autocast moves the logits of this random network by less than 5 % of their spread."""
    net = toy.network(dtype=torch.float32)
    for visibility in (full(L), causal(L), sorted_two_stream(L, 5), block(L, 2)):
        slots = visibility.rank.shape[1]
        tokens, position = toy.text(B, slots), torch.arange(slots)[None] % L
        expected = net(tokens, position, visibility)
        with torch.autocast("cpu", torch.bfloat16):
            out = net(tokens, position, visibility).float()
        assert 0 < (out - expected).norm() < 0.05 * expected.norm()


def test_learned_positions_have_an_end() -> None:
    net = toy.network(**toy.SHAPES["gpt2"])
    with pytest.raises(ValueError, match=f"position {L}"):
        net(toy.text(B), POSITION + 1, full(L))


def test_a_tied_head_is_no_parameter() -> None:
    """One gradient for both uses, also where the output layer is swept in chunks; a copy has a head of its own."""
    net = copy.deepcopy(toy.network(**toy.SHAPES["llama"]))
    assert "head.weight" not in net.state_dict()
    assert net.head.weight is net.embed.weight
    tokens, target = toy.text(B), toy.text(B, seed=1).flatten()
    gradients = []
    for many in (1 << 24, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head, "WHOLE", many)
            net.zero_grad()
            net(tokens, POSITION, causal(L), score=head.Score(target, V - 1)).sum().backward()
        gradients.append(net.embed.weight.grad.clone())
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 5}, "kv_heads is 5"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"head_width": 7}, "head_width is 7"),
        ({"norm": "rms", "norm_bias": True}, "norm_bias"),
        ({"mlp": "relu"}, "mlp is 'relu'"),
        ({"positions": "none"}, "positions is 'none'"),
        ({"rotary_length": 64, "rotary_low": 4.0}, "rotary_low"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"width": 10, "heads": 3}, "width 10"),
        ({"width": 6, "heads": 2}, "width 6"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"layers": 0}, "layers is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"length": 0}, "length is 0"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DenoiserConfig(V, **sizes)


def test_a_vector_pass_replaces_tokens_and_logits() -> None:
    """Fed the embeddings it is the pass on tokens; the result is computed from the rows before the output layer."""
    net, x = toy.network(latent_width=5), toy.text(B)
    index = torch.tensor([1, 4, 17])

    def result(clean: Tensor, predicted: Tensor, rounding: head.TiedHead) -> Tensor:
        assert torch.equal(clean, net.embed(x).flatten(0, 1)[index])
        return rounding(predicted)

    out, score = Rows(slice(0, L), index), head.VectorPass(lambda clean: clean, result, V)
    torch.testing.assert_close(net(x, POSITION, full(L), out=out, score=score), net(x, POSITION, full(L), out=out))
    moved = head.VectorPass(lambda clean: clean + 1, result, V)
    assert not torch.allclose(net(x, POSITION, full(L), out=out, score=moved), net(x, POSITION, full(L), out=out))
    for other in (toy.network(), fold(toy.network())):
        with pytest.raises(ValueError, match="latent_width"):
            other(x, POSITION, full(L), out=out, score=score)
    with pytest.raises(ValueError, match="latent_width"):
        fold(net)


@pytest.mark.parametrize("init", ["paper", "gpt2"])
def test_embeddings_that_get_noise_start_with_its_size(init: str) -> None:
    net = Denoiser(DenoiserConfig(500, L, layers=1, width=16, heads=2, cond_width=4, init=init, latent_width=20))  # type: ignore[arg-type]
    assert net.embed.weight.std().item() == pytest.approx(1, rel=0.05)
    assert net.head.weight is net.embed.weight


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_rotation_in_bfloat16_has_the_bits_of_its_two_halves(batch: int, sign: float) -> None:
    """The faster form on a CPU, of a view as attention gets it."""
    t = torch.randn(3, 5, 2, 8).bfloat16().transpose(1, 2)
    cos, sin = (torch.randn(batch, 1, 5, 4).bfloat16() for _ in range(2))
    a, b = t.chunk(2, -1)
    halves = torch.addcmul(a * cos, b, sin, value=-sign), torch.addcmul(b * cos, a, sin, value=sign)
    turned = rotary._turn(t, cos, sin, sign)
    assert torch.equal(turned, torch.cat(halves, -1))
    assert turned.stride() == t.stride()
