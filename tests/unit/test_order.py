"""Orders: permutations with their groups in turn, drawn as the paper says."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from esolm.core import order
from esolm.core.randomness import Randomness
from support import paper, toy


def test_inverse() -> None:
    sigma = toy.permutations(5, 9)
    steps = order.inverse(sigma)
    for b in range(5):
        assert steps[b].tolist() == paper.invert(sigma[b].tolist())
    assert torch.equal(order.inverse(steps), sigma)


def test_groups_follow_one_another() -> None:
    rng = Randomness(0)
    rows = torch.arange(40)
    u, coin = rng.uniform(rows, 12), rng.at("coin").uniform(rows, 36)
    masked, valid, given = (coin[:, i * 12 : (i + 1) * 12] < p for i, p in enumerate((0.5, 0.8, 0.3)))
    group = order.groups(masked, valid, given)
    for b in range(40):
        for i in range(12):
            expected = order.MASKED if masked[b, i] else order.CLEAN
            expected = order.GIVEN if given[b, i] else expected
            assert group[b, i] == (expected if valid[b, i] else order.PADDING)
    for ascending in (False, True):
        sigma = order.sort(group, u, ascending)
        assert torch.equal(sigma.sort(-1)[0], torch.arange(12).expand(40, -1))
        in_turn = group.gather(1, sigma)
        assert (in_turn[:, 1:] >= in_turn[:, :-1]).all()
        places = [s[g == order.MASKED].tolist() for s, g in zip(sigma, in_turn)]
        assert all(p == sorted(p) for p in places) == ascending
        clean = [s[g == order.CLEAN].tolist() for s, g in zip(sigma, in_turn)]
        assert not all(c == sorted(c) for c in clean)


def test_left_to_right_is_per_row_at_any_length() -> None:
    group = torch.full((2, 5000), order.MASKED)
    sigma = order.sort(group, Randomness(0).uniform(torch.arange(2), 5000), ascending=True)
    assert torch.equal(sigma, torch.arange(5000).expand(2, -1))


@pytest.mark.parametrize("alpha_0", [0.0, 0.3, 1.0])
def test_drawn_from_the_papers_distribution(alpha_0: float) -> None:
    """Every order within 5 standard errors of its probability (p < 6e-7 each): each position is clean with
    probability alpha_0, the clean in uniformly random order, then the rest ascending."""
    length, draws = 3, 20000
    expected: Counter[tuple[int, ...]] = Counter()
    for masked in paper.all_masks(length):
        orders = paper.orders(masked, ascending=True)
        num_clean = masked.count(False)
        for sigma in orders:
            expected[tuple(sigma)] += alpha_0**num_clean * (1 - alpha_0) ** (length - num_clean) / len(orders)
    assert sum(expected.values()) == pytest.approx(1)
    rng, rows = Randomness(4), torch.arange(draws)
    u, clean = rng.at("order").uniform(rows, length), rng.at("mask").uniform(rows, length)
    found = Counter(map(tuple, order.draw(alpha_0, u, clean, None, None).tolist()))
    for sigma, p in expected.items():
        assert abs(found[sigma] / draws - p) <= 5 * math.sqrt(p * (1 - p) / draws)


def test_given_first_and_padding_last() -> None:
    rng, rows = Randomness(5), torch.arange(30)
    u, clean = rng.uniform(rows, 6), rng.at("mask").uniform(rows, 6)
    valid = torch.tensor([True, True, False, True, True, False]).expand(30, -1)
    given = torch.tensor([False, False, False, True, False, False]).expand(30, -1)
    sigma = order.draw(0.5, u, clean, valid, given)
    assert (sigma[:, 0] == 3).all()
    assert torch.equal(sigma[:, 4:].sort(-1)[0], torch.tensor([2, 5]).expand(30, -1))
