"""On a toy, over all sequences: the expected policy gradient is the gradient of the expected reward, the expected KL
estimate is the KL divergence, and the loss of DPO is its definition.

Shapes: B batch, L length, S all sequences.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.likelihood.orders import draw_orders
from esolm.tune.dpo import DpoObjective, Pair, PairBatches
from esolm.tune.estimators import Estimator
from esolm.tune.grpo import GrpoObjective, advantages
from esolm.tune.options import Dpo, Grpo
from esolm.tune.reference import Reference
from support import toy
from support.naive import Naive, Plan, every_plan

V, L = 4, 3
MASK = V - 1
ALL = torch.tensor(list(itertools.product(range(V - 1), repeat=L)))
SYSTEMS: dict[str, Any] = {
    "B": toy.make("esolm", MASK, alpha_0=0.5),
    "any": toy.make("esolm", MASK, alpha_0=0.5, loss="any_order"),
    "B-shift": toy.make("esolm", MASK, alpha_0=0.5, query="shift"),
    "mdlm": toy.make("mdlm", MASK),
    "ar": toy.make("ar", MASK),
}


def one_by_one(alpha_0: float) -> dict[Plan, float]:
    """Every order of first-hitting sampling with its probability."""
    found = {}
    for size in range(L + 1):
        for early in itertools.permutations(range(L), size):
            rest = tuple(i for i in range(L) if i not in early)
            weight = alpha_0**size * (1 - alpha_0) ** (L - size) / math.factorial(size)
            found[Plan((), tuple((i,) for i in early + rest), size)] = weight
    return {plan: weight for plan, weight in found.items() if weight}


PLANS = {
    "random order": one_by_one(1.0),
    "hybrid": one_by_one(0.5),
    "left to right": one_by_one(0.0),
    "parallel steps": every_plan(L, 1.0, 2),
    "hybrid, parallel steps": every_plan(L, 0.6, 2),
}
CASES = [(kind, name) for kind in SYSTEMS for name in PLANS if kind != "ar" or name == "left to right"]


def networks() -> tuple[Any, Any]:
    return toy.network(V, L + 1), toy.network(V, L + 1, seed=5)


def reward(x: Tensor) -> Tensor:
    return torch.randn(V**L, generator=torch.Generator().manual_seed(7), dtype=torch.float64)[
        (x * V ** torch.arange(L)).sum(1)
    ]


def scheduled(plans: dict[Plan, float]) -> tuple[Batch, Schedule, Tensor]:
    """Every sequence under every plan: [S * plans, L], and the probability of each row's plan."""
    rows = [(plan, weight) for plan, weight in plans.items() for _ in range(len(ALL))]
    sizes = torch.tensor([[len(step) for step in plan.steps] + [0] * (L - len(plan.steps)) for plan, _ in rows])
    sigma = torch.tensor([plan.sigma for plan, _ in rows])
    zero = torch.zeros(len(rows), dtype=torch.long)
    schedule = Schedule(sigma, sizes, zero, torch.tensor([plan.diffusion for plan, _ in rows]))
    return Batch(ALL.repeat(len(plans), 1)), schedule, torch.tensor([w for _, w in rows], dtype=torch.float64)


def gradient(value: Tensor, net: Any) -> Tensor:
    found = torch.autograd.grad(value, list(net.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(net.parameters(), found)]
    )


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_expected_gradient_is_that_of_the_expected_reward(kind: str, name: str, ratio: str) -> None:
    net, _ = networks()
    system, plans = SYSTEMS[kind], PLANS[name]
    batch, schedule, weight = scheduled(plans)
    p = (-system.schedule_nats(net, batch.x, schedule)).sum(1).exp()
    naive = Naive(net, kind, MASK)
    with torch.no_grad():
        for number, plan in list(enumerate(plans))[:3]:
            joint = naive.joint(plan, {})
            rows = slice(number * len(ALL), (number + 1) * len(ALL))
            torch.testing.assert_close(p[rows], torch.tensor([joint[tuple(x)] for x in ALL.tolist()]).double())
    expected = gradient((weight * p * reward(batch.x)).sum(), net)
    options = Grpo(group=1, advantage="raw", ratio=ratio, beta=0.0)
    objective = GrpoObjective(options, Estimator(system), schedule, reward(batch.x))
    (term,) = objective.terms(net, batch, Randomness(0, 0, len(batch.x)), True)
    found = gradient(-((weight * p).detach() * term.nats.sum(1)).sum(), net)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_centred_advantages_leave_the_gradient_unbiased() -> None:
    """Over all pairs of sequences that a group of two may hold."""
    net, _ = networks()
    system, plan = SYSTEMS["B"], {Plan((), ((2, 0), (1,)), 2): 1.0}
    _, schedule, _ = scheduled(plan)
    p = (-system.schedule_nats(net, ALL, schedule)).sum(1).exp()
    expected = gradient((p * reward(ALL)).sum(), net)
    index = torch.cartesian_prod(torch.arange(len(ALL)), torch.arange(len(ALL)))
    options = Grpo(group=2, advantage="centred", beta=0.0)
    values = advantages(reward(ALL)[index], "centred").flatten()
    rows = index.flatten()
    objective = GrpoObjective(options, Estimator(system), schedule.rows(rows), values)
    (term,) = objective.terms(net, Batch(ALL[rows]), Randomness(0, 0, len(rows)), True)
    weight = p.detach()[index].prod(1, keepdim=True).expand(-1, 2).flatten()
    found = gradient(-(weight * term.nats.sum(1)).sum() / 2, net)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_expected_estimate_is_the_divergence(kind: str, name: str) -> None:
    net, other = networks()
    system = SYSTEMS[kind]
    batch, schedule, weight = scheduled(PLANS[name])
    with torch.no_grad():
        log_p, log_q = (-system.schedule_nats(each, batch.x, schedule) for each in (net, other))
        objective = GrpoObjective(
            Grpo(group=1, advantage="raw", beta=0.5), Estimator(system), schedule, weight * 0, 0, log_q
        )
        _, kl = objective.terms(net, batch, Randomness(0, 0, len(batch.x)), True)
    p = weight * log_p.sum(1).exp()
    expected = (p * (log_p - log_q).sum(1)).sum()
    assert expected > 0.01
    torch.testing.assert_close((p * kl.nats.sum(1)).sum(), 0.5 * expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("orders", [1, 3])
@pytest.mark.parametrize("kind", ["B", "any", "B-shift", "ar"])
def test_the_loss_of_dpo_is_its_definition(kind: str, orders: int) -> None:
    """With likelihoods of the naive sampler, one token at a time, given the orders."""
    net, other = networks()
    system = SYSTEMS[kind]
    pairs = [Pair([0], [1, 2], [2, 0]), Pair([], [1, 1, 0], [2]), Pair([2, 1], [1], [0])]
    objective = DpoObjective(Dpo(beta=0.3, orders=orders), system, Reference(other))
    batch, rng = PairBatches(pairs, 3).batch(0), Randomness(4, 0, 3)
    (term,) = objective.terms(net, batch, rng, True)
    chosen, rejected = objective.log_p(net, batch, rng).chunk(2)
    slope = -0.3 * (1 - (-term.nats.detach()[:, 0]).exp())  # d/du of -log sigmoid(0.3 (u - v))
    wanted = gradient((slope * (chosen - rejected)).sum(), net)
    torch.testing.assert_close(gradient(term.nats.sum(), net), wanted, rtol=1e-9, atol=1e-12)
    naive = [Naive(each, kind, MASK) for each in (net, other)]
    for b, pair in enumerate(pairs):
        ratios = []
        for answer, offset in ((pair.chosen, 0), (pair.rejected, 3)):
            row = Batch(*(t[offset : offset + 3] for t in batch if t is not None))
            total, text = 0.0, dict(enumerate(pair.prompt + answer))
            for k in range(orders):
                alpha_0 = 0.0 if kind == "ar" else 0.5
                sigma = [i for i in draw_orders(row, alpha_0, rng, k, False)[b].tolist() if i < len(text)]
                assert set(sigma[: len(pair.prompt)]) == set(range(len(pair.prompt)))
                plan = Plan(tuple(sigma[: len(pair.prompt)]), tuple((i,) for i in sigma[len(pair.prompt) :]), 0)
                for each, sign in zip(naive, (1, -1)):
                    for n, (i,) in enumerate(plan.steps):
                        total += sign * math.log(each.conditional(plan, n, text)[0, text[i]].item()) / orders
            ratios.append(total)
        expected = math.log1p(math.exp(-0.3 * (ratios[0] - ratios[1])))
        assert term.nats[b].item() == pytest.approx(expected, rel=1e-9)
