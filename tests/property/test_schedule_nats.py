"""The likelihood of a sample given its schedule, in one pass, equals the probabilities it was drawn with.

Every sampler whose schedule is complete before the first token, against the logits of its own loop and against the
naive sampler, in float64.

Shapes: B batch, L length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.core.terms import without_id
from support import toy
from support.naive import Naive, Recording, plan_of, run

V = 6
MASK, BOS = V - 1, 2
SHIFT = {"query": "shift", "first": "bos", "bos_id": BOS}
SYSTEMS: dict[str, Any] = {
    "B": toy.make("esolm", MASK, alpha_0=0.5),
    "any": toy.make("esolm", MASK, alpha_0=0.5, loss="any_order"),
    "B-shift": toy.make("esolm", MASK, alpha_0=0.5, **SHIFT),
    "any-shift": toy.make("esolm", MASK, alpha_0=0.5, loss="any_order", **SHIFT),
    "mdlm": toy.make("mdlm", MASK),
    "ar": toy.make("ar", MASK),
}
"""By the kind of the naive sampler."""
SAMPLERS: dict[str, dict[str, Any]] = {
    "parallel": {"sampler": "ancestral", "num_steps": 3, "alpha_0": 1.0},
    "hybrid": {"sampler": "ancestral", "num_steps": 2, "alpha_0": 0.6},
    "one by one": {"sampler": "first_hitting", "alpha_0": 1.0},
    "hybrid, one by one": {"sampler": "first_hitting", "alpha_0": 0.5},
    "left to right": {"sampler": "left_to_right"},
    "block": {"sampler": "block", "parallelism": 3},
    "order": {"sampler": "order", "order": torch.tensor([[4, 2, 0, 6, 1, 3, 5, 7]])},
}
NET = toy.network(V, toy.LENGTH + 1)


def cases() -> list[tuple[str, str]]:
    found = []
    for kind, system in SYSTEMS.items():
        for name, options in SAMPLERS.items():
            if options["sampler"] in system.samplers:
                found.append((kind, name))
    return found


def drawn(kind: str, name: str, ragged: bool, draw: Any = None) -> tuple[Tensor, Schedule, list[Any], Any]:
    """Five samples, ragged or even, some with given tokens; AR has prompts."""
    lengths = torch.tensor([8, 5, 8, 6, 1]) if ragged else torch.full((5,), 8)
    valid = torch.arange(8) < lengths[:, None]
    known = torch.arange(8) < torch.tensor([0, 2, 3, 0, 0] if ragged else [2] * 5)[:, None]
    if kind != "ar" and ragged:
        known = known.roll(1, 1) & valid
    options = {key: value for key, value in SAMPLERS[name].items() if key != "alpha_0" or kind not in ("mdlm", "ar")}
    if name == "order" and ragged:
        options["order"] = torch.arange(8).flip(0)[None]
    request = toy.request(toy.text(5, 8, V), known & valid, valid, draw, **options)
    return *run(SYSTEMS[kind], NET, request, Randomness(3, 0, 5)), request


@pytest.mark.matrix(3)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("kind", "name"), cases())
def test_one_pass_equals_the_logits_of_the_sampler(kind: str, name: str, ragged: bool) -> None:
    tokens, schedule, _, _ = drawn(kind, name, ragged)
    found = SYSTEMS[kind].schedule_nats(NET, tokens.clamp_max(MASK), schedule)
    naive, expected = Naive(NET, kind, MASK, BOS if kind.endswith("shift") else None), torch.zeros_like(found)
    for b in range(len(tokens)):
        plan = plan_of(schedule, b)
        known = {i: int(tokens[b, i]) for i in plan.sigma}
        for k, places in enumerate(plan.steps):
            table = naive.conditional(plan, k, known)
            for row, i in enumerate(places):
                expected[b, i] = -table[row, known[i]].log()
    assert (expected != 0).sum() > 10
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("kind", "name"), cases())
def test_with_a_temperature(kind: str, name: str, temperature: float) -> None:
    """Against the logits that the loop itself drew from."""
    recording = Recording(temperature)
    tokens, schedule, steps, _ = drawn(kind, name, False, recording)
    found = SYSTEMS[kind].schedule_nats(NET, tokens, schedule, temperature)
    expected = torch.zeros_like(found)
    for step, logits in zip(steps, recording.seen, strict=True):
        if len(logits) != step.drawn.sum():
            logits = logits.view(*step.drawn.shape, V)[step.drawn]
        row, column = step.drawn.nonzero(as_tuple=True)
        table = (without_id(logits, MASK) / temperature).log_softmax(-1)
        expected[row, step.position[row, column]] = -table.gather(1, step.token[row, column][:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_the_pattern_in_flex_attention_and_by_labels() -> None:
    """Queries of one step see each other in one direction only; a copy is seen by nobody."""
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    from esolm.net.conditionals import _stepwise

    place = torch.arange(2, 7)[None]
    begin = torch.tensor([[2, 2, 2, 5, 5]])
    copies = torch.tensor([[False, True, False, False, False]])
    seen = _stepwise(place, begin, torch.ones_like(copies), 6, False, copies)
    z = seen.dense()[0, 0, :5, :5].int().tolist()
    assert z == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert seen.dense()[0, 0, :5, 5:].sum(1).tolist() == [2, 2, 2, 5, 5]
    assert not seen.dense()[0, 0, 5:, :5].any()
    q, k, v = torch.randn(3, 1, 1, 11, 8)
    flex = flex_attention(q, k, v, block_mask=seen.flex())
    torch.testing.assert_close(
        flex, scaled_dot_product_attention(q, k, v, attn_mask=seen.dense()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", SYSTEMS)
def test_the_gradient(kind: str) -> None:
    """Of a sum with weights of both signs, against finite differences of one weight."""
    tokens, schedule, _, _ = drawn(
        kind, "left to right" if kind == "ar" else "parallel" if kind != "mdlm" else "block", True
    )
    tokens = tokens.clamp_max(MASK)
    net = toy.network(V, toy.LENGTH + 1)
    weight = torch.randn(tokens.shape, dtype=torch.float64)

    def value() -> Tensor:
        return (SYSTEMS[kind].schedule_nats(net, tokens, schedule) * weight).sum()

    value().backward()
    parameter = net.blocks[0].attn_qkv.weight
    assert parameter.grad is not None
    with torch.no_grad():
        ends = []
        for change in (1e-5, -2e-5):
            parameter[3, 5] += change
            ends.append(value())
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-5, parameter.grad[3, 5], rtol=1e-5, atol=1e-7)


def test_merged_steps() -> None:
    sigma = torch.tensor([[3, 1, 0, 4, 2, 5], [0, 1, 2, 3, 4, 5]])
    schedule = Schedule(sigma, torch.tensor([[2, 1, 1, 1], [2, 2, 0, 0]]), torch.tensor([1, 1]), torch.tensor([4, 2]))
    assert schedule.begins().tolist() == [[0, 1, 1, 3, 4, 5], [0, 1, 1, 3, 3, 0]]
    assert schedule.merged(1).sizes.tolist() == [[5], [4]]
    assert schedule.merged(2).sizes.tolist() == [[3, 2], [2, 2]]
    assert schedule.merged(3).sizes.tolist() == [[3, 1, 1], [2, 2, 0]]
    assert schedule.merged(9).sizes.tolist() == schedule.sizes.tolist()


def test_what_has_no_such_likelihood() -> None:
    tokens, schedule, _, _ = drawn("B", "parallel", False)
    for name, options in (("bd3lm", {"block_size": 4}), ("esolm", {"variant": "A"}), ("udlm", {})):
        with pytest.raises(ValueError, match="likelihood"):
            toy.make(name, MASK, **options).schedule_nats(NET, tokens, schedule)
