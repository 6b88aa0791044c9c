"""The engine: admission, cancellation, failures, limits, its thread."""

from __future__ import annotations

import threading
import time

import pytest

from esolm.core.order import Chain
from esolm.model import LanguageModel
from esolm.sampling.options import SamplingOptions
from esolm.serving.engine import Engine, EngineOptions
from esolm.serving.request import CANCELLED, DONE, FAILED, WAITING
from esolm.serving.scheduler import QueueFull, Stopping
from support import served, toy

BAD = served.BAD


def row(prompt: bytes = b"ab", length: int = 16) -> list[int | None]:
    return [*prompt, *[None] * (length - len(prompt))]


def test_a_full_pool_queues_and_everyone_is_served_in_turn():
    engine = Engine(served.model(), EngineOptions(max_batch=2))
    ended = []
    some = [
        engine.generation(row(), SamplingOptions(seed=i), listen=lambda g, new: ended.append(g) if g.ended else None)
        for i in range(7)
    ]
    engine.submit(*some)
    engine.step()
    assert [each.state for each in some[2:]] == [WAITING] * 5
    assert len(engine.pool.leases) == 2
    engine.finish()
    assert ended == some  # equal lengths: first come, first served
    assert engine.pool.leases == []
    assert engine.pool.slots_used == 0


def test_memory_limits_the_rows():
    lm = served.model()
    one = Engine(lm).pool.capacity * 2 * lm.net.config.layers * lm.net.config.width * 8
    assert Engine(lm, EngineOptions(kv_memory=3 * one)).pool.rows == 3
    with pytest.raises(ValueError):
        Engine(lm, EngineOptions(kv_memory=one - 1))
    with pytest.raises(ValueError):
        EngineOptions(max_batch=0)


def test_a_cancelled_request_frees_its_row_at_the_next_pass_and_leaves_the_others_as_they_are():
    lm = served.model()
    engine = Engine(lm, EngineOptions(max_batch=3, chunk=2))
    some = [engine.generation(row(b"abcdefgh"[: 2 * i + 2]), SamplingOptions(seed=i)) for i in range(4)]
    engine.submit(*some)
    engine.step()
    engine.cancel(some[0], some[3])  # one that runs, with others behind it in the pool, and one that waits
    engine.step()
    assert [each.state for each in some] == [CANCELLED, "running", "running", CANCELLED]
    assert len(engine.pool.leases) == 2
    engine.cancel(some[0])
    engine.finish()
    for i in (1, 2):
        assert some[i].tokens == lm.sample(tokens=[row(b"abcdefgh"[: 2 * i + 2])], seed=i).tokens[0]
    assert engine.pool.leases == []


def test_a_request_that_breaks_the_model_fails_alone():
    lm = served.damaged()
    engine = Engine(lm, EngineOptions(max_batch=3))
    prompts = [b"ab", bytes([BAD, 97]), b"cd", b"ef", b"gh"]
    some = [engine.generation(row(p), SamplingOptions(seed=1)) for p in prompts]
    engine.submit(*some)
    engine.finish()
    assert [each.state for each in some] == [DONE, FAILED, DONE, DONE, DONE]
    assert "NaN" in some[1].error
    for prompt, each in zip(prompts, some):
        if each.state == DONE:  # also those that got the row of the failed one
            assert each.tokens == lm.sample(tokens=[row(prompt)], seed=1).tokens[0]


def test_a_pass_that_raises_fails_the_request_that_caused_it():
    class Picky:
        """Refuses one token, as a kernel might."""

        def __init__(self, net):
            self.net, self.config, self.device, self.dtype = net, net.config, net.device, net.dtype
            self.new_cache = net.new_cache

        def __call__(self, tokens, *rest, **more):
            if (tokens == BAD).any():
                raise RuntimeError("no such kernel")
            return self.net(tokens, *rest, **more)

    whole = served.model()
    lm = LanguageModel(Picky(whole.net), whole.system, whole.tokenizer)
    engine = Engine(lm)
    some = [engine.generation(row(p), SamplingOptions(seed=9)) for p in (b"ab", bytes([BAD, 97]), b"cd")]
    engine.submit(*some)
    engine.finish()
    assert [each.state for each in some] == [DONE, FAILED, DONE]
    assert some[2].tokens == whole.sample(tokens=[row(b"cd")], seed=9).tokens[0]


def test_refusals():
    engine = Engine(served.model(), EngineOptions(max_batch=1, max_queue=2))
    for bad, options in [
        (row(length=served.LENGTH + 1), SamplingOptions()),
        (row(), SamplingOptions(sampler="speculative", window=1000)),
        (row(), SamplingOptions(sampler="nothing")),
        ([97, 98], SamplingOptions()),
        ([9999, None], SamplingOptions()),
    ]:
        with pytest.raises(ValueError):
            engine.generation(bad, options)
    some = [engine.generation(row(), SamplingOptions()) for _ in range(3)]
    with pytest.raises(QueueFull):
        engine.submit(*some)
    assert not engine.scheduler.queue  # all or none
    engine.scheduler.close()
    with pytest.raises(Stopping):
        engine.submit(some[0])
    with pytest.raises(Stopping):
        engine.errand(lambda between: 0)
    with pytest.raises(ValueError):
        Engine(served.model("esolm", **toy.FAMILIES["gpt2"]), EngineOptions(max_length=served.LENGTH + 1))


def test_a_time_limit():
    engine = Engine(served.model())
    late, other = engine.generation(row(), SamplingOptions(), seconds=0.0), engine.generation(row(), SamplingOptions())
    time.sleep(0.01)
    engine.submit(late, other)
    engine.finish()
    assert (late.state, other.state) == (FAILED, DONE)


def test_a_listener_sees_every_token_once_and_may_end_the_request():
    engine = Engine(served.model())
    seen = {}

    def listen(generation, new):
        for each in new:
            assert each.position not in seen
            seen[each.position] = each.token
        if len(seen) >= 5:
            generation.end(DONE)

    short = engine.generation(row(), SamplingOptions(seed=2), listen=listen)
    engine.submit(short)
    engine.finish()
    assert len(seen) == 5
    assert {i: short.tokens[i] for i in seen} == seen
    assert sum(token is None for token in short.tokens) == 16 - 2 - 5
    assert engine.pool.leases == []


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", served.SERVED)
def test_log_probabilities_are_those_of_the_tokens(name):
    """Greedy: the token is the likeliest, so its value is the first of the top ones. Chains have none."""
    lm = served.model(name)
    engine = Engine(lm)
    samplers = [s for s in lm.system.samplers if s not in ("order", "block")]
    only_b = ("speculative", "confidence", "threshold")
    samplers = [s for s in samplers if not (s in only_b and name == "esolm-A")]
    some = [engine.generation(row(), SamplingOptions(sampler=s, temperature=0.0), top_logprobs=2) for s in samplers]
    engine.submit(*some)
    engine.finish()
    for each in some:
        assert set(each.chosen) == set(range(2, 16))
        if isinstance(each.schedule, Chain):
            assert {chosen.logprob for chosen in each.chosen.values()} == {None}
            continue
        for chosen in each.chosen.values():
            assert chosen.token == chosen.top[0][0]
            assert chosen.logprob == chosen.top[0][1] < 0
            assert len(chosen.top) == 2
            assert chosen.top[0][1] >= chosen.top[1][1]


@pytest.mark.parametrize("cache", ["prefix", "dual", "delayed", "frozen"])
def test_approximate_caches_are_refused_by_name(cache):
    engine = Engine(served.model("mdlm"))
    with pytest.raises(ValueError, match=f"cache {cache}"):
        engine.generation(row(), SamplingOptions(sampler="threshold", cache=cache))
    engine.generation(row(), SamplingOptions(sampler="threshold", cache="none"))


def test_the_thread_serves_several_clients_and_stops_when_all_is_done():
    lm = served.model()
    with Engine(lm, EngineOptions(max_batch=3)) as engine:
        done = [threading.Event() for _ in range(8)]
        some = []
        for i, event in enumerate(done):
            time.sleep(0.002 * (i % 3))
            each = engine.generation(row(), SamplingOptions(seed=i), listen=lambda g, n, e=event: g.ended and e.set())
            some.append(each)
            engine.submit(each)
        assert all(event.wait(30) for event in done)
        assert engine.errand(lambda between: threading.current_thread().name).found.result(10) == "esolm-engine"
        with pytest.raises(ZeroDivisionError):
            engine.errand(lambda between: 1 // 0).found.result(10)
        last = engine.generation(row(), SamplingOptions(seed=99))
        engine.submit(last)
        assert engine.stop()
        assert last.state == DONE
    assert not engine.alive
    for i, each in enumerate(some):
        assert each.tokens == lm.sample(tokens=[row()], seed=i).tokens[0]


def test_stopping_ends_what_is_not_done_in_time():
    engine = Engine(served.model(), EngineOptions(max_batch=1))
    some = [engine.generation(row(length=24), SamplingOptions(seed=i)) for i in range(50)]
    engine.submit(*some)
    engine.start()
    assert not engine.stop(seconds=0.0)
    assert all(each.ended for each in some)
    assert some[-1].state == CANCELLED


def test_models_without_a_cache_use_no_pool():
    engine = Engine(served.model("mdlm"))
    some = [engine.generation(row(), SamplingOptions(seed=i)) for i in range(3)]
    engine.submit(*some)
    engine.finish()
    assert engine.pool.bytes_held == 0
    assert engine.runner.calls == engine.passes  # equal lengths share every call


def test_rows_of_different_widths_do_not_pad_each_other():
    """A prompt of 20 slots beside rows of 2: cheaper as two calls."""
    engine = Engine(served.model(), EngineOptions(chunk=64))
    some = [engine.generation(row(length=24), SamplingOptions(seed=i)) for i in range(6)]
    engine.submit(*some)
    engine.step()
    engine.step()
    before = engine.runner.calls, engine.runner.padding
    engine.submit(engine.generation(row(bytes(range(97, 117)), 24), SamplingOptions(seed=1)))
    engine.step()
    assert (engine.runner.calls, engine.runner.padding) == (before[0] + 2, before[1])
