"""The naive sampler that the loops are compared with, and what it can be trusted for.

One sequence at a time, without padding, without a cache, in natural order, with the paper's attention bias at each step
written out (B.8 for Eso-LM (B), D.3 for (A)). Distributions are enumerated from it, token by token.

Shapes: V vocabulary; a row's positions are 0 .. n - 1.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.sampling.request import Request, Step
from support import paper, toy

Tokens = tuple[int, ...]
ALARM = 1e-6
"""The chance that a right sampler is called wrong, per test. Seeds are fixed, so a test that passes keeps passing."""


class Plan(NamedTuple):
    """One row of a schedule: how many positions of sigma are given, and the steps behind them."""

    given: Tokens  # positions, in their order
    steps: tuple[Tokens, ...]
    diffusion: int  # how many of the steps belong to the diffusion phase

    @property
    def sigma(self) -> Tokens:
        return self.given + sum(self.steps, ())


def plan_of(schedule: Schedule, row: int) -> Plan:
    given = schedule.sigma[row, : int(schedule.given[row])].tolist()
    return Plan(tuple(given), tuple(map(tuple, schedule.steps(row))), int(schedule.diffusion[row]))


def decoded(plan: Plan, k: int) -> Tokens:
    """D_k: what is clean before step k, in the order of sigma."""
    return plan.given + sum(plan.steps[:k], ())


def eso_b(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int, hidden: bool = False) -> Tensor:
    """Logits of the masks of S_k, [|S_k|, V]. hidden: a mask sees no other mask (systems with the any-order loss)."""
    clean, now = decoded(plan, k), plan.steps[k]
    tokens, seen = paper.sampling_b(plan.sigma, len(clean), len(now))
    if hidden:
        for (p, i), (q, j) in itertools.product(enumerate(tokens), repeat=2):
            if i in now and j in now:
                seen[p, q] = i == j
    out = paper.logits(net, [known[i] if i in clean else mask for i in tokens], tokens, seen)
    return out[[tokens.index(i) for i in now]]


def eso_a(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int) -> Tensor:
    clean, now = decoded(plan, k), plan.steps[k]
    by_diffusion = len(decoded(plan, min(k, plan.diffusion)))
    tokens, seen = paper.sampling_a(plan.sigma, by_diffusion, len(clean) - by_diffusion, len(now))
    out = paper.logits(net, [known[i] if i in clean else mask for i in tokens], tokens, seen)
    return out[[tokens.index(i) for i in now]]


def mdlm(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int) -> Tensor:
    clean, length = decoded(plan, k), len(plan.sigma)
    tokens = [known[i] if i in clean else mask for i in range(length)]
    return paper.logits(net, tokens, range(length), paper.bidirectional(length))[list(plan.steps[k])]


def bd3lm(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int, size: int) -> Tensor:
    """By the training pattern over z and x: z as it stands at this step, x with every block before it clean."""
    clean, length, now = decoded(plan, k), len(plan.sigma), plan.steps[k]
    z = [known[i] if i in clean else mask for i in range(length)]
    first = now[0] // size * size
    assert mask not in z[:first]  # every block before is clean
    assert {i // size for i in now} == {now[0] // size}
    return paper.logits(net, z + z, [*range(length)] * 2, paper.blocks(length, size))[list(now)]


def ar(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int) -> Tensor:
    (now,) = plan.steps[k]
    tokens = [mask, *(known[i] for i in range(now))]
    return paper.logits(net, tokens, range(now + 1), paper.left_to_right(now + 1))[-1:]


@dataclass
class Naive:
    """The conditionals of a system and the distribution of its samples, each computed once."""

    net: Any
    kind: str  # B, any, A, mdlm, ar, or bd3lm with its block size
    mask: int
    memo: dict[Any, Tensor] = field(default_factory=dict)

    def logits(self, plan: Plan, k: int, known: Mapping[int, int]) -> Tensor:
        """Of the positions of step k, in the order of the step, [|S_k|, V]; known: tokens by position."""
        if self.kind.startswith("bd3lm"):
            return bd3lm(self.net, plan, k, known, self.mask, int(self.kind[5:]))
        if self.kind == "any":
            return eso_b(self.net, plan, k, known, self.mask, hidden=True)
        step = {"B": eso_b, "A": eso_a, "mdlm": mdlm, "ar": ar}[self.kind]
        return step(self.net, plan, k, known, self.mask)

    def conditional(self, plan: Plan, k: int, known: Mapping[int, int]) -> Tensor:
        """Probabilities of the tokens of a step, each given what the step sees, [|S_k|, V]."""
        clean = decoded(plan, k)
        sequential = clean[len(decoded(plan, min(k, plan.diffusion))) :]
        key = (clean, tuple(known[i] for i in clean), plan.steps[k], sequential, len(plan.sigma))
        if key not in self.memo:
            out = self.logits(plan, k, known).clone()
            out[:, self.mask] = -math.inf
            self.memo[key] = out.softmax(-1)
        return self.memo[key]

    def joint(self, plan: Plan, known: Mapping[int, int]) -> dict[Tokens, float]:
        """The probability of every sequence: the product, over the steps, of the conditionals that each defines."""
        return dict(self._from(plan, 0, dict(known), 1.0))

    def _from(self, plan: Plan, k: int, known: dict[int, int], p: float) -> Iterator[tuple[Tokens, float]]:
        if k == len(plan.steps):
            yield tuple(known[i] for i in range(len(plan.sigma))), p
            return
        now, table = plan.steps[k], self.conditional(plan, k, known).tolist()
        real = [v for v in range(len(table[0])) if v != self.mask]
        for drawn in itertools.product(real, repeat=len(now)):
            chance = math.prod(row[v] for row, v in zip(table, drawn))
            yield from self._from(plan, k + 1, {**known, **dict(zip(now, drawn))}, p * chance)


def mixture(plans: Mapping[Plan, float], naive: Naive, known: Mapping[int, int]) -> dict[Tokens, float]:
    """The distribution of samples when the schedule is drawn too."""
    found: dict[Tokens, float] = defaultdict(float)
    for plan, weight in plans.items():
        for x, p in naive.joint(plan, known).items():
            found[x] += weight * p
    return dict(found)


def every_plan(length: int, alpha_0: float, num_steps: int, given: tuple[Tokens, ...] = ((),)) -> dict[Plan, float]:
    """Every schedule of the paper's algorithm with its probability, by its own sequential rule.

    At each of the T steps a position that is still masked is denoised with probability
    (alpha_s - alpha_t) / (1 - alpha_t); the positions of a step come in uniformly random order; what is left goes left
    to right. given: the orders of the given positions, all equally likely.
    """
    plans: dict[Plan, float] = defaultdict(float)

    def go(t: int, left: Tokens, steps: tuple[Tokens, ...], p: float, first: Tokens) -> None:
        if p == 0:
            return
        if t == 0:
            plans[Plan(first, steps + tuple((i,) for i in left), len(steps))] += p
            return
        alpha_t, alpha_s = alpha_0 * (1 - t / num_steps), alpha_0 * (1 - (t - 1) / num_steps)
        rate = (alpha_s - alpha_t) / (1 - alpha_t)
        for size in range(len(left) + 1):
            for chosen in itertools.permutations(left, size):
                chance = rate**size * (1 - rate) ** (len(left) - size) / math.factorial(size)
                rest = tuple(i for i in left if i not in chosen)
                go(t - 1, rest, (*steps, chosen) if size else steps, p * chance, first)

    for first in given:
        go(num_steps, tuple(i for i in range(length) if i not in first), (), 1 / len(given), first)
    return dict(plans)


def chance(found: Iterable[Any] | Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """The p-value of Pearson's chi-square, of draws or of their counts; cells that expect fewer than 5 are pooled."""
    counts = Counter(found)
    draws = sum(counts.values())
    assert sum(expected.values()) == pytest.approx(1, abs=1e-9)
    if set(counts) - {x for x, p in expected.items() if p > 0}:
        return 0.0
    cells, rest = [], [0.0, 0.0]
    for x, p in expected.items():
        if p * draws >= 5:
            cells.append((counts[x], p * draws))
        else:
            rest = [rest[0] + counts[x], rest[1] + p * draws]
    if rest[1] > 0:
        cells.append((rest[0], rest[1]))
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    assert degrees > 0
    return torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def run(system: Any, net: Any, request: Request, rng: Randomness) -> tuple[Tensor, Schedule, list[Step]]:
    """Carry out a request: tokens int [B, L], with the mask wherever nothing was given or drawn."""
    schedule = system.plan(request, rng)
    with torch.inference_mode():
        steps = list(system.sample(net, request, schedule, rng))
    tokens = torch.where(request.given & request.valid, request.x, system.mask_id)
    for step in steps:
        row, column = step.drawn.nonzero(as_tuple=True)
        tokens[row, step.position[row, column]] = step.token[row, column]
    return tokens, schedule, steps


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
