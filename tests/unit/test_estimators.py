"""Bounds and jackknife estimates as functions of log-weights: against the formulas written out.

Shapes: n sequences, K orders.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from esolm.likelihood import estimators

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def weights(n: int = 5, k: int = 6, scale: float = 2.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 50


def naive(log_w: Tensor, kept: list[int]) -> Tensor:
    """-log of the mean of some weights."""
    return -log_w[:, kept].exp().mean(1).log()


def stretches(k: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, k, size)]


def without(k: int, size: int, left_out: int) -> list[int]:
    return [i for number, stretch in enumerate(stretches(k, size)) if number != left_out for i in stretch]


def test_bound() -> None:
    log_w = weights()
    torch.testing.assert_close(estimators.bound(log_w), naive(log_w, list(range(6))), **CLOSE)
    torch.testing.assert_close(estimators.bound(log_w[:, :1]), -log_w[:, 0], **CLOSE)
    same = log_w[:, :1].expand(-1, 9)
    torch.testing.assert_close(estimators.bound(same), -log_w[:, 0], **CLOSE)


@pytest.mark.parametrize(("k", "size"), [(2, 1), (6, 1), (7, 1), (4, 2), (6, 2), (9, 3)])
def test_jackknife_by_its_formula(k: int, size: int) -> None:
    log_w, m = weights(k=k), k // size
    left = torch.stack([naive(log_w, without(k, size, i)) for i in range(m)], 1)
    torch.testing.assert_close(estimators.leave_out(log_w, size), left, **CLOSE)
    expected = m * naive(log_w, list(range(k))) - (m - 1) * left.mean(1)
    torch.testing.assert_close(estimators.jackknife(log_w, size), expected, **CLOSE)


def test_equal_weights_leave_nothing_to_correct() -> None:
    log_w = torch.full((3, 8), -700.0, dtype=torch.float64)
    for estimate in (estimators.bound, estimators.jackknife):
        torch.testing.assert_close(estimate(log_w), torch.full((3,), 700.0, dtype=torch.float64), **CLOSE)


def test_the_order_of_weights_does_not_matter_and_a_constant_passes_through() -> None:
    log_w, turn = weights(), torch.tensor([3, 1, 5, 0, 2, 4])
    for estimate in (estimators.bound, estimators.jackknife):
        torch.testing.assert_close(estimate(log_w[:, turn]), estimate(log_w), **CLOSE)
        torch.testing.assert_close(estimate(log_w - 1000), estimate(log_w) + 1000, **CLOSE)


@pytest.mark.parametrize("place", [0, 3, 5])
def test_one_weight_may_dominate(place: int) -> None:
    """exp(800) times the others: leaving it out must not be the total minus itself."""
    log_w = weights()
    log_w[:, place] += 800
    left = estimators.leave_out(log_w, 1)
    rest = [i for i in range(6) if i != place]
    torch.testing.assert_close(left[:, place], naive(log_w, rest), **CLOSE)
    torch.testing.assert_close(left[:, rest[0]], -log_w[:, place] + math.log(5), **CLOSE)


def test_jackknife_refuses_too_few_or_cut_pairs() -> None:
    for k, size in ((1, 1), (2, 2), (5, 2)):
        with pytest.raises(ValueError, match=f"jackknife of {k} orders"):
            estimators.jackknife(weights(k=k), size)


def test_curve_averages_disjoint_groups() -> None:
    log_w = weights(k=10)
    found = estimators.curve(log_w, [1, 3, 10], pair=1)
    torch.testing.assert_close(found[1]["bound"], -log_w.mean(1), **CLOSE)
    assert "jackknife" not in found[1]
    groups = [naive(log_w, list(range(first, first + 3))) for first in (0, 3, 6)]
    torch.testing.assert_close(found[3]["bound"], torch.stack(groups).mean(0), **CLOSE)
    torch.testing.assert_close(found[10]["jackknife"], estimators.jackknife(log_w), **CLOSE)
    paired = estimators.curve(log_w, [2, 4, 5], pair=2)
    assert [k for k, values in paired.items() if "jackknife" in values] == [4]


def test_curve_sizes() -> None:
    assert estimators.curve_sizes(1) == [1]
    assert estimators.curve_sizes(10) == [1, 5, 10]
    assert estimators.curve_sizes(10, pair=2) == [1, 4, 10]
    assert estimators.curve_sizes(5000) == [1, 10, 100, 1000, 2500, 5000]


def bootstrap(nats: Tensor, weight: Tensor, draws: int) -> float:
    """Standard error of sum(nats) / sum(weight) by resampling sequences."""
    index = torch.randint(len(nats), (draws, len(nats)), generator=torch.Generator().manual_seed(0))
    return float((nats[index].sum(1) / weight[index].sum(1)).std())


def test_standard_error_is_that_of_the_bootstrap_and_of_repetition() -> None:
    """Of a ratio: sequences of different length. The tolerance is 10 standard errors of a bootstrap of 4000."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(20, 200, (300,), generator=generator).double()
    nats = weight * (3 + 0.4 * torch.randn(300, generator=generator).double())
    found = estimators.standard_error(nats, weight)
    assert bootstrap(nats, weight, 4000) == pytest.approx(found, rel=10 / math.sqrt(2 * 4000))
    equal = torch.full((300,), 7.0, dtype=torch.float64)
    assert estimators.standard_error(nats, equal) == pytest.approx(nats.std().item() / 7 / math.sqrt(300), rel=1e-9)
    assert math.isnan(estimators.standard_error(nats[:1], weight[:1]))


@pytest.mark.parametrize("spread", [0.5, 1.0])
def test_jackknife_removes_the_leading_bias(spread: float) -> None:
    """Log-normal weights of mean 1: -log E[w] = 0. 40,000 replications; each claim holds with 5 standard errors to
    spare, so a right estimator fails with p < 3e-7 per claim, and the draws are fixed."""
    generator = torch.Generator().manual_seed(0)
    for k in (4, 8, 16):
        z = torch.randn(40_000, k, generator=generator, dtype=torch.float64)
        log_w = spread * z - spread**2 / 2
        plain, first = estimators.bound(log_w), estimators.jackknife(log_w)
        error = math.sqrt(first.var().item() / len(first))
        gain = plain - first * first.mean().sign()  # |bias of the jackknife| < bias of the bound
        assert gain.mean() > 5 * gain.std() / math.sqrt(len(gain))
        expected = (math.exp(spread**2) - 1) / (2 * k)  # the delta method
        assert plain.mean().item() == pytest.approx(expected, rel=0.35)
        assert abs(first.mean().item()) < 0.35 * expected + 5 * error
