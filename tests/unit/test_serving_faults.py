"""Faults of the engine: what goes wrong in one request, listener or errand stays there."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from esolm.model import LanguageModel
from esolm.sampling.options import SamplingOptions
from esolm.serving.engine import Engine, EngineOptions
from esolm.serving.request import CANCELLED, DONE, FAILED
from esolm.serving.scheduler import QueueFull, Stopping
from support import served

BAD = served.BAD


def row(prompt: bytes = b"ab", length: int = 16) -> list[int | None]:
    return [*prompt, *[None] * (length - len(prompt))]


def test_a_damaged_row_is_erased_also_when_its_request_was_cancelled():
    """The prompt is fed in chunks; the request ends before any of its logits was looked at."""
    lm = served.damaged()
    engine = Engine(lm, EngineOptions(max_batch=2, chunk=2))
    first = engine.generation(row(b"abcdefghijkl", 24), SamplingOptions(seed=1))
    bad = engine.generation(row(bytes([97, BAD, 98, 99, 100, 101, 102, 103, 104, 105])), SamplingOptions(seed=1))
    engine.submit(first, bad)
    engine.step()
    engine.step()
    lease = engine._leases[bad]
    assert any(t.isnan().any() for t in lease.cache.keys)
    engine.cancel(bad)
    later = engine.generation(row(b"cd"), SamplingOptions(seed=2))
    engine.submit(later)
    engine.step()
    assert not any(t.isnan().any() for t in (*engine.pool.memory.keys, *engine.pool.memory.values))
    engine.finish()
    assert [first.state, bad.state, later.state] == [DONE, CANCELLED, DONE]
    assert later.tokens == lm.sample(tokens=[row(b"cd")], seed=2).tokens[0]


def test_a_listener_that_fails_ends_its_own_request():
    lm = served.model()
    engine = Engine(lm)

    def broken(generation, new):
        raise RuntimeError("the event loop is closed")

    bad = engine.generation(row(), SamplingOptions(seed=1), listen=broken)
    good = engine.generation(row(), SamplingOptions(seed=2))
    engine.submit(bad, good)
    engine.finish()
    assert (bad.state, good.state) == (CANCELLED, DONE)
    assert good.tokens == lm.sample(tokens=[row()], seed=2).tokens[0]
    assert engine.pool.leases == []


@pytest.mark.parametrize("where", ["call", "loop"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no"), AssertionError()])
def test_a_loop_that_raises_ends_its_own_request(where, error, monkeypatch):
    whole = served.model()
    original = type(whole.system).sample

    def sample(system, net, request, schedule, rng):
        if request.options.seed != 1:
            return original(system, net, request, schedule, rng)
        if where == "call":
            raise error
        return looped()

    def looped():
        raise error
        yield

    monkeypatch.setattr(type(whole.system), "sample", sample)
    engine = Engine(whole)
    some = [engine.generation(row(), SamplingOptions(seed=seed)) for seed in range(3)]
    engine.submit(*some)
    engine.finish()
    assert [each.state for each in some] == [DONE, FAILED, DONE]
    assert some[1].error
    assert engine.pool.leases == []


def test_an_engine_whose_pass_fails_goes_on(monkeypatch):
    lm = served.model()
    with Engine(lm) as engine:
        run = engine.runner.run
        monkeypatch.setattr(engine.runner, "run", lambda pending: 1 // 0)
        bad = served.waited(engine, row(), SamplingOptions(seed=1))
        monkeypatch.setattr(engine.runner, "run", run)
        good = served.waited(engine, row(), SamplingOptions(seed=2))
    assert (bad.state, good.state) == (FAILED, DONE)
    assert good.tokens == lm.sample(tokens=[row()], seed=2).tokens[0]
    with pytest.raises(RuntimeError):
        engine.start()


def test_requests_are_served_while_an_errand_runs():
    """Scores may take long: between two parts the engine makes a pass."""
    lm = served.model()
    with Engine(lm) as engine:
        begun = threading.Event()
        some = [engine.generation(row(), SamplingOptions(seed=seed)) for seed in range(2)]

        def work(between):
            begun.set()
            passes = engine.passes
            end = time.monotonic() + 60
            while not all(each.ended for each in some) and time.monotonic() < end:
                between()
            return engine.passes - passes

        errand = engine.errand(work)
        assert begun.wait(30)
        engine.submit(*some)
        assert errand.found.result(60) > 10
    assert [each.state for each in some] == [DONE, DONE]


def test_errands_have_a_queue_and_end_with_the_engine():
    engine = Engine(served.model(), EngineOptions(max_queue=2))
    waiting = threading.Event()

    def long(between):
        waiting.set()
        while True:
            between()
            time.sleep(0.01)

    first = engine.errand(long)
    engine.errand(lambda between: 0)
    with pytest.raises(QueueFull):
        engine.errand(lambda between: 0)
    late = Engine(served.model())
    overdue = late.errand(lambda between: between(), seconds=-1.0)
    late.step()
    with pytest.raises(TimeoutError):
        overdue.found.result(0)
    engine.start()
    assert waiting.wait(30)
    assert not engine.stop(seconds=0.0)
    with pytest.raises(Stopping):
        first.found.result(0)


def test_what_is_accepted_while_the_engine_closes_is_served():
    """Submitted after the last look at the queue and before the close."""
    engine = Engine(served.model())
    request = engine.generation(row(), SamplingOptions())
    original = engine.scheduler.wait

    def late(seconds):
        if not engine.scheduler.closed:
            engine.submit(request)
            engine.scheduler.close()
        return original(seconds)

    engine.scheduler.wait = late
    engine.start()
    assert served.eventually(lambda: not engine.alive)
    assert request.state == DONE


def test_scores_of_damaged_weights_are_an_error_of_the_server():
    pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")
    httpx = pytest.importorskip("httpx", reason="needs httpx: pip install 'esolm[test]'")
    lm = served.damaged()
    with served.live(Engine(lm), timeout=60.0) as url:
        text = bytes([BAD, 97]).decode()
        bad = httpx.post(f"{url}/v1/score", json={"text": text}, timeout=60)
        assert bad.status_code == 500
        assert bad.json()["error"]["type"] == "server_error"
        good = httpx.post(f"{url}/v1/score", json={"text": "ab"}, timeout=60).json()
        assert good["data"][0]["log_prob"] == pytest.approx(lm.log_prob("ab").total.item())


def test_nan_in_one_row_of_a_shared_pass_reaches_no_other():
    """The same with the network's own failure: NaN weights for one token, three rows, chunks of any size."""
    lm: LanguageModel = served.damaged()
    for chunk in (1, 64):
        engine = Engine(lm, EngineOptions(max_batch=3, chunk=chunk))
        prompts = [b"abcdef", bytes([97, BAD, 98, 99, 100]), b"gh"]
        some = [engine.generation(row(p), SamplingOptions(seed=1)) for p in prompts]
        engine.submit(*some)
        engine.finish()
        assert [each.state for each in some] == [DONE, FAILED, DONE]
        assert "NaN" in str(some[1].error)
        for prompt, each in zip(prompts, some):
            if each.state == DONE:
                assert each.tokens == lm.sample(tokens=[row(prompt)], seed=1).tokens[0]
        assert torch.tensor([t.isnan().any() for t in engine.pool.memory.keys]).sum() == 0
