"""The engine gives what the library gives, whatever else is in the batch."""

from __future__ import annotations

import random

import pytest

from esolm.sampling.options import SamplingOptions
from esolm.serving.engine import Engine, EngineOptions
from esolm.serving.request import DONE
from support import served


def requests(lm, seed, number):
    """Random requests; a variant A model has no speculative sampler."""
    rng, found = random.Random(seed), []
    while len(found) < number:
        row = served.random_row(lm, rng)
        options = served.random_options(lm, rng, len(row))
        try:
            lm.stream(tokens=[row], **vars(options))
        except ValueError:
            continue
        found.append((row, options))
    return found


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", served.SERVED)
@pytest.mark.parametrize("chunk", [3, 64])
def test_mixed_requests_at_random_times_equal_the_library(name, chunk):
    lm = served.model(name)
    rng = random.Random(1)
    engine = Engine(lm, EngineOptions(max_batch=5, chunk=chunk))
    wanted = requests(lm, 2, 24)
    waiting = [engine.generation(row, options) for row, options in wanted]
    served_, rest = list(waiting), list(waiting)
    while rest or engine.scheduler.live or engine.scheduler.queue:
        for _ in range(rng.choice([0, 0, 1, 1, 2, 7])):
            if rest:
                engine.submit(rest.pop(0))
        engine.step()
    for (row, options), found in zip(wanted, served_, strict=True):
        assert found.state == DONE, found.error
        assert (found.text(), found.tokens) == served.alone(lm, row, options), options
    assert engine.pool.leases == []
    assert not engine._pending
    assert not engine._leases


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_other_families(family):
    from support import toy

    lm = served.model("esolm", **toy.FAMILIES[family])
    engine = Engine(lm, EngineOptions(max_batch=4, chunk=5))
    wanted = requests(lm, 3, 8)
    found = [engine.generation(row, options) for row, options in wanted]
    engine.submit(*found)
    engine.finish()
    for (row, options), each in zip(wanted, found, strict=True):
        assert each.tokens == served.alone(lm, row, options)[1]


def test_samples_of_one_request_are_those_of_the_library():
    lm = served.model()
    engine = Engine(lm)
    row = [97, 98, 99, *[None] * 13]
    options = SamplingOptions(seed=5, top_p=0.9)
    some = [engine.generation(row, options, i, 4) for i in range(4)]
    engine.submit(*some)
    engine.finish()
    assert [each.text() for each in some] == lm.sample("abc", 4, 16, seed=5, top_p=0.9).texts


@pytest.mark.parametrize(
    ("name", "saved"), [("esolm", 32), ("any_order", 32), ("shift", 35), ("bd3lm", 32), ("ar", 32), ("esolm-A", 0)]
)
@pytest.mark.parametrize("chunk", [3, 64])
def test_equal_prompts_are_computed_once(name, saved, chunk):
    """Three rows copy 8 or 12 slots, and the start token; in variant A the tokens of a prompt see each other."""
    lm = served.model(name)
    engine = Engine(lm, EngineOptions(max_batch=6, chunk=chunk))
    prompt = list(b"abcdefghijkl")
    rows = [[*prompt, *[None] * 4], [*prompt[:8], *[None] * 8], [*prompt, *[None] * 8], [*prompt, *[None] * 4]]
    options = [SamplingOptions(seed=seed) for seed in (1, 1, 2, 3)]
    some = [engine.generation(row, o) for row, o in zip(rows, options)]
    engine.submit(*some[:2])
    engine.step()
    engine.submit(*some[2:])
    engine.finish()
    for row, o, each in zip(rows, options, some):
        assert each.tokens == served.alone(lm, row, o)[1]
    assert engine.runner.reused == saved
    assert engine.runner.firsts == {}
