"""Constrained samples have the model's conditionals, each restricted to what can be completed: by enumeration.

Pearson's chi-square with fixed seeds: a right sampler would be called wrong with chance 1e-6 per test, 26 of them.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from esolm.constraints.automaton import Vocabulary
from esolm.constraints.guide import Limits
from esolm.core import draw
from esolm.core.draw import Draw
from esolm.core.randomness import Randomness
from esolm.generation.collect import log_weights
from esolm.generation.samples import Samples
from esolm.sampling.chooser import Chooser
from esolm.sampling.request import Request
from support import toy
from support.chance import ALARM, chance, given_the_plans, rows
from support.naive import Naive, Plan, plan_of, run
from support.patterns import Language, Matching

N, L = 3000, 4
TEXT = Vocabulary((b"a", b"b", b"ab", None, None), 3, False, "toy")
V = len(TEXT.pieces)
MASK = V - 1
LANGUAGE = Language(TEXT, "(?:ab)+|b+a|a?")
RNG = Randomness(5, 0, N)
SIGMA = (2, 0, 3, 1)
ORDER = torch.tensor([SIGMA])
SHIFT: dict[str, Any] = {"query": "shift", "first": "bos", "bos_id": 1}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "B": ("esolm", {"alpha_0": 0.5}),
    "any": ("esolm", {"alpha_0": 0.5, "loss": "any_order"}),
    "B-shift": ("esolm", {"alpha_0": 0.5, **SHIFT}),
    "A": ("esolm", {"alpha_0": 0.5, "variant": "A"}),
    "mdlm": ("mdlm", {}),
    "ar": ("ar", {}),
    "bd3lm2": ("bd3lm", {"block_size": 2}),
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "random order": {"sampler": "first_hitting", "alpha_0": 1.0},
    "hybrid": {"sampler": "first_hitting"},
    "hybrid in two steps": {"sampler": "ancestral", "num_steps": 2},
    "two at a time": {"sampler": "block", "parallelism": 2},
    "all at once": {"sampler": "block", "parallelism": 4},
    "left to right": {"sampler": "left_to_right"},
}
NET = toy.network(V, L, seed=3, width=8, heads=1, mlp_ratio=1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK", 2)


def ask(known: dict[int, int] | None = None, count: int = N, how: Draw | None = None, **options: Any) -> Request:
    known = known or {}
    x = torch.zeros(count, L, dtype=torch.long)
    given = torch.zeros(count, L, dtype=torch.bool)
    for position, token in known.items():
        x[:, position], given[:, position] = token, True
    made = toy.request(x, given, torch.ones_like(given), how, **options)
    return Request(x, given, made.valid, made.options, made.draw, made.order, Limits([[LANGUAGE.span(0, L)]] * count))


@functools.cache
def naive(kind: str, **more: Any) -> Matching:
    return Matching(NET, kind, MASK, 1 if kind.endswith("shift") else None, language=LANGUAGE, **more)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", ["B", "any"])
def test_eso_lm(kind: str, sampler: str) -> None:
    name, options = SYSTEMS[kind]
    tokens, schedule, _ = run(toy.make(name, MASK, **options), NET, ask(**SAMPLERS[sampler]), RNG)
    assert all(LANGUAGE.matches(row) for row in tokens.unique(dim=0).tolist())
    if sampler == "left to right":
        plan = Plan((), tuple((i,) for i in range(L)), 0)
        assert chance(rows(tokens), naive(kind).joint(plan, {})) > ALARM
    else:
        assert given_the_plans(tokens, schedule, naive(kind), {}) > ALARM


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("B-shift", {}), ("A", {"num_steps": 2}), ("mdlm", {}), ("mdlm", {"num_steps": 2}), ("ar", {}),
        ("bd3lm2", {}), ("bd3lm2", {"num_steps": 2}),
    ],
)  # fmt: skip
def test_other_systems(kind: str, options: dict[str, Any]) -> None:
    name, own = SYSTEMS[kind]
    tokens, schedule, _ = run(toy.make(name, MASK, **own), NET, ask(**options), RNG)
    if kind == "ar":
        plan = Plan((), tuple((i,) for i in range(L)), 0)
        assert chance(rows(tokens), naive(kind).joint(plan, {})) > ALARM
    else:
        assert given_the_plans(tokens, schedule, naive(kind), {}) > ALARM


@pytest.mark.parametrize("window", [1, 2, 4, None])
@pytest.mark.parametrize("kind", ["any", "B-shift"])
def test_speculative_samples_are_those_of_one_token_at_a_time(kind: str, window: int | None) -> None:
    name, own = SYSTEMS[kind]
    request = ask(sampler="speculative", order=ORDER, window=window)
    tokens, _, _ = run(toy.make(name, MASK, **own), NET, request, RNG)
    plan = Plan((), tuple((i,) for i in SIGMA), L)
    assert chance(rows(tokens), naive(kind).joint(plan, {})) > ALARM


@pytest.mark.parametrize("sampler", ["order", "speculative"])
def test_temperature_and_cuts_shape_the_restricted_conditionals(sampler: str) -> None:
    how = Draw(temperature=1.3, top_p=0.8, top_k=2)
    name, own = SYSTEMS["B"]
    tokens, _, _ = run(toy.make(name, MASK, **own), NET, ask(how=how, sampler=sampler, order=ORDER), RNG)
    plan = Plan((), tuple((i,) for i in SIGMA), L)
    assert chance(rows(tokens), naive("B", draw=how).joint(plan, {})) > ALARM


def test_given_tokens_inside_the_text() -> None:
    name, own = SYSTEMS["B"]
    tokens, schedule, _ = run(toy.make(name, MASK, **own), NET, ask({2: 0}, alpha_0=1.0), RNG)
    assert given_the_plans(tokens, schedule, naive("B"), {2: 0}) > ALARM


@pytest.mark.parametrize("sampler", ["confidence", "threshold"])
@pytest.mark.parametrize("kind", ["B", "B-shift", "mdlm"])
def test_positions_chosen_by_confidence(kind: str, sampler: str) -> None:
    """Every text matches, though several positions are decided in a pass."""
    name, own = SYSTEMS[kind]
    options = {"num_steps": 1} if sampler == "confidence" else {"tau": 0.05}
    tokens, _, steps = run(toy.make(name, MASK, **own), NET, ask(count=500, sampler=sampler, **options), RNG)
    assert all(LANGUAGE.matches(row) for row in tokens.unique(dim=0).tolist())
    assert len(steps) > 1  # some tokens did not fit those of the same pass


def test_power_without_the_check_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a step that are restricted one by one, and not together, give texts that do not match."""

    def apart(self: Chooser, logits: Any, row: Any, position: Any) -> Any:
        assert self.guide is not None
        allowed = self.allowed(row, position, logits.shape[1])
        scores = logits.masked_fill(~allowed, -math.inf)
        return dataclasses.replace(self, guide=None)(scores, row, position), allowed

    monkeypatch.setattr(Chooser, "guided", apart)
    name, own = SYSTEMS["B"]
    tokens, _, _ = run(toy.make(name, MASK, **own), NET, ask(sampler="block", parallelism=4), RNG)
    assert not all(LANGUAGE.matches(row) for row in tokens.unique(dim=0).tolist())


@pytest.mark.parametrize("options", [{"sampler": "order", "order": ORDER}, {"sampler": "speculative", "order": ORDER},
                                     {"sampler": "block", "parallelism": 4}])  # fmt: skip
def test_log_q_is_the_probability_of_the_draws(options: dict[str, Any]) -> None:
    name, own = SYSTEMS["any"]
    system, request = toy.make(name, MASK, **own), ask(count=64, **options)
    schedule = system.plan(request, RNG)
    with torch.inference_mode():
        steps = list(system.sample(NET, request, schedule, RNG))
    assert request.limits is not None
    guide = request.limits.guide
    tokens = torch.full((64, L), MASK)
    for step in steps:
        row, column = step.drawn.nonzero(as_tuple=True)
        tokens[row, step.position[row, column]] = step.token[row, column]
    assert guide is not None
    assert guide.finished
    one = Plan((), tuple((i,) for i in SIGMA), L)
    for i in range(64):
        plan = plan_of(schedule, i) if options["sampler"] == "block" else one
        expected = naive("any").joint(plan, {})[tuple(tokens[i].tolist())]
        assert guide.log_q[i] == pytest.approx(math.log(expected), abs=1e-6)


@pytest.mark.parametrize("options", [{"sampler": "order"}, {"sampler": "block"}])
def test_importance_weights_recover_the_model_given_a_match(options: dict[str, Any]) -> None:
    """Of every text of the language: q(x) w(x) is the model's p(x | sigma), so that weighted means over samples
    estimate the model conditioned on matching, and the mean weight the probability to match."""
    name, own = SYSTEMS["any"]
    plan = Plan((), tuple((i,) for i in SIGMA) if options["sampler"] == "order" else (SIGMA[:2], SIGMA[2:]), L)
    one_by_one = Plan((), tuple((i,) for i in SIGMA), L)
    q = naive("any").joint(plan, {})
    p = Naive(NET, "any", MASK).joint(one_by_one, {})
    texts = [list(x) for x in q]
    steps = [[list(step) for step in plan.steps]] * len(texts)
    log_q = [math.log(value) for value in q.values()]
    samples = Samples([""] * len(texts), texts, [L] * len(texts), L, steps, 0.0, log_q=log_q)
    weights = log_weights(NET, toy.make(name, MASK, **own), samples, batch_size=5)
    assert (weights + torch.tensor(log_q)).exp().tolist() == pytest.approx([p[x] for x in q], rel=1e-6)
    matching = sum(value for x, value in p.items() if LANGUAGE.matches(x))
    assert sum(value * math.exp(w) for value, w in zip(q.values(), weights.tolist())) == pytest.approx(matching)
    assert set(q) == {x for x in p if LANGUAGE.matches(x)}
