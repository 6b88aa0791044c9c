"""Cached, batched, padded sampling equals the naive sampler, logit by logit, at every step of every row.

Tokens are drawn by the loop itself; then every step is computed again from scratch, one sequence at a time, without a
cache and in natural order, with the paper's attention bias. Every parameter of the network is random.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.sampling.request import Request
from support import engines, toy
from support.naive import Naive, Recording, plan_of, run

V = 6
MASK, BOS = V - 1, 2
NET = toy.network(V)
NETS = {
    "AdaLN": NET,
    "plain": toy.network(V, adaln=False, seed=1),
    # One position more than the longest text, for the start token of shifted queries.
    **{name: toy.network(V, toy.LENGTH + 1, seed=1, **shape) for name, shape in toy.FAMILIES.items() if shape},
}
BOTH = ("AdaLN", "llama")
"""The shapes that every sampler runs on: the paper's, and the one that most models are trained in."""
SYSTEMS: dict[str, Any] = {
    "B": toy.make("esolm", MASK, alpha_0=0.5),
    "any": toy.make("esolm", MASK, alpha_0=0.5, loss="any_order"),
    "A": toy.make("esolm", MASK, alpha_0=0.5, variant="A"),
    "B-shift": toy.make("esolm", MASK, alpha_0=0.5, query="shift", first="bos", bos_id=BOS),
    "any-shift": toy.make("esolm", MASK, alpha_0=0.5, loss="any_order", query="shift", first="bos", bos_id=BOS),
    "A-shift": toy.make("esolm", MASK, alpha_0=0.5, variant="A", query="shift", first="bos", bos_id=BOS),
    "mdlm": toy.make("mdlm", MASK),
    "ar": toy.make("ar", MASK),
    "bd3lm1": toy.make("bd3lm", MASK, block_size=1),
    "bd3lm3": toy.make("bd3lm", MASK, block_size=3),
    "bd3lm4": toy.make("bd3lm", MASK, block_size=4),
}
"""By the kind of the naive sampler."""
ESO = [kind for kind in SYSTEMS if kind.split("-")[0] in ("B", "any", "A")]


def request_of(rows: list[list[bool]], block: int = 1, seed: int = 0, **options: Any) -> Request:
    """A request of rows that say what is given; whatever else stands in x is random and must not matter."""
    longest = -(-max(map(len, rows)) // block) * block
    known = torch.tensor([row + [False] * (longest - len(row)) for row in rows])
    valid = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    return toy.request(toy.text(len(rows), longest, V, seed), known, valid, **options)


@st.composite
def requests(draw: st.DrawFn, kind: str) -> Request:
    """Any sampler with any options, ragged lengths, any given positions (for AR, any prompt)."""
    batch, most = draw(st.integers(1, 4)), 8
    even = draw(st.booleans())
    lengths = [draw(st.integers(1, most))] * batch if even else [draw(st.integers(1, most)) for _ in range(batch)]
    sparse = draw(st.sampled_from([0.0, 0.3, 0.7]))
    rows = []
    for b in range(batch):
        if kind == "ar":
            prompt = draw(st.integers(0, lengths[b]))
            rows.append([i < prompt for i in range(lengths[b])])
        else:
            coin = draw(st.lists(st.floats(0, 1), min_size=lengths[b], max_size=lengths[b]))
            rows.append([c < sparse for c in coin])
    if even:  # the same number given in every row, and perhaps the same steps
        rows = [rows[0]] * batch
    block = int(kind[5:]) if kind.startswith("bd3lm") else 1
    length = -(-max(lengths) // block) * block
    options: dict[str, Any] = {"given_order": draw(st.sampled_from(["ascending", *["random"] * (kind != "ar")]))}
    samplers = {
        "ar": ["left_to_right"],
        "mdlm": ["ancestral", "first_hitting", "block", "order"],
    }.get(kind, ["ancestral", "first_hitting", "block", "order", "left_to_right"])
    if block > 1 or kind == "bd3lm1":
        samplers = ["ancestral", "first_hitting"]
    options["sampler"] = draw(st.sampled_from(samplers))
    if options["sampler"] == "ancestral":
        least = length // block if kind.startswith("bd3lm") else 1
        options["num_steps"] = draw(st.none() | st.integers(least, 3 * length))
    if options["sampler"] in ("ancestral", "first_hitting") and kind in ESO:
        options["alpha_0"] = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    if options["sampler"] == "block":
        options["parallelism"] = draw(st.integers(1, length))
    if options["sampler"] == "order":
        orders = 1 if draw(st.booleans()) else batch
        options["order"] = torch.tensor([draw(st.permutations(range(length))) for _ in range(orders)])
    return request_of(rows, block, draw(st.integers(0, 99)), **options)


def spread(logits: Tensor, drawn: Tensor) -> list[Tensor]:
    """The logits of the drawn positions of each row; some loops also compute fill."""
    if len(logits) != drawn.sum():
        logits = logits.view(*drawn.shape, V)[drawn]
    return list(logits.split(drawn.sum(1).tolist()))


def check(kind: str, net: Any, request: Request, rng: Randomness, close: dict[str, float], twin: Any = None) -> Tensor:
    """Every logit of every step equals the naive sampler's; returns the tokens. twin: the network of the latter."""
    system, naive = SYSTEMS[kind], Naive(twin or net, kind, MASK, BOS)
    recording = Recording()
    tokens, schedule, steps = run(system, net, replace(request, draw=recording), rng)
    fixed = request.given & request.valid
    plans = [plan_of(schedule, b) for b in range(len(tokens))]
    known: list[dict[int, int]] = [{i: int(request.x[b, i]) for i in plan.given} for b, plan in enumerate(plans)]
    done = [0] * len(plans)
    for b, plan in enumerate(plans):
        assert set(plan.given) == set(fixed[b].nonzero()[:, 0].tolist())
        assert sorted(plan.sigma) == list(range(int(request.valid[b].sum())))
    seen = [logits for logits in recording.seen if len(logits)]
    steps = [step for step in steps if step.drawn.any()]
    assert len(seen) == len(steps)
    for logits, step in zip(seen, steps):
        for b, found in enumerate(spread(logits, step.drawn)):
            if not len(found):
                continue
            at, drawn = step.position[b][step.drawn[b]].tolist(), step.token[b][step.drawn[b]].tolist()
            expected = naive.logits(plans[b], done[b], known[b])
            assert sorted(at) == sorted(plans[b].steps[done[b]])
            rows = [plans[b].steps[done[b]].index(i) for i in at]
            torch.testing.assert_close(found.double(), expected[rows], **close)
            known[b].update(zip(at, drawn))
            done[b] += 1
    assert done == [len(plan.steps) for plan in plans]
    assert done == schedule.nfe.tolist()
    assert torch.equal(tokens[fixed], request.x[fixed])
    for b, tokens_of in enumerate(known):
        assert [tokens_of[i] for i in range(len(tokens_of))] == tokens[b, : len(tokens_of)].tolist()
    assert not (tokens[request.valid] == MASK).any()
    return tokens


EXACT = {"rtol": 1e-10, "atol": 1e-10}


def alone(kind: str, request: Request, row: int) -> Request:
    """One row without its padding (for BD3-LM, without the blocks that are all padding)."""
    block = int(kind[5:]) if kind.startswith("bd3lm") else 1
    own = int(request.valid[row].sum())
    length = -(-own // block) * block
    here = slice(row, row + 1)
    cut = {name: getattr(request, name)[here, :length] for name in ("x", "given", "valid")}
    if request.order is not None:
        sigma = request.order.expand(len(request.x), -1)[row]
        cut["order"] = sigma[sigma < length][None]
    return replace(request, **cut)


def same_alone(kind: str, net: Any, request: Request, rng: Randomness, tokens: Tensor) -> None:
    """Batched equals single and padded equals unpadded: token by token, with the schedule of the row."""
    schedule = SYSTEMS[kind].plan(request, rng)
    for b in range(len(tokens)):
        single = alone(kind, request, b)
        own = replace(rng, first=rng.first + b)
        found, plan, _ = run(SYSTEMS[kind], net, single, own)
        assert plan_of(plan, 0) == plan_of(schedule, b)
        length = int(single.valid.sum())
        assert found[0, :length].tolist() == tokens[b, :length].tolist()


def both(kind: str, net: Any, request: Request, seed: int) -> None:
    rng = Randomness(seed, first=3, total=9)
    tokens = check(kind, net, request, rng, EXACT)
    same_alone(kind, net, request, rng, tokens)
    # whatever stands where nothing is given
    other = torch.where(request.given & request.valid, request.x, (request.x + 1) % MASK)
    assert torch.equal(run(SYSTEMS[kind], net, replace(request, x=other), rng)[0], tokens)


@pytest.mark.parametrize("kind", ["B", "B-shift"])
@settings(max_examples=30)
@given(st.data(), st.sampled_from(sorted(NETS)))
def test_esolm_b(kind: str, data: st.DataObject, name: str) -> None:
    both(kind, NETS[name], data.draw(requests(kind)), data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", ["any", "any-shift"])
@settings(max_examples=12)
@given(st.data())
def test_esolm_with_masks_hidden_from_each_other(kind: str, name: str, data: st.DataObject) -> None:
    both(kind, NETS[name], data.draw(requests(kind)), data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", ["A", "A-shift"])
@settings(max_examples=12)
@given(st.data())
def test_esolm_a_in_both_phases(kind: str, name: str, data: st.DataObject) -> None:
    both(kind, NETS[name], data.draw(requests(kind)), data.draw(st.integers(0, 99)))


@settings(max_examples=15)
@given(st.data(), st.sampled_from(sorted(NETS)))
def test_ar(data: st.DataObject, name: str) -> None:
    both("ar", NETS[name], data.draw(requests("ar")), data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("name", BOTH)
@settings(max_examples=10)
@given(st.data())
def test_mdlm(name: str, data: st.DataObject) -> None:
    both("mdlm", NETS[name], data.draw(requests("mdlm")), data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", ["bd3lm1", "bd3lm3", "bd3lm4"])
@settings(max_examples=6)
@given(st.data())
def test_bd3lm_across_blocks(kind: str, name: str, data: st.DataObject) -> None:
    both(kind, NETS[name], data.draw(requests(kind)), data.draw(st.integers(0, 99)))


T, F = True, False
RAGGED = [[T, F, F, T, F, F, F], [F, F], [T, T, T, T], [F, T, F, F, F]]
"""Lengths 7, 2, 4 and 5 with 2, 0, 4 and 1 given tokens; the third row has nothing left to draw."""


@pytest.mark.matrix(7)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("given_order", ["random", "ascending"])
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "ancestral", "num_steps": 2, "alpha_0": 1.0},
        {"sampler": "ancestral", "num_steps": 3, "alpha_0": 0.5},
        {"sampler": "first_hitting", "alpha_0": 0.5},
        {"sampler": "block", "parallelism": 3},
        {"sampler": "left_to_right"},
        {"sampler": "order", "order": toy.permutations(4, 7)},
    ],
    ids=lambda o: "-".join(str(v) for k, v in o.items() if k != "order"),
)
@pytest.mark.parametrize("kind", ESO)
def test_ragged_rows_with_every_sampler(kind: str, options: dict[str, Any], given_order: str, name: str) -> None:
    both(kind, NETS[name], request_of(RAGGED, given_order=given_order, **options), seed=5)


@pytest.mark.parametrize("num_steps", [None, 4, 9, 30])
@pytest.mark.parametrize(
    "rows",
    [
        [[F] * 3 + [T] * 3 + [F] * 3] * 2,  # a block that is given in every row
        [[T] * 6 + [F] * 3] * 2,  # two of them at the beginning
        [[F] * 3 + [T] * 6] * 2,  # two of them at the end
        [[F] * 3 + [T] * 3 + [F] * 3, [F] * 9],  # in one row only
        [[F] * 8, [T] * 3 + [F], [F] * 2],  # padding in the last block, and blocks of padding
        [[T] * 7, [F, T] * 3],
    ],
)
def test_bd3lm_with_given_blocks_and_padding(rows: list[list[bool]], num_steps: int | None) -> None:
    both("bd3lm3", NET, request_of(rows, 3, num_steps=num_steps), seed=2)


def test_ar_with_ragged_prompts_and_lengths() -> None:
    both("ar", NET, request_of([[F] * 8, [T, T] + [F] * 3, [T] * 4, [T] * 5 + [F], [F]]), seed=1)


def test_ar_begins_with_the_token_it_was_trained_with() -> None:
    """first = bos: another token before the first one, and another sample."""
    request = request_of([[F] * 8] * 4)
    bos = toy.make("ar", MASK, first="bos", bos_id=0)
    rng = Randomness(0)
    found = run(bos, NET, request, rng)[0]
    tokens = toy.text(1, 8, V).tolist()[0]
    nats = bos.terms(NET, Batch(torch.tensor([tokens])), rng, False)[0].nats
    recording = Recording()
    run(bos, NET, replace(request_of([[T] * 7 + [F]]), x=torch.tensor([tokens]), draw=recording), rng)
    real = recording.seen[0][0, :MASK]
    assert (real.logsumexp(0) - real[tokens[-1]]).item() == pytest.approx(nats[0, -1].item(), abs=1e-10)
    assert not torch.equal(found, run(SYSTEMS["ar"], NET, request, rng)[0])


@pytest.mark.matrix(5)
@pytest.mark.parametrize("shape", ["paper", "llama"])
@pytest.mark.parametrize("engine", [None, *engines.ENGINES])
@pytest.mark.parametrize("kind", SYSTEMS)
def test_float32(kind: str, engine: str | None, shape: str) -> None:
    """Logits of up to 3 to 2e-5 (absolute), from the float64 twin of the same network; measured 2e-6."""
    single: Any = toy.network(V, dtype=torch.float32, **toy.SHAPES[shape])
    single = single if engine is None else engines.on(engine, single)
    twin = toy.network(V, dtype=torch.float32, **toy.SHAPES[shape]).double()
    block = int(kind[5:]) if kind.startswith("bd3lm") else 1
    rows = [[F] * 8, [T, T, F, F, F, F], [T] + [F] * 4] if kind == "ar" else [*RAGGED, [F, T, F, F, F, T, F, F]]
    check(kind, single, request_of(rows, block), Randomness(1), {"rtol": 0, "atol": 2e-5}, twin)


@pytest.mark.parametrize("kind", SYSTEMS)
def test_another_seed_or_row_gives_another_sample(kind: str) -> None:
    block = int(kind[5:]) if kind.startswith("bd3lm") else 1
    request = request_of([[F] * 8] * 6, block)
    found = run(SYSTEMS[kind], NET, request, Randomness(0))[0]
    assert len(set(map(tuple, found.tolist()))) == 6
    assert not (found == run(SYSTEMS[kind], NET, request, Randomness(1))[0]).all(1).any()
    assert torch.equal(found[2:5], run(SYSTEMS[kind], NET, alone_rows(request, 2, 5), Randomness(0, 2))[0])


def alone_rows(request: Request, first: int, last: int) -> Request:
    rows = slice(first, last)
    return replace(request, x=request.x[rows], given=request.given[rows], valid=request.valid[rows])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SYSTEMS)
@settings(max_examples=150)
@given(st.data(), st.sampled_from(sorted(NETS)))
def test_many_more_requests(kind: str, data: st.DataObject, name: str) -> None:
    both(kind, NETS[name], data.draw(requests(kind)), data.draw(st.integers(0, 99)))
