"""One two-stream pass equals one pass per token.

Each separate pass is the naive network on the clean tokens before, sorted by sigma and causal, and one mask.

Shapes: B batch, L length.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from esolm.core import order
from esolm.net.conditionals import order_nats, place_nats
from esolm.net.denoiser import Denoiser
from support import paper, toy

B, L, V = 4, 6, 5
MASK = V - 1
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module", params=[True, False], ids=["AdaLN", "plain"])
def net(request: pytest.FixtureRequest) -> Denoiser:
    return toy.network(V, L, adaln=request.param)


def by_passes(net: Denoiser, x: Tensor, sigma: Tensor, scored: Tensor, num_clean: Tensor | None = None) -> Tensor:
    """A pass of its own for every scored token."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    for b, step in itertools.product(range(len(x)), range(x.shape[1])):
        at = sigma[b, step].item()
        if scored[b, at]:
            clean = 0 if num_clean is None else int(num_clean[b])
            found[b, at] = paper.query_nats(net, x[b].tolist(), sigma[b].tolist(), step, MASK, clean)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_token_in_any_order(net: Denoiser, seed: int) -> None:
    x, sigma = toy.text(B, L, V, seed), toy.permutations(B, L, seed)
    everything = torch.ones_like(x, dtype=torch.bool)
    found = order_nats(net, x, sigma, everything, MASK)
    torch.testing.assert_close(found, by_passes(net, x, sigma, everything), **CLOSE)
    assert (found > 0).all()
    other = order_nats(net, x, sigma.flip(1), everything, MASK)
    assert (found - other).abs().max() > 0.01  # the order matters


@pytest.mark.parametrize("num_scored", [(1, 1, 1, 1), (6, 3, 1, 0), (0, 0, 0, 0), (2, 2, 5, 6)])
def test_only_the_last_ones_scored(net: Denoiser, num_scored: tuple[int, ...]) -> None:
    x, sigma = toy.text(B, L, V), toy.permutations(B, L)
    scored = order.inverse(sigma) >= L - torch.tensor(num_scored)[:, None]
    found = order_nats(net, x, sigma, scored, MASK)
    torch.testing.assert_close(found, by_passes(net, x, sigma, scored), **CLOSE)
    assert torch.equal(found != 0, scored)


@pytest.mark.parametrize("num_clean", [(0, 2, 4, 6), (1, 5, 3, 3)])
@pytest.mark.parametrize("padded", [False, True])
def test_clean_tokens_that_see_each_other(net: Denoiser, num_clean: tuple[int, ...], padded: bool) -> None:
    """Eso-LM (A)."""
    x, sigma, clean = toy.text(B, L, V), toy.permutations(B, L), torch.tensor(num_clean)
    scored = order.inverse(sigma) >= clean[:, None]
    valid = torch.ones_like(scored) if padded else None
    found = order_nats(net, x, sigma, scored, MASK, valid, clean)
    torch.testing.assert_close(found, by_passes(net, x, sigma, scored, clean), **CLOSE)
    if max(num_clean) > 1:
        assert (found - order_nats(net, x, sigma, scored, MASK)).abs().max() > 0.01


def kept(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """valid, given and an order with the given first and padding last; one row is all given, one all valid."""
    coin = torch.rand(3, B, L, generator=torch.Generator().manual_seed(seed))
    valid, given = coin[0] < 0.7, coin[1] < 0.4
    valid[:, 0] = True
    valid[1], given[2] = True, True
    group = order.groups(coin[2] < 0.5, valid, given & valid)
    return valid, given & valid, order.sort(group, coin[0].double())


@pytest.mark.parametrize("seed", range(6))
def test_padding_and_given_tokens(net: Denoiser, seed: int) -> None:
    """Padding, wherever it stands, is last in the order and changes nothing; given tokens are first, seen, unscored."""
    x, (valid, given, sigma) = toy.text(B, L, V, seed), kept(seed)
    scored = valid & ~given
    found = order_nats(net, x, sigma, scored, MASK, valid)
    torch.testing.assert_close(found, by_passes(net, x, sigma, scored), **CLOSE)
    assert torch.equal(found != 0, scored)
    noise = torch.where(valid, x, (x + 1) % MASK)
    torch.testing.assert_close(order_nats(net, noise, sigma, scored, MASK, valid), found, **CLOSE)
    context = torch.where(given, (x + 1) % MASK, x)
    change = (order_nats(net, context, sigma, scored, MASK, valid) - found).abs().amax(1)
    assert torch.equal(change > 1e-6, given.any(1) & scored.any(1))


@pytest.mark.parametrize("seed", range(3))
def test_the_batch_does_not_matter(net: Denoiser, seed: int) -> None:
    """Neither its size, nor how many masks the others have, nor whether anyone is padded."""
    x, (valid, given, sigma) = toy.text(B, L, V, seed), kept(seed)
    scored = valid & ~given
    together = order_nats(net, x, sigma, scored, MASK, valid)
    for b in range(B):
        one = slice(b, b + 1)
        alone = order_nats(net, x[one], sigma[one], scored[one], MASK, valid[one])
        torch.testing.assert_close(alone, together[one], **CLOSE)
        if valid[b].all():
            short = order_nats(net, x[one], sigma[one], scored[one], MASK)
            torch.testing.assert_close(short, together[one], **CLOSE)


def gradients(net: Denoiser, nats: Tensor) -> list[Tensor]:
    net.zero_grad()
    nats.sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def test_the_gradient_is_that_of_the_labels(net: Denoiser) -> None:
    """The kernel without a mask and the dense mask of padded batches give one gradient."""
    x, sigma = toy.text(B, L, V), toy.permutations(B, L)
    scored, weight = order.inverse(sigma) >= 2, torch.rand(B, L, dtype=torch.float64)
    found = [
        gradients(net, order_nats(net, x, sigma, scored, MASK, valid) * weight)
        for valid in (None, torch.ones_like(scored))
    ]
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, **CLOSE)
        assert one.any()


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_batch_is_the_sum_of_its_examples(net: Denoiser, seed: int, prompted: bool) -> None:
    """Rows of different lengths share a z half; the slots that a short one has too many count for nothing."""
    x, (valid, given, sigma) = toy.text(B, L, V, seed), kept(seed)
    given = given & prompted
    together = gradients(net, order_nats(net, x, sigma, valid & ~given, MASK, valid))
    alone = [torch.zeros_like(g) for g in together]
    for b in range(B):
        one = slice(b, b + 1)
        nats = order_nats(net, x[one], sigma[one], (valid & ~given)[one], MASK, valid[one])
        for sum_so_far, g in zip(alone, gradients(net, nats)):
            sum_so_far += g
    for one, two in zip(together, alone):
        torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.parametrize("sigma", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_probabilities_of_all_sequences_sum_to_one(sigma: tuple[int, ...]) -> None:
    net = toy.network(4, 4)
    x = torch.tensor(list(itertools.product(range(3), repeat=4)))
    orders = torch.tensor(sigma).expand(len(x), -1)
    nats = order_nats(net, x, orders, torch.ones_like(x, dtype=torch.bool), 3).sum(1)
    assert (-nats).exp().sum().item() == pytest.approx(1, abs=1e-12)
    assert nats.std() > 0.1  # it is not the uniform distribution


def test_nats_are_put_at_their_positions() -> None:
    rows = torch.tensor([[True, False, True], [False, False, True]])
    position = torch.tensor([[2, 0, 1], [1, 2, 0]])
    placed = place_nats(torch.tensor([1.0, 2.0, 3.0]), rows, position, 4)
    assert placed.tolist() == [[0, 2, 1, 0], [3, 0, 0, 0]]


def test_a_network_that_knows_nothing_needs_log_v_nats() -> None:
    net = toy.network(V, L)
    torch.nn.init.zeros_(net.head.weight)
    torch.nn.init.zeros_(net.head.bias)
    x, sigma = toy.text(B, L, V), toy.permutations(B, L)
    found = order_nats(net, x, sigma, torch.ones_like(x, dtype=torch.bool), MASK)
    torch.testing.assert_close(found, torch.full_like(found, math.log(V - 1)), **CLOSE)
