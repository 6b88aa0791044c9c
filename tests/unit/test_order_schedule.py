"""Schedules: partitions of the positions, drawn by the paper's law, complete before the first pass.

Statistics are of fixed seeds; a right schedule would be called wrong with chance 1e-6 per test (|z| < 5 where a mean is
compared, and chi-square elsewhere).

Shapes: B batch, L length, K steps.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esolm.core import order
from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from support import toy
from support.chance import ALARM, chance
from support.naive import plan_of


def free(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Nothing given, no padding."""
    return torch.zeros(batch, length, dtype=torch.bool), torch.ones(batch, length, dtype=torch.bool)


def test_the_papers_worked_example() -> None:
    """L = 8, n_t = (2, 1, 2), sigma = (3, 1, 6, 4, 7, 2, 5, 8): six evaluations. The paper counts from 1."""
    sigma = torch.tensor([[3, 1, 6, 4, 7, 2, 5, 8]]) - 1
    schedule = Schedule(sigma, torch.tensor([[2, 1, 2, 1, 1, 1]]), torch.tensor([0]), torch.tensor([3]))
    steps = [[i + 1 for i in step] for step in schedule.steps()]
    assert steps == [[3, 1], [6], [4, 7], [2], [5], [8]]
    assert schedule.nfe.tolist() == [6]
    assert schedule.starts.tolist() == [[0, 2, 3, 5, 6, 7]]
    assert schedule.step_of().tolist() == [[0, 3, 0, 2, 4, 1, 2, 5]]
    assert order.inverse(sigma).tolist() == [[1, 5, 0, 3, 6, 2, 4, 7]]


def test_the_worked_example_with_a_prompt_and_in_a_batch() -> None:
    """The same steps behind two given tokens, beside a row that is shorter and ends earlier."""
    sigma = torch.tensor([[9, 0, 3, 1, 6, 4, 7, 2, 5, 8], [2, 0, 1, 3, 4, 5, 6, 7, 8, 9]])
    sizes = torch.tensor([[2, 1, 2, 1, 1, 1], [2, 1, 0, 0, 0, 0]])
    schedule = Schedule(sigma, sizes, torch.tensor([2, 0]), torch.tensor([3, 1]))
    assert schedule.steps(0) == [[3, 1], [6], [4, 7], [2], [5], [8]]
    assert schedule.steps(1) == [[2, 0], [1]]
    assert schedule.nfe.tolist() == [6, 2]
    assert schedule.starts.tolist()[0] == [2, 4, 5, 7, 8, 9]
    assert schedule.starts.tolist()[1][:2] == [0, 2]
    assert schedule.step_of().tolist() == [[-1, 0, 3, 0, 2, 4, 1, 2, 5, -1], [0, 1, 0, -1, -1, -1, -1, -1, -1, -1]]


@st.composite
def demands(draw: st.DrawFn) -> tuple[Tensor, Tensor, Randomness, str]:
    """given, valid, randomness, given_order; some rows may be all given or nearly all padding."""
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    coins = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(batch)]
    known = torch.tensor(coins) & torch.tensor(draw(st.booleans()))
    lengths = torch.tensor([draw(st.integers(1, length)) for _ in range(batch)])
    valid = torch.arange(length) < lengths[:, None]
    if draw(st.booleans()):
        valid = torch.ones_like(valid)
    rng = Randomness(draw(st.integers(0, 999)), draw(st.integers(0, 5)))
    return known, valid, rng, draw(st.sampled_from(order.GIVEN_ORDERS))


def check(schedule: Schedule, known: Tensor, valid: Tensor, given_order: str) -> None:
    """Given positions first, then every other position once, in steps, then padding."""
    batch, length = known.shape
    assert torch.equal(schedule.sigma.sort(1).values, torch.arange(length).expand(batch, -1))
    assert (schedule.sizes >= 0).all()
    assert torch.equal(schedule.nfe, (schedule.sizes > 0).long().cumprod(1).sum(1))  # zeros only at the end
    steps_of = schedule.step_of()
    for b in range(batch):
        plan = plan_of(schedule, b)
        fixed = (known[b] & valid[b]).nonzero()[:, 0].tolist()
        assert sorted(plan.given) == fixed
        if given_order == "ascending":
            assert list(plan.given) == fixed
        assert sorted(plan.sigma) == valid[b].nonzero()[:, 0].tolist()
        assert all(plan.steps)
        for i in range(length):
            where = [k for k, step in enumerate(plan.steps) if i in step]
            assert steps_of[b, i] == (where[0] if where else -1)
        assert 0 <= plan.diffusion <= len(plan.steps)
        sequential = plan.steps[plan.diffusion :]
        assert all(len(step) == 1 for step in sequential)
        assert list(sequential) == sorted(sequential)
        for k, step in enumerate(plan.steps):
            begin = int(schedule.starts[b, k])
            assert tuple(schedule.sigma[b, begin : begin + len(step)].tolist()) == step


def same_alone(build: Any, known: Tensor, valid: Tensor, rng: Randomness, schedule: Schedule) -> None:
    """A row's schedule is a function of the seed and the row: alone and without padding, the same."""
    for b in range(len(known)):
        own = int(valid[b].sum())
        one = build(known[b : b + 1, :own], valid[b : b + 1, :own], Randomness(rng.key, rng.first + b))
        assert plan_of(one, 0) == plan_of(schedule, b)


@given(demands(), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sampled_from([None, 1, 2, 5, 1000]))
def test_ancestral_partitions(demand: Any, alpha_0: float, num_steps: int | None) -> None:
    known, valid, rng, given_order = demand

    def build(known: Tensor, valid: Tensor, rng: Randomness) -> Schedule:
        return order.ancestral(known, valid, rng, alpha_0, num_steps, given_order)

    schedule = build(known, valid, rng)
    check(schedule, known, valid, given_order)
    same_alone(build, known, valid, rng, schedule)
    if num_steps is None:
        assert schedule.sizes.max() <= 1
    else:
        assert (schedule.diffusion <= num_steps).all()
    if alpha_0 == 0:
        assert not schedule.diffusion.any()
    if alpha_0 == 1:
        assert torch.equal(schedule.diffusion, schedule.nfe)


@given(demands(), st.sampled_from([None, 1, 2, 30]), st.integers(1, 4))
def test_block_by_block_partitions(demand: Any, num_steps: int | None, size: int) -> None:
    """BD3-LM: the steps of a block are one after another, at most T' of them, one block after another."""
    known, valid, rng, given_order = demand

    def build(known: Tensor, valid: Tensor, rng: Randomness) -> Schedule:
        return order.ancestral(known, valid, rng, 1.0, num_steps, given_order, size)

    schedule = build(known, valid, rng)
    check(schedule, known, valid, given_order)
    same_alone(build, known, valid, rng, schedule)
    for b in range(len(known)):
        blocks = [{i // size for i in step} for step in schedule.steps(b)]
        assert all(len(block) == 1 for block in blocks)
        numbers = [block.pop() for block in blocks]
        assert numbers == sorted(numbers)
        assert num_steps is None or max(Counter(numbers).values(), default=0) <= num_steps


@given(demands(), st.integers(1, 14))
def test_the_block_sampler_partitions(demand: Any, parallelism: int) -> None:
    """Evenly spaced among the positions to denoise: those of a step are `stretch` apart, at most `parallelism`."""
    known, valid, rng, given_order = demand

    def build(known: Tensor, valid: Tensor, rng: Randomness) -> Schedule:
        return order.blocks(known, valid, rng, parallelism, given_order)

    schedule = build(known, valid, rng)
    check(schedule, known, valid, given_order)
    same_alone(build, known, valid, rng, schedule)
    assert torch.equal(schedule.diffusion, schedule.nfe)
    for b in range(len(known)):
        places = (valid[b] & ~known[b]).nonzero()[:, 0].tolist()
        stretch = math.ceil(len(places) / parallelism)
        steps = [sorted(places.index(i) for i in step) for step in schedule.steps(b)]
        assert sorted(steps) == [list(range(offset, len(places), stretch)) for offset in range(stretch)]
        assert all(len(step) <= parallelism for step in steps)


@given(demands(), st.data())
def test_a_users_order_partitions(demand: Any, data: st.DataObject) -> None:
    known, valid, rng, given_order = demand
    length = known.shape[1]
    sigma = torch.tensor([data.draw(st.permutations(range(length))) for _ in range(len(known))])
    schedule = order.user_order(known, valid, rng, sigma, given_order)
    check(schedule, known, valid, given_order)
    for b in range(len(known)):
        wanted = [[i] for i in sigma[b].tolist() if valid[b, i] and not known[b, i]]
        assert schedule.steps(b) == wanted
    one = order.user_order(known, valid, rng, sigma[:1], given_order)
    assert one.steps(0) == schedule.steps(0)


@pytest.mark.parametrize("sigma", [[0, 1, 1], [0, 1, 3], [0, 1], [0, 1, 2, 3], [0], [-1, 0, 1]])
def test_an_order_that_is_no_permutation_is_refused(sigma: list[int]) -> None:
    with pytest.raises(ValueError, match=r"order must be a permutation of 0 \.\. 2"):
        order.user_order(*free(2, 3), Randomness(0), torch.tensor([sigma]))


@pytest.mark.parametrize("build", [order.blocks, order.user_order, order.ancestral])
def test_an_unknown_given_order_is_refused(build: Any) -> None:
    rest = {order.blocks: (2,), order.user_order: (torch.arange(3)[None],), order.ancestral: (0.5, 3)}[build]
    with pytest.raises(ValueError, match="given_order is 'descending'; it must be one of random, ascending"):
        build(*free(1, 3), Randomness(0), *rest, "descending")


def counts_law(length: int, alpha_0: float, num_steps: int) -> dict[tuple[tuple[int, ...], int], float]:
    """(non-zero n_t, tokens left for the sequential phase) by the paper's sequential rule: n_t ~ Binomial(masked,
    (alpha_s - alpha_t) / (1 - alpha_t))."""
    law: dict[Any, float] = {((), length): 1.0}
    for i in range(num_steps, 0, -1):
        alpha_t, alpha_s = alpha_0 * (1 - i / num_steps), alpha_0 * (1 - (i - 1) / num_steps)
        p = (alpha_s - alpha_t) / (1 - alpha_t)
        after: dict[Any, float] = defaultdict(float)
        for (sizes, masked), weight in law.items():
            for n in range(masked + 1):
                pmf = math.comb(masked, n) * p**n * (1 - p) ** (masked - n)
                if pmf > 0:
                    after[(*sizes, n) if n else sizes, masked - n] += weight * pmf
        law = after
    return dict(law)


@pytest.mark.parametrize(("alpha_0", "num_steps"), [(1.0, 1), (1.0, 2), (1.0, 4), (0.6, 1), (0.6, 3), (0.25, 4)])
def test_counts_follow_the_binomial_law(alpha_0: float, num_steps: int) -> None:
    """The exact law of all counts together, L = 6, 20000 rows."""
    schedule = order.ancestral(*free(20000, 6), Randomness(3), alpha_0, num_steps)
    found = [
        (tuple(sizes[:steps]), 6 - sum(sizes[:steps]))
        for sizes, steps in zip(schedule.sizes.tolist(), schedule.diffusion.tolist())
    ]
    law = counts_law(6, alpha_0, num_steps)
    if len(law) == 1:
        assert set(found) == set(law)
        return
    assert chance(found, law) > ALARM
    assert chance(found, counts_law(6, alpha_0 * 0.95, num_steps)) < ALARM
    assert chance(found, counts_law(6, alpha_0, num_steps + 1)) < ALARM


def test_the_first_hitting_sampler_is_the_limit_of_many_steps() -> None:
    """T = 10^7 and T -> infinity: the same orders, since a token's place is its uniform."""
    few = order.ancestral(*free(500, 10), Randomness(3), 0.5, 10**7)
    limit = order.ancestral(*free(500, 10), Randomness(3), 0.5, None)
    assert torch.equal(few.sigma, limit.sigma)
    assert few.nfe.tolist() == limit.nfe.tolist() == [10] * 500


@pytest.mark.parametrize("num_steps", [16, 1000, None])
@pytest.mark.parametrize("alpha_0", [0.125, 0.5, 0.9])
def test_a_share_alpha_0_comes_from_diffusion(alpha_0: float, num_steps: int | None) -> None:
    """Of 2000 rows of 100 tokens: the mean within 5 standard errors of alpha_0 L, and the law Binomial(L, alpha_0)."""
    rows, length = 2000, 100
    schedule = order.ancestral(*free(rows, length), Randomness(1), alpha_0, num_steps)
    steps = torch.arange(schedule.sizes.shape[1])
    found = torch.where(steps < schedule.diffusion[:, None], schedule.sizes, 0).sum(1)
    error = math.sqrt(length * alpha_0 * (1 - alpha_0) / rows)
    assert abs(found.double().mean() - alpha_0 * length) < 5 * error
    law = {n: math.comb(length, n) * alpha_0**n * (1 - alpha_0) ** (length - n) for n in range(length + 1)}
    assert chance(found.tolist(), law) > ALARM


def test_alpha_0_and_the_steps_apply_to_what_is_not_given() -> None:
    rows = 2000
    known, valid = free(rows, 100)
    known[:, ::2] = True
    schedule = order.ancestral(known, valid, Randomness(1), 0.5, 10)
    assert (schedule.given == 50).all()
    steps = torch.arange(schedule.sizes.shape[1])
    found = torch.where(steps < schedule.diffusion[:, None], schedule.sizes, 0).sum(1).double()
    assert abs(found.mean() - 25) < 5 * math.sqrt(50 / 4 / rows)


@pytest.mark.parametrize(
    ("alpha_0", "num_steps", "published"),
    [(1, 16, 16), (1, 128, 128), (1, 1024, 646), (1, 4096, 906), (0.25, 16, 784), (0.25, 128, 879), (0.25, 1024, 994)],
)
def test_evaluations_at_length_1024_are_the_papers(alpha_0: float, num_steps: int, published: int) -> None:
    """The mean NFE of 400 rows, within 5 standard errors of the exact one, T (1 - (1 - alpha_0/T)^L) + (1 - alpha_0) L;
    and within 5 standard errors and 2 of the published one, which is a mean of few samples, rounded."""
    rows, length = 400, 1024
    nfe = order.ancestral(*free(rows, length), Randomness(2), alpha_0, num_steps).nfe.double()
    exact = num_steps * (1 - (1 - alpha_0 / num_steps) ** length) + (1 - alpha_0) * length
    error = nfe.std().item() / math.sqrt(rows)
    assert abs(nfe.mean() - exact) <= 5 * error + 1e-9 + 0.02 * (error == 0)
    assert abs(nfe.mean() - published) <= 5 * error + 2


def test_the_block_sampler_at_length_1024() -> None:
    """Parallelism 4: {o, 256 + o, 512 + o, 768 + o}, the offsets in random order."""
    schedule = order.blocks(*free(300, 1024), Randomness(0), 4)
    assert schedule.sizes.shape == (300, 256)
    assert (schedule.sizes == 4).all()
    steps = schedule.sigma.view(300, 256, 4).sort(-1).values
    assert torch.equal(steps - steps[..., :1], torch.tensor([0, 256, 512, 768]).expand_as(steps))
    assert torch.equal(steps[..., 0].sort(1).values, torch.arange(256).expand(300, -1))
    first = steps[:, :8, 0].flatten()
    assert chance((first // 16).tolist(), dict.fromkeys(range(16), 1 / 16)) > ALARM
    together = schedule.sigma.view(300, 256, 4)[:, :20].flatten(0, 1) // 256
    assert chance(map(tuple, together.tolist()), dict.fromkeys(itertools.permutations(range(4)), 1 / 24)) > ALARM


@pytest.mark.parametrize(
    ("length", "parallelism", "nfe"), [(10, 4, 3), (10, 10, 1), (10, 99, 1), (10, 1, 10), (7, 3, 3)]
)
def test_the_block_samplers_evaluations(length: int, parallelism: int, nfe: int) -> None:
    schedule = order.blocks(*free(3, length), Randomness(0), parallelism)
    assert schedule.nfe.tolist() == [nfe] * 3
    assert schedule.sizes.max() <= parallelism


def test_interleavings_are_uniform() -> None:
    """Three offsets of two positions each: all six orders of the offsets, 6000 rows."""
    schedule = order.blocks(*free(6000, 6), Randomness(5), 2)
    offsets = [tuple(i % 3 for i in row[::2]) for row in schedule.sigma.tolist()]
    assert chance(offsets, dict.fromkeys(itertools.permutations(range(3)), 1 / 6)) > ALARM


@pytest.mark.parametrize("build", ["ancestral", "first hitting", "block of one"])
def test_orders_are_uniform(build: str) -> None:
    given_valid, rng = free(6000, 3), Randomness(5)
    schedule = {
        "ancestral": lambda: order.ancestral(*given_valid, rng, 1.0, 2),
        "first hitting": lambda: order.ancestral(*given_valid, rng, 1.0, None),
        "block of one": lambda: order.blocks(*given_valid, rng, 1),
    }[build]()
    assert chance(map(tuple, schedule.sigma.tolist()), dict.fromkeys(itertools.permutations(range(3)), 1 / 6)) > ALARM


def test_the_order_of_the_given_is_uniform_and_not_that_of_the_rest() -> None:
    known, valid = free(6000, 5)
    known[:, [0, 2, 4]] = True
    rng = Randomness(5)
    shuffled = order.ancestral(known, valid, rng, 1.0, None, "random"), order.blocks(known, valid, rng, 1, "random")
    for schedule in shuffled:
        pairs = [(tuple(row[:3]), tuple(row[3:])) for row in schedule.sigma.tolist()]
        first, rest = itertools.permutations([0, 2, 4]), list(itertools.permutations([1, 3]))
        assert chance(pairs, {(a, b): 1 / 12 for a in first for b in rest}) > ALARM


def test_left_to_right_is_alpha_zero() -> None:
    known, valid = free(5, 40)
    known[:, [3, 7]] = True
    schedule = order.ancestral(known, valid, Randomness(0), 0.0, None, "ascending")
    assert schedule.sigma.tolist() == [[3, 7, *(i for i in range(40) if i not in (3, 7))]] * 5
    assert schedule.diffusion.tolist() == [0] * 5


def test_long_schedules_need_no_loop_over_the_steps() -> None:
    """T = 10^12 costs no more than T = 1."""
    schedule = order.ancestral(*free(2, 4096), Randomness(0), 1.0, 10**12)
    assert schedule.nfe.tolist() == [4096, 4096]


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_another_seed_is_another_schedule(seed: int) -> None:
    one, two = (order.ancestral(*free(2, 30), Randomness(key), 1.0, None) for key in (seed, seed + 1))
    assert not torch.equal(one.sigma, two.sigma)
    assert not torch.equal(one.sigma[0], one.sigma[1])
    assert torch.equal(one.sigma, order.ancestral(*free(2, 30), Randomness(seed), 1.0, None).sigma)


def test_padding_that_is_said_to_be_given_is_padding() -> None:
    known, valid = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[True, True, False, False]])
    for schedule in (
        order.ancestral(known, valid, Randomness(0), 0.5, 3),
        order.blocks(known, valid, Randomness(0), 2),
        order.user_order(known, valid, Randomness(0), toy.permutations(1, 4)),
    ):
        assert schedule.given.tolist() == [2]
        assert schedule.nfe.tolist() == [0]
        assert schedule.steps() == []
        assert schedule.step_of().tolist() == [[-1] * 4]
