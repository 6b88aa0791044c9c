"""Samples follow the distribution that their schedule defines, on vocabularies where every sequence can be enumerated.

20000 samples of each kind in one batch. Pearson's chi-square, seed fixed: a right sampler would be called wrong with
chance 1e-6 per test. The probabilities are the naive sampler's, and wrong samplers are shown to be rejected.

Shapes: B batch, L length.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core import draw
from esolm.core.batch import Batch
from esolm.core.draw import Draw
from esolm.core.order import Schedule
from esolm.core.randomness import Randomness, uniform
from esolm.net.conditionals import order_nats
from esolm.sampling import chooser
from esolm.sampling.request import Request
from support import engines, paper, toy
from support.chance import ALARM, chance, given_the_plans, numbered, rows
from support.naive import Naive, Plan, Tokens, every_plan, mixture, run

N, L, V = 20000, 3, 4
MASK, BOS = V - 1, 0
NET = toy.network(V, L, seed=11, width=8, heads=1, mlp_ratio=1)  # one whose patterns differ
RNG = Randomness(17, 0, N)
SURE = 1e-12
"""Wrong samplers are rejected at least so surely."""
SYSTEMS: dict[str, Any] = {
    "B": toy.make("esolm", MASK),
    "any": toy.make("esolm", MASK, loss="any_order"),
    "A": toy.make("esolm", MASK, variant="A"),
    "B-shift": toy.make("esolm", MASK, query="shift", first="bos", bos_id=BOS),
    "any-shift": toy.make("esolm", MASK, query="shift", first="bos", bos_id=BOS, loss="any_order"),
    "A-shift": toy.make("esolm", MASK, query="shift", first="bos", bos_id=BOS, variant="A"),
    "mdlm": toy.make("mdlm", MASK),
    "ar": toy.make("ar", MASK),
    "bd3lm2": toy.make("bd3lm", MASK, block_size=2),
}
NAIVE = {kind: Naive(NET, kind, MASK, BOS) for kind in SYSTEMS}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cumulative weights of a vocabulary of four in two blocks, and not padded to 256."""
    monkeypatch.setattr(draw, "BLOCK", 2)


def ask(length: int = L, known: dict[int, int] | None = None, **options: Any) -> Request:
    """N times the same request; known: given tokens by position."""
    x, fixed = torch.zeros(N, length, dtype=torch.long), torch.zeros(N, length, dtype=torch.bool)
    for i, token in (known or {}).items():
        x[:, i], fixed[:, i] = token, True
    return toy.request(x, fixed, torch.ones_like(fixed), **options)


def draws(kind: str, request: Request, rng: Randomness = RNG, net: Any = NET) -> tuple[Tensor, Schedule]:
    tokens, schedule, _ = run(SYSTEMS[kind], net, request, rng)
    return tokens, schedule


def plans(schedule: Schedule) -> Counter[Plan]:
    """How often each plan was drawn."""
    found, number = numbered(schedule)
    return Counter(dict(zip(found, number.bincount().tolist())))


def likelihood(sigma: Tokens, num_clean: int | None = None) -> dict[Tokens, float]:
    """exp(-order_nats) of every sequence, by the library's one pass."""
    every = torch.tensor(list(itertools.product(range(MASK), repeat=len(sigma))))
    order = torch.tensor([sigma]).expand(len(every), -1)
    clean = None if num_clean is None else torch.full((len(every),), num_clean)
    with torch.no_grad():
        nats = order_nats(NET, every, order, torch.ones_like(every, dtype=torch.bool), MASK, None, clean).sum(1)
    return {tuple(x): math.exp(-n) for x, n in zip(every.tolist(), nats.tolist())}


ORDERS = list(itertools.permutations(range(L)))


@pytest.mark.parametrize("kind", ["B", "any"])
@pytest.mark.parametrize("sigma", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_one_at_a_time_follows_the_likelihood_of_the_same_order(kind: str, sigma: Tokens) -> None:
    tokens, _ = draws(kind, ask(sampler="order", order=torch.tensor([sigma])))
    assert chance(rows(tokens), likelihood(sigma)) > ALARM
    for other in ORDERS:
        assert other == sigma or chance(rows(tokens), likelihood(other)) < SURE


@pytest.mark.parametrize("sigma", [(0, 1, 2), (2, 0, 1)])
def test_the_native_engine_follows_the_likelihood_too(sigma: Tokens) -> None:
    low = toy.network(V, L, torch.float32, seed=11, width=8, heads=1, mlp_ratio=1)
    tokens, _ = draws("B", ask(sampler="order", order=torch.tensor([sigma])), net=engines.native(low))
    assert chance(rows(tokens), likelihood(sigma)) > ALARM
    assert chance(rows(tokens), likelihood(sigma[::-1])) < SURE


def test_every_row_its_own_order() -> None:
    sigma = torch.tensor(ORDERS).repeat(N // len(ORDERS) + 1, 1)[:N]
    tokens, _ = draws("B", ask(sampler="order", order=sigma))
    share = rows(sigma)
    expected = {o + x: share[o] / N * p for o in ORDERS for x, p in likelihood(o).items()}
    assert chance(rows(torch.cat([sigma, tokens], 1)), expected) > ALARM


@pytest.mark.parametrize("alpha_0", [0.0, 0.5, 1.0])
def test_first_hitting_follows_order_and_likelihood(alpha_0: float) -> None:
    """Jointly: sigma ~ P_L^alpha_0 and x ~ p(x | sigma)."""
    tokens, schedule = draws("B", ask(sampler="first_hitting", alpha_0=alpha_0))
    law: Counter[Tokens] = Counter()
    for masked in paper.all_masks(L):
        orders = paper.orders(masked, ascending=True)
        for sigma in orders:
            weight = alpha_0 ** masked.count(False) * (1 - alpha_0) ** masked.count(True)
            law[tuple(sigma)] += weight / len(orders)
    expected = {o + x: w * p for o, w in law.items() for x, p in likelihood(o).items()}
    assert chance(rows(torch.cat([schedule.sigma, tokens], 1)), expected) > ALARM


def test_variant_a_left_to_right_follows_the_likelihood() -> None:
    """No token by diffusion: (A) and (B) are the same, and a mask query is not the token before it."""
    tokens, _ = draws("A", ask(sampler="left_to_right"))
    assert chance(rows(tokens), likelihood((0, 1, 2), 0)) > ALARM
    assert chance(rows(tokens), NAIVE["ar"].joint(Plan((), ((0,), (1,), (2,)), 0), {})) < SURE


@pytest.mark.matrix(3)
@pytest.mark.parametrize("known", [{}, {1: 2}])
@pytest.mark.parametrize(
    ("kind", "alpha_0", "num_steps"),
    [
        ("B", 1.0, 1), ("B", 1.0, 2), ("B", 0.5, 2), ("any", 1.0, 1), ("any", 0.5, 2),
        ("A", 1.0, 2), ("A", 0.5, 2), ("mdlm", 1.0, 1), ("mdlm", 1.0, 2),
        ("B-shift", 1.0, 1), ("B-shift", 0.5, 2), ("any-shift", 0.5, 2), ("A-shift", 0.5, 2),
    ],
)  # fmt: skip
def test_parallel_steps_follow_the_product_that_the_step_defines(
    kind: str, alpha_0: float, num_steps: int, known: dict[int, int]
) -> None:
    """Given the schedules that were drawn, and together with the law of the schedules; with and without a prompt."""
    options = {} if kind == "mdlm" else {"alpha_0": alpha_0}
    tokens, schedule = draws(kind, ask(known=known, num_steps=num_steps, **options))
    assert given_the_plans(tokens, schedule, NAIVE[kind], known) > ALARM
    law = every_plan(L, alpha_0, num_steps, (tuple(known),))
    assert chance(plans(schedule), law) > ALARM
    assert chance(rows(tokens), mixture(law, NAIVE[kind], known)) > ALARM


def test_patterns_are_told_apart() -> None:
    """The same tests reject one pattern's samples under another's probabilities."""
    pairs = [("B", "any"), ("any", "B"), ("A", "B"), ("B", "A"), ("mdlm", "A")]
    pairs += [("B", "B-shift"), ("any-shift", "any"), ("B-shift", "any-shift")]
    for kind, other in pairs:
        options = {} if kind == "mdlm" else {"alpha_0": 1.0}
        tokens, schedule = draws(kind, ask(num_steps=2, **options))
        assert given_the_plans(tokens, schedule, NAIVE[other], {}) < SURE
    tokens, schedule = draws("A", ask(num_steps=2, alpha_0=0.5))
    assert given_the_plans(tokens, schedule, NAIVE["B"], {}) < SURE


def test_the_block_sampler() -> None:
    """Four positions, two together: {0, 2} and {1, 3}, in random interleaving and order."""
    tokens, schedule = draws("B", ask(length=4, sampler="block", parallelism=2))
    pairs = [list(itertools.permutations(pair)) for pair in ((0, 2), (1, 3))]
    steps = [(a, b) for a in pairs[0] for b in pairs[1]]
    law = {Plan((), s, 2): 1 / 8 for pair in steps for s in (pair, pair[::-1])}
    assert chance(plans(schedule), law) > ALARM
    assert given_the_plans(tokens, schedule, NAIVE["B"], {}) > ALARM


@pytest.mark.parametrize("kind", ["B", "any", "A"])
@pytest.mark.parametrize("given_order", ["random", "ascending"])
def test_infills_follow_the_given_first_order(kind: str, given_order: str) -> None:
    """p(rest | given) of the order in which the given tokens come first; their own order matters to (B), not to (A)."""
    known = {0: 1, 2: 2}
    request = ask(4, known, sampler="first_hitting", alpha_0=0.5, given_order=given_order)
    tokens, schedule = draws(kind, request)
    assert given_the_plans(tokens, schedule, NAIVE[kind], known) > ALARM
    orders = ((0, 2), (2, 0)) if given_order == "random" else ((0, 2),)
    assert {plan.given for plan in plans(schedule)} == set(orders)
    law: dict[Plan, float] = defaultdict(float)
    for first in orders:
        for masked in paper.all_masks(2):
            for sigma in (found := paper.orders(masked, ascending=True)):
                steps = tuple((1 + 2 * i,) for i in sigma)  # the free positions are 1 and 3
                law[Plan(first, steps, masked.count(False))] += 1 / 4 / len(found) / len(orders)
    assert chance(plans(schedule), law) > ALARM
    assert chance(rows(tokens), mixture(law, NAIVE[kind], known)) > ALARM
    swapped = {Plan(plan.given[::-1], plan.steps, plan.diffusion): p for plan, p in law.items()}
    if given_order == "ascending":
        again = chance(rows(tokens), mixture(swapped, NAIVE[kind], known))
        assert again > ALARM if kind == "A" else again < SURE
    other = mixture(law, NAIVE[kind], {0: 1, 2: 0})  # another token is given there
    assert chance({(x[0], x[1], 0, x[3]): n for x, n in rows(tokens).items()}, other) < SURE


def test_an_infill_is_not_the_conditional_of_the_joint() -> None:
    """With an imperfect network p(x) / p(given) of another order is another distribution."""
    tokens, _ = draws("B", ask(known={2: 1}, sampler="left_to_right"))
    expected = NAIVE["B"].joint(Plan((2,), ((0,), (1,)), 0), {2: 1})
    assert chance(rows(tokens), expected) > ALARM
    joint = {x: p for x, p in likelihood((0, 1, 2)).items() if x[2] == 1}
    total = sum(joint.values())
    assert chance(rows(tokens), {x: p / total for x, p in joint.items()}) < SURE


@pytest.mark.parametrize("known", [{}, {0: 2}, {0: 1, 1: 2}])
def test_ar(known: dict[int, int]) -> None:
    tokens, schedule = draws("ar", ask(known=known))
    steps = tuple((i,) for i in range(len(known), L))
    assert set(plans(schedule)) == {Plan(tuple(known), steps, 0)}
    expected = NAIVE["ar"].joint(Plan(tuple(known), steps, 0), known)
    assert chance(rows(tokens), expected) > ALARM
    if not known:
        every = torch.tensor(list(expected))
        nats = SYSTEMS["ar"].terms(NET, Batch(every), RNG, False)[0].nats.sum(1)
        assert chance(rows(tokens), dict(zip(expected, (-nats).exp().tolist()))) > ALARM
        assert chance(rows(tokens), likelihood((0, 1, 2))) < SURE  # mask queries are another model


@pytest.mark.parametrize("num_steps", [None, 2, 3, 4])
@pytest.mark.parametrize("known", [{}, {3: 1}])
def test_bd3lm(num_steps: int | None, known: dict[int, int]) -> None:
    """Blocks of two, T' = 1, 2, 1 and then 2, or one token at a time; also with a token given in the last block."""
    tokens, schedule = draws("bd3lm2", ask(4, known, num_steps=num_steps))
    assert given_the_plans(tokens, schedule, NAIVE["bd3lm2"], known) > ALARM
    first, second = (every_plan(2, 1.0, ((num_steps or 2) + extra) // 2) for extra in (0, 1))
    if num_steps is None:
        first = second = {Plan((), s, 2): 1 / 2 for s in (((0,), (1,)), ((1,), (0,)))}
    law: dict[Plan, float] = defaultdict(float)
    for one, p in first.items():
        for two, q in ({Plan((), ((0,),), 1): 1.0} if known else second).items():
            steps = one.steps + tuple(tuple(i + 2 for i in s) for s in two.steps)
            law[Plan(tuple(known), steps, len(steps))] += p * q
    assert chance(plans(schedule), law) > ALARM
    expected = mixture(law, NAIVE["bd3lm2"], known)
    assert chance(rows(tokens), expected) > ALARM
    assert chance(rows(tokens), mixture(law, NAIVE["mdlm"], known)) < SURE


def test_mdlm_first_hitting() -> None:
    tokens, schedule = draws("mdlm", ask(sampler="first_hitting"))
    law = {Plan((), tuple((i,) for i in o), 3): 1 / 6 for o in ORDERS}
    assert chance(plans(schedule), law) > ALARM
    assert chance(rows(tokens), mixture(law, NAIVE["mdlm"], {})) > ALARM
    assert given_the_plans(tokens, schedule, NAIVE["mdlm"], {}) > ALARM


def wrong(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(chooser, name, value)


@pytest.mark.parametrize("kind", ["B", "A", "mdlm", "ar", "bd3lm2"])
def test_power_one_number_for_all_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, uniform=lambda key, row, column: uniform(key, row, column * 0))
    tokens, schedule = draws(kind, ask(4 if kind == "bd3lm2" else L))
    assert given_the_plans(tokens, schedule, NAIVE[kind], {}) < SURE


def test_power_one_number_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, uniform=lambda key, row, column: uniform(key, row % 100, column))
    tokens, schedule = draws("B", ask())
    assert given_the_plans(tokens, schedule, NAIVE["B"], {}) < SURE


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_power_a_slightly_wrong_temperature(temperature: float) -> None:
    tokens, _ = draws("B", ask(sampler="left_to_right", draw=Draw(temperature)))
    assert chance(rows(tokens), likelihood((0, 1, 2))) < SURE


def test_power_tokens_by_the_numbers_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same uniforms for the order and for the tokens: each alone is right, together they are not."""
    key = RNG.at("schedule").key
    wrong(monkeypatch, uniform=lambda _, row, column: uniform(key, row, column))
    tokens, schedule = draws("B", ask(num_steps=2, alpha_0=1.0))
    assert chance(plans(schedule), every_plan(L, 1.0, 2)) > ALARM
    assert given_the_plans(tokens, schedule, NAIVE["B"], {}) < SURE


@pytest.mark.parametrize("kind", ["B", "A"])
def test_power_a_neighbouring_position(kind: str) -> None:
    """A sampler that is one position off in its rotary embedding; expected from the right one."""

    class Shifted(torch.nn.Module):
        config, new_cache = NET.config, NET.new_cache

        def forward(self, tokens: Tensor, position: Tensor, *rest: Any, **named: Any) -> Tensor:
            return NET(tokens, torch.where(position == 2, 3, position), *rest, **named)

    tokens, schedule, _ = run(SYSTEMS[kind], Shifted(), ask(), RNG)
    assert given_the_plans(tokens, schedule, NAIVE[kind], {}) < SURE
