"""Samplers that choose by confidence, and their caches, against naive implementations of their descriptions.

Logits of every candidate in every pass to 1e-10 in float64, the same choices, the same number of fed positions. Every
parameter of the networks is random, so that what is out of date matters.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esolm.core.draw import Draw
from esolm.core.randomness import Randomness
from esolm.sampling.request import Request, Step
from support import engines, paper, stale, toy
from support.counting import ask
from support.naive import Recording, run
from support.stale import Sample, sample_of

V = 7
MASK, BOS = V - 1, 1
LENGTH = 9
NETS = {name: toy.network(V, LENGTH, **toy.SHAPES[name]) for name in ("paper", "llama", "gpt2")}
MDLM = toy.make("mdlm", MASK)
RAGGED = [[0] * 9, [1, 0] * 4, [0] * 2, [1] * 4, [0, *[1] * 4, *[0] * 4]]
"""Rows from scratch, infills, one with nothing to draw, and one with a whole block of given tokens between others."""
FEW = [[0] * 6, [0, 1] * 3, [1] * 3, [1, 0, 0, 1]]

CACHES: dict[str, tuple[dict[str, Any], Callable[[Sample], None]]] = {
    "none": ({}, stale.uncached),
    "none by name": ({"cache": "none"}, stale.uncached),
    "prefix": ({"cache": "prefix"}, lambda s: stale.fast_dllm(s, dual=False)),
    "prefix, 2": ({"cache": "prefix", "refresh": 2}, lambda s: stale.fast_dllm(s, False, 2)),
    "dual": ({"cache": "dual"}, lambda s: stale.fast_dllm(s, dual=True)),
    "dual, 3": ({"cache": "dual", "refresh": 3}, lambda s: stale.fast_dllm(s, True, 3)),
    "delayed": ({"cache": "delayed"}, stale.dkv_decode),
    "delayed, 3": ({"cache": "delayed", "refresh": 3}, lambda s: stale.dkv_decode(s, 3)),
    "frozen": ({"cache": "frozen"}, stale.freecache),
    "frozen, 4": ({"cache": "frozen", "refresh": 4}, lambda s: stale.freecache(s, 4)),
    "frozen, authors": (
        {"cache": "frozen", "freeze": "last_pass"},
        lambda s: stale.freecache(s, authors=True),
    ),
}
RULES: dict[str, dict[str, Any]] = {
    "one by one": {"sampler": "confidence"},
    "five steps, blocks": {"sampler": "confidence", "num_steps": 5, "block_length": 3},
    "entropy": {"sampler": "confidence", "num_steps": 7, "block_length": 5, "confidence": "entropy"},
    "threshold": {"sampler": "threshold", "tau": 0.6, "block_length": 4},
    "margin": {"sampler": "threshold", "tau": 0.4, "block_length": 3, "confidence": "margin"},
    "default tau": {"sampler": "threshold"},
}


def seen_by_row(steps: list[Step], logits: list[torch.Tensor], row: int) -> list[dict[int, torch.Tensor]]:
    """The logits of a row's candidates by position, in each of its passes."""
    found = []
    for step, values in zip(steps, logits, strict=True):
        assert step.candidates is not None
        asked = step.candidates.asked
        first = int(asked[:row].sum())
        positions = step.candidates.position[row][asked[row]].tolist()
        if positions:
            found.append({i: values[first + j] for j, i in enumerate(positions)})
    return found


def check(net: Any, request: Request, naive: Callable[[Sample], None], twin: Any = None, atol: float = 1e-10) -> None:
    """Every row of a batch against its own naive sample."""
    recording = Recording(request.draw.temperature, request.draw.top_p, request.draw.top_k)
    rng = Randomness(3, first=2, total=20)
    tokens, schedule, steps = run(MDLM, net, toy.changed(request, draw=recording), rng)
    for row in range(len(tokens)):
        if not int(schedule.sizes[row].sum()):
            continue
        counts = schedule.sizes[row].tolist() if request.options.sampler == "confidence" else None
        s = sample_of(twin or net, request, row, rng, MASK, counts)
        naive(s)
        mine = seen_by_row(steps, recording.seen, row)
        assert len(mine) == len(s.logits)
        for ours, theirs in zip(mine, s.logits, strict=True):
            assert ours.keys() == theirs.keys()
            for i in ours:
                torch.testing.assert_close(ours[i], theirs[i], rtol=0, atol=atol, check_dtype=False)
        assert [step.position[row][step.drawn[row]].tolist() for step in steps if step.drawn[row].any()] == s.steps
        assert [
            int(step.candidates.fed[row]) for step in steps if step.candidates and step.candidates.fed[row]
        ] == s.fed
        assert tokens[row, : len(s.tokens)].tolist() == s.tokens


@pytest.mark.parametrize("rule", ["five steps, blocks", "threshold", "margin"])
@pytest.mark.parametrize("cache", CACHES)
def test_each_cache_is_its_description(cache: str, rule: str) -> None:
    options, naive = CACHES[cache]
    how = Draw(0.0) if rule == "five steps, blocks" else Draw()
    check(NETS["paper"], ask(RAGGED, draw=how, **RULES[rule], **options), naive)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "delayed", "frozen", "frozen, authors"])
def test_other_networks(cache: str, name: str) -> None:
    options, naive = CACHES[cache]
    check(NETS[name], ask(RAGGED[1:2] + RAGGED[4:], **RULES["threshold"], **options), naive)


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("cache", ["prefix", "dual", "delayed", "frozen"])
def test_engines(cache: str, engine: str) -> None:
    """float32 to 2e-5, as in test_sampling_exact.py, from the float64 twin."""
    options, naive = CACHES[cache]
    single = toy.network(V, LENGTH, torch.float32)
    twin = toy.network(V, LENGTH, torch.float32).double()
    request = ask(RAGGED, draw=Draw(0.0), **RULES["five steps, blocks"], **options)
    check(engines.on(engine, single), request, naive, twin, atol=2e-5)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(1, 3))
    rows = [draw(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=LENGTH)) for _ in range(batch)]
    options = dict(draw(st.sampled_from(list(RULES.values()))))
    if "num_steps" not in options:
        options["block_length"] = draw(st.none() | st.integers(1, LENGTH))
    return {
        "rows": rows,
        **options,
        "draw": Draw(draw(st.sampled_from([0.0, 0.7, 1.0])), draw(st.sampled_from([0.8, 1.0]))),
    }


@settings(max_examples=12)
@given(st.data(), st.sampled_from(sorted(CACHES)))
def test_random_requests(data: st.DataObject, cache: str) -> None:
    options, naive = CACHES[cache]
    check(NETS["paper"], ask(**data.draw(requests()), **options), naive)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@settings(max_examples=30)
@given(st.data())
def test_many_more_requests(cache: str, data: st.DataObject) -> None:
    options, naive = CACHES[cache]
    check(NETS["paper"], ask(**data.draw(requests()), **options), naive)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cache", ["prefix", "dual", "delayed", "frozen"])
@pytest.mark.parametrize("name", NETS)
def test_a_refresh_at_every_step_is_the_uncached_sampler(name: str, cache: str, rule: str) -> None:
    one, two = Recording(), Recording()
    plain, _, steps = run(MDLM, NETS[name], ask(RAGGED, draw=one, **RULES[rule]), Randomness(5))
    request = ask(RAGGED, draw=two, cache=cache, refresh=1, **RULES[rule])
    cached, _, again = run(MDLM, NETS[name], request, Randomness(5))
    assert torch.equal(plain, cached)
    assert len(steps) == len(again)
    for a, b in zip(one.seen, two.seen, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    for a, b in zip(steps, again, strict=True):
        assert a.candidates is not None
        assert b.candidates is not None
        assert torch.equal(a.candidates.fed, b.candidates.fed)
        assert torch.equal(a.position, b.position)


@pytest.mark.parametrize("cache", ["prefix", "dual", "delayed", "frozen"])
def test_without_a_refresh_the_caches_do_differ(cache: str) -> None:
    """Otherwise the tests above would show nothing."""
    one, two = Recording(0.0), Recording(0.0)
    rule = {"sampler": "confidence", "block_length": 4}
    run(MDLM, NETS["paper"], ask([[1, *[0] * 8]], draw=one, **rule), Randomness(5))
    run(MDLM, NETS["paper"], ask([[1, *[0] * 8]], draw=two, cache=cache, **rule), Randomness(5))
    far = [float((a - b).abs().max()) for a, b in zip(one.seen, two.seen, strict=True) if a.shape == b.shape]
    assert max(far) > 1e-3


def test_the_authors_freeze_the_last_tokens_as_masks() -> None:
    """The keys and values that stay in the cache differ between the two ways to freeze, from the second block on."""
    found = []
    for freeze in ("next_pass", "last_pass"):
        recording = Recording(0.0)
        request = ask(
            [[1, *[0] * 8]], draw=recording, sampler="confidence", num_steps=2, block_length=4, cache="frozen"
        )
        run(MDLM, NETS["paper"], toy.changed(request, freeze=freeze), Randomness(5))
        found.append(recording.seen)
    torch.testing.assert_close(found[0][0], found[1][0])
    assert float((found[0][1] - found[1][1]).abs().max()) > 1e-3


SOME = {"cache": "dual", "sampler": "threshold", "tau": 0.5, "block_length": 4}


@pytest.mark.parametrize("options", [{"sampler": "confidence", "num_steps": 5}, SOME, {**SOME, "cache": "delayed"}])
def test_a_sample_does_not_depend_on_its_batch(options: dict[str, Any]) -> None:
    request = ask(RAGGED, **options)
    together, _, _ = run(MDLM, NETS["paper"], request, Randomness(9))
    for row in range(len(RAGGED)):
        rows = {name: getattr(request, name)[row : row + 1] for name in ("x", "given", "valid")}
        tokens, _, _ = run(MDLM, NETS["paper"], toy.changed(request, **rows), Randomness(9, row))
        assert torch.equal(tokens[0], together[row])
    other = torch.where(request.given & request.valid, request.x, (request.x + 1) % MASK)
    assert torch.equal(run(MDLM, NETS["paper"], toy.changed(request, x=other), Randomness(9))[0], together)


class Dynamic(Sample):
    """Eso-LM in the order of confidence: every candidate by a pass of its own over the tokens before it."""

    start: int | None = None

    def order(self, given_order: list[int], window: int | None) -> None:
        sigma, everything = list(given_order), range(len(self.tokens))
        clean = 0
        while (left := self.open(everything)) and (candidates := left[:window]):
            logits = {i: self.alone(sigma, i) for i in candidates}
            self.fed.append(len(sigma) - clean + len(candidates))
            clean = len(sigma)
            inside = range(candidates[-1] + 1)
            self.commit(logits, inside)
            sigma += self.steps[-1]

    def alone(self, sigma: list[int], at: int) -> torch.Tensor:
        known = {i: self.tokens[i] for i in sigma}
        if self.start is not None:
            return paper.shifted_logits(self.net, known, sigma, [at], self.mask, self.start)[0]
        tokens = [*known.values(), self.mask]
        return paper.logits(self.net, tokens, [*sigma, at], paper.left_to_right(len(tokens)))[-1]


ESO: dict[str, Any] = {
    "mask": toy.make("esolm", MASK, alpha_0=0.5),
    "any_order": toy.make("esolm", MASK, alpha_0=0.5, loss="any_order"),
    "shift": toy.make("esolm", MASK, alpha_0=0.5, query="shift", first="bos", bos_id=BOS),
    "shift, mask": toy.make("esolm", MASK, alpha_0=0.5, query="shift"),
    "any_order, shift": toy.make("esolm", MASK, loss="any_order", query="shift", first="bos", bos_id=BOS),
}
ORDERS: dict[str, dict[str, Any]] = {
    "threshold": {"sampler": "threshold", "tau": 0.5, "window": 4},
    "all masks": {"sampler": "threshold", "tau": 0.6, "confidence": "margin"},
    "window of one": {"sampler": "threshold", "window": 1},
    "everything": {"sampler": "threshold", "tau": 0.0},
    "confidence": {"sampler": "confidence", "num_steps": 4, "window": 5, "confidence": "entropy"},
    "one by one": {"sampler": "confidence", "given_order": "random"},
}


def check_dynamic(net: Any, system: Any, request: Request, twin: Any = None, atol: float = 1e-10) -> None:
    recording = Recording(request.draw.temperature, request.draw.top_p)
    rng = Randomness(3, first=2, total=20)
    tokens, schedule, steps = run(system, net, toy.changed(request, draw=recording), rng)
    for row in range(len(tokens)):
        if not int(schedule.sizes[row].sum()):
            continue
        counts = schedule.sizes[row].tolist() if request.options.sampler == "confidence" else None
        s = Dynamic(**vars(sample_of(twin or net, request, row, rng, MASK, counts)))
        s.start = system.start_id if system.shift else None
        given_order = schedule.sigma[row, : int(schedule.given[row])].tolist()
        s.order(given_order, request.options.window)
        mine = seen_by_row(steps, recording.seen, row)
        shift = int(system.shift)
        for ours, theirs in zip(mine, s.logits, strict=True):
            assert [i - shift for i in ours] == list(theirs)
            for i in ours:
                torch.testing.assert_close(ours[i], theirs[i - shift], rtol=0, atol=atol, check_dtype=False)
        assert [step.position[row][step.drawn[row]].tolist() for step in steps if step.drawn[row].any()] == s.steps
        assert tokens[row, : len(s.tokens)].tolist() == s.tokens
        fed = [int(step.candidates.fed[row]) for step in steps if step.candidates and step.candidates.fed[row]]
        assert [n - shift * (k == 0) for k, n in enumerate(fed)] == s.fed


@pytest.mark.matrix(7)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("system", ESO)
@pytest.mark.parametrize("name", NETS)
def test_eso_lm_in_the_order_of_confidence_is_exact(name: str, system: str, order: str) -> None:
    """Cached = recomputed from scratch: every logit, choice, token, and the number of fed positions."""
    check_dynamic(NETS[name], ESO[system], ask(FEW, draw=Draw(0.8, 0.95), **ORDERS[order]))


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("system", ["mask", "shift"])
def test_eso_lm_on_engines(system: str, engine: str) -> None:
    single = toy.network(V, LENGTH, torch.float32)
    twin = toy.network(V, LENGTH, torch.float32).double()
    request = ask(FEW, draw=Draw(0.0), **ORDERS["threshold"])
    check_dynamic(engines.on(engine, single), ESO[system], request, twin, atol=2e-5)


def test_eso_lm_does_not_depend_on_the_batch() -> None:
    request = ask(RAGGED, **ORDERS["threshold"])
    together, _, _ = run(ESO["shift"], NETS["paper"], request, Randomness(9))
    for row in range(len(RAGGED)):
        rows = {name: getattr(request, name)[row : row + 1] for name in ("x", "given", "valid")}
        tokens, _, _ = run(ESO["shift"], NETS["paper"], toy.changed(request, **rows), Randomness(9, row))
        assert torch.equal(tokens[0], together[row])
