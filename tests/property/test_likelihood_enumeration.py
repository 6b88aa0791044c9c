"""The likelihood by enumeration of all texts and all orders, and every estimator against it.

Three tokens, four positions: 81 texts, 24 orders. Where a mean over draws is compared with an exact value, it is at 5
standard errors; with the normal approximation a right estimator fails with p < 6e-7 per comparison, and the draws are
fixed.

Shapes: n texts, K orders, L length.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from esolm.core import order
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.likelihood import estimators
from esolm.likelihood.orders import draw_orders, under_orders
from support import paper, toy

V, L, MASK = 4, 4, 3
ORDERS = list(itertools.permutations(range(L)))
TEXTS = torch.tensor(list(itertools.product(range(V - 1), repeat=L)))
SYSTEMS = {"esolm": {"alpha_0": 1.0}, "mdlm": {}, "esolm-shift": {"alpha_0": 1.0, "query": "shift"}}
ALPHAS = (1.0, 0.5, 0.125, 0.0)
REPLICATIONS = 20_000


@functools.cache
def table(name: str = "esolm", seed: int = 0) -> Tensor:
    """log p(x | sigma) of every text under every order, [81, 24]."""
    net, system = toy.network(V, L, seed=seed), toy.make(name.split("-")[0], MASK, **SYSTEMS[name])
    with torch.no_grad():
        columns = [system.order_nats(net, Batch(TEXTS), torch.tensor(s).expand_as(TEXTS)).sum(1) for s in ORDERS]
    return -torch.stack(columns, 1)


@functools.cache
def chances(alpha_0: float) -> Tensor:
    """P_L^alpha_0 of every order, by enumeration of the clean sets, [24]."""
    chance = torch.zeros(len(ORDERS), dtype=torch.float64)
    for masked in paper.all_masks(L):
        clean = masked.count(False)
        found = paper.orders(masked, ascending=True)
        for sigma in found:
            share = alpha_0**clean * (1 - alpha_0) ** (L - clean) / len(found)
            chance[ORDERS.index(tuple(sigma))] += share
    return chance


def exact(log_w: Tensor, alpha_0: float = 1.0) -> Tensor:
    """-log p(x) = -log sum_sigma P(sigma) p(x | sigma), [n]."""
    return -(log_w + chances(alpha_0).log()).logsumexp(1)


def hardest(log_w: Tensor) -> int:
    """The text whose log-weights spread most."""
    return int(log_w.std(1).argmax())


def within(values: Tensor, expected: float, errors: float = 5.0) -> None:
    error = values.std().item() / math.sqrt(len(values))
    assert abs(values.mean().item() - expected) < errors * error + 1e-10


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_order_is_a_distribution_and_so_is_their_mixture(name: str) -> None:
    log_w = table(name)
    torch.testing.assert_close(log_w.exp().sum(0), torch.ones(24, dtype=torch.float64), rtol=0, atol=1e-12)
    assert log_w.std(1).mean() > 0.3  # the order matters
    for alpha_0 in ALPHAS:
        assert chances(alpha_0).sum().item() == pytest.approx(1, abs=1e-12)
        assert (-exact(log_w, alpha_0)).exp().sum().item() == pytest.approx(1, abs=1e-12)
    mixtures = [exact(log_w, alpha_0) for alpha_0 in ALPHAS]
    assert all((a - b).abs().max() > 0.05 for a, b in itertools.combinations(mixtures, 2))


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize(
    ("name", "alpha_0"), [("esolm", 1.0), ("esolm", 0.5), ("esolm", 0.125), ("mdlm", 1.0), ("esolm-shift", 0.5)]
)
def test_drawn_orders_and_their_weights(name: str, antithetic: bool, alpha_0: float) -> None:
    """Orders come from P_L^alpha_0 (at 5 standard errors of each chance), even and odd numbers alike; each weight is
    that of its order; the mean weight is p(x)."""
    draws, text = 4000, hardest(table(name))
    x = TEXTS[text].expand(draws, -1)
    rng = Randomness(5, 0, draws)
    sigma = [draw_orders(Batch(x), alpha_0, rng, k, antithetic) for k in (0, 1)]
    place = torch.stack([torch.tensor([ORDERS.index(tuple(s)) for s in drawn.tolist()]) for drawn in sigma], 1)
    expected = chances(alpha_0)
    for number in (0, 1):
        found = torch.bincount(place[:, number], minlength=24) / draws
        assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()
    system = toy.make(name.split("-")[0], MASK, **SYSTEMS[name] | ({"alpha_0": alpha_0} if name != "mdlm" else {}))
    some = 64 if name == "mdlm" else 512
    log_w = -under_orders(toy.network(V, L), system, Batch(x[:some]), rng, range(2), antithetic).sum(-1).T
    torch.testing.assert_close(log_w, table(name)[text][place[:some]], rtol=1e-10, atol=1e-10)
    within(table(name)[text][place].exp().mean(1), math.exp(-exact(table(name), alpha_0)[text]))


def test_antithetic_orders_reverse_the_diffusion_part_only() -> None:
    x = torch.zeros(200, 9, dtype=torch.long)
    given, valid = torch.arange(9).expand_as(x) % 4 == 1, torch.arange(9).expand_as(x) < 8
    rng = Randomness(1, 0, 200)
    for alpha_0 in (1.0, 0.5, 0.0):
        one, two = (draw_orders(Batch(x, valid, given), alpha_0, rng, k, True, "random") for k in (6, 7))
        other = draw_orders(Batch(x, valid, given), alpha_0, rng, 8, True, "random")
        assert not torch.equal(one, other)
        clean = rng.at("orders", 3).at("mask").uniform(rng.examples(200), 9) < alpha_0
        for a, b, c in zip(one.tolist(), two.tolist(), clean.tolist()):
            context = sum(given[0, i].item() for i in a[:8])
            head = context + sum(c[i] and not given[0, i] and valid[0, i].item() for i in range(9))
            assert a[:context] == b[:context]
            assert a[context:head] == b[context:head][::-1]
            assert a[head:] == b[head:]


def test_antithetic_orders_are_negatively_correlated_on_some_network() -> None:
    """By enumeration, on the mean over all texts; and an order and its reverse have together the mean of all."""
    backwards = [ORDERS.index(s[::-1]) for s in ORDERS]
    for name in SYSTEMS:
        log_w = table(name)
        other = log_w[:, backwards]
        torch.testing.assert_close((log_w.exp() + other.exp()).mean(1) / 2, log_w.exp().mean(1))
        a, b = (t - t.mean(1, keepdim=True) for t in (log_w, other))
        assert ((a * b).sum(1) / (a * a).sum(1)).mean() < -0.2
        pairs = torch.stack([log_w, other], -1)
        independent = torch.stack(torch.broadcast_tensors(log_w[:, :, None], log_w[:, None]), -1).flatten(1, 2)
        assert (estimators.bound(pairs).mean(1) < estimators.bound(independent).mean(1)).double().mean() > 0.8


def tuples(log_w: Tensor, k: int) -> Tensor:
    """The log-weights of every k-tuple of orders, [24^k, k]."""
    index = torch.arange(len(log_w))
    return log_w[torch.cartesian_prod(*[index] * k)].view(-1, k)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("seed", range(3))
def test_expected_bounds_by_enumeration_of_tuples(name: str, seed: int) -> None:
    """No chance here: E[bound(K)] falls with K and stays above -log p(x), and the jackknife's bias is smaller than
    the bound's, for the hardest text and an ordinary one."""
    log_w = table(name, seed)
    middle = int(log_w.std(1).argsort()[40])
    for text in (hardest(log_w), middle):
        value = exact(log_w)[text].item()
        means = [estimators.bound(tuples(log_w[text], k)).mean().item() for k in (1, 2, 3, 4)]
        assert means == sorted(means, reverse=True)
        assert means[-1] > value
        assert means[0] == pytest.approx(-log_w[text].mean().item(), abs=1e-10)
        for k in (2, 3, 4):
            bias = estimators.jackknife(tuples(log_w[text], k)).mean().item() - value
            assert abs(bias) < means[k - 1] - value
            if k % 2 == 0 and k > 2:
                pairs = estimators.jackknife(tuples(log_w[text], k), size=2).mean().item() - value
                assert abs(pairs) < means[k - 1] - value


@pytest.mark.parametrize("alpha_0", [1.0, 0.5, 0.125])
def test_the_bound_falls_and_reaches_the_value(alpha_0: float) -> None:
    """Drawn orders: 128 groups of 512. The bound at 512 is within its error and its bias of var(w) / (2 K p^2)."""
    log_w = table()
    text = hardest(log_w)
    value = exact(log_w, alpha_0)[text].item()
    number = torch.multinomial(chances(alpha_0), 128 * 512, True, generator=torch.Generator().manual_seed(1))
    drawn = log_w[text][number].view(128, 512)
    means = {k: found["bound"].mean().item() for k, found in estimators.curve(drawn, [1, 8, 64, 512]).items()}
    assert list(means.values()) == sorted(means.values(), reverse=True)
    for k in (1, 8, 64, 512):
        groups = estimators.bound(drawn.view(-1, k))
        assert groups.mean().item() > value - 5 * groups.std().item() / math.sqrt(len(groups))
    second = (chances(alpha_0) * (2 * log_w[text]).exp()).sum().item() * math.exp(2 * value) - 1
    last = estimators.bound(drawn)
    within(last - second / (2 * 512), value)
    assert means[512] - value < 0.1 * (means[1] - value)


@pytest.mark.parametrize(
    ("name", "alpha_0", "pair"),
    [("esolm", 1.0, 1), ("esolm", 1.0, 2), ("esolm", 0.5, 1), ("mdlm", 1.0, 1), ("mdlm", 1.0, 2)],
)
def test_jackknife_is_less_biased_at_every_k(name: str, alpha_0: float, pair: int) -> None:
    """|bias of the jackknife| < bias of the bound, with 5 standard errors of the paired difference to spare, by 20,000
    replications with fixed draws; independent orders and antithetic pairs."""
    log_w = table(name)
    text, generator = hardest(log_w), torch.Generator().manual_seed(3)
    value = exact(log_w, alpha_0)[text].item()
    backwards = torch.tensor([ORDERS.index(s[::-1]) for s in ORDERS])
    for k in (4, 6, 8, 16, 32):
        number = torch.multinomial(chances(alpha_0), REPLICATIONS * k // pair, True, generator=generator)
        number = number.view(REPLICATIONS, k // pair)
        if pair == 2:
            number = torch.stack([number, backwards[number]], -1).flatten(1)
        drawn = log_w[text][number]
        plain, better = estimators.bound(drawn) - value, estimators.jackknife(drawn, pair) - value
        gain = plain - better * better.mean().sign()
        assert gain.mean() > 5 * gain.std() / math.sqrt(REPLICATIONS)
        assert plain.mean() > 5 * plain.std() / math.sqrt(REPLICATIONS)


def test_left_to_right_is_one_order() -> None:
    """alpha_0 = 0: all orders drawn are the ascending one."""
    x = TEXTS[:5]
    for k in (0, 1, 7):
        for antithetic in (False, True):
            found = draw_orders(Batch(x), 0.0, Randomness(0, 0, 5), k, antithetic)
            assert torch.equal(found, torch.arange(L).expand_as(found))
    assert torch.equal(order.inverse(found), found)
