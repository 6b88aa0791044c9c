"""The naive sampler and the chi-square test, which other tests rely on, are themselves correct."""

from __future__ import annotations

import math

import pytest
import torch

from esolm.core.randomness import Randomness
from support import paper, toy
from support.chance import ALARM, chance
from support.naive import Naive, Plan, every_plan


def test_the_yardstick_of_chance() -> None:
    """Quantiles of chi-square from a table: 5 % at 11.070 (5 degrees), 1 % at 6.635 (1 degree)."""
    gammaincc = torch.special.gammaincc
    for degrees, statistic, p in [(5, 11.0705, 0.05), (1, 6.6349, 0.01), (63, 103.4424, 0.001)]:
        found = gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double())
        assert found.item() == pytest.approx(p, rel=1e-3)
    assert chance("a" * 50 + "b" * 50, {"a": 0.5, "b": 0.5}) == pytest.approx(1)
    assert chance("a" * 60 + "b" * 40, {"a": 0.5, "b": 0.5}) == pytest.approx(0.0455, abs=1e-4)  # two sigma
    assert chance("abc", {"a": 0.5, "b": 0.5}) == 0  # what cannot be


def test_p_values_are_uniform() -> None:
    """Under the truth: 300 experiments of 2000 draws, themselves compared with the uniform law in 10 cells."""
    expected = {i: w / 36 for i, w in enumerate([1, 2, 3, 4, 5, 6, 7, 8])}
    u = Randomness(9).uniform(torch.arange(300), 2000)
    edges = torch.tensor(list(expected.values()), dtype=torch.float64).cumsum(0)
    values = [int(chance(row, expected) * 10) for row in torch.searchsorted(edges, u).tolist()]
    assert chance(values, dict.fromkeys(range(10), 0.1)) > ALARM


@pytest.mark.parametrize(("alpha_0", "num_steps"), [(1.0, 1), (1.0, 3), (0.4, 2), (0.0, 2)])
def test_every_plan_is_a_distribution_over_partitions(alpha_0: float, num_steps: int) -> None:
    plans = every_plan(3, alpha_0, num_steps)
    assert sum(plans.values()) == pytest.approx(1)
    assert all(sorted(plan.sigma) == [0, 1, 2] for plan in plans)
    by_diffusion = sum(p * len(sum(plan.steps[: plan.diffusion], ())) for plan, p in plans.items())
    assert by_diffusion == pytest.approx(3 * alpha_0)


@pytest.mark.parametrize("kind", ["B", "any", "A", "mdlm", "bd3lm2", "ar"])
def test_every_joint_is_a_distribution(kind: str) -> None:
    net = toy.network(4, 3)
    steps = ((0,), (1,), (2,)) if kind in ("ar", "bd3lm2") else ((2, 0), (1,))
    found = Naive(net, kind, 3).joint(Plan((), steps, 1), {})
    assert len(found) == 27
    assert sum(found.values()) == pytest.approx(1)
    assert max(found.values()) > 3 / 27  # the network has preferences


def test_one_at_a_time_is_the_any_order_likelihood() -> None:
    net = toy.network(4, 3)
    sigma = (2, 0, 1)
    for kind in ("B", "any"):
        found = Naive(net, kind, 3).joint(Plan((), tuple((i,) for i in sigma), 3), {})
        for x, p in found.items():
            assert -math.log(p) == pytest.approx(sum(paper.query_nats(net, x, sigma, k, 3) for k in range(3)))
