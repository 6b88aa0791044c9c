"""Serving: continuous batching against static batches and one request at a time, and the overhead of the server.

Shapes: B batch.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tokenizers
import torch
from tokenizers import models

from ..data.tokenizer import Tokenizer
from ..model import LanguageModel, Row, load
from ..net.native.engine import fold_for
from ..sampling.options import SamplingOptions
from ..serving.engine import Engine
from ..serving.options import EngineOptions, ServerOptions
from ..systems import find
from .latency import cached_step, network
from .report import named, table
from .timing import interleaved, ratio, summary

METHOD = (
    "Every round draws Poisson arrivals and requests with random prompts, and serves the same ones by each method in "
    "turn. A load of 1 is as many requests a second as one at a time can serve: the inverse of the median time of a "
    "request alone. A static batch takes the requests that wait, at most `batch`, and returns when all of it is done. "
    "Throughput is generated tokens over the time from the first arrival to the last answer. Latency and time to first "
    "token count from the arrival; their percentiles are over the requests of all rounds. These run without HTTP. "
    "The overhead compares whole batches of `batch` samples of equal length, timed in turn: by lm.sample, by the "
    "engine, and by the server, to which as many clients send their requests at the same time."
)
ONE, STATIC, CONTINUOUS = "one at a time", "static batches", "continuous batching"
SAMPLE, ENGINE, SERVER = "lm.sample", "engine", "server, over HTTP"
COLUMNS = {
    "method": "name", "load": "load", "tokens/s": "tokens_per_second", "× one at a time": "over_one",
    "quartiles": "quartiles", "first token, p50 s": "first_p50", "p99 s": "first_p99", "latency, p50 s": "p50",
    " p99 s": "p99",
}  # fmt: skip


@dataclass
class Arrival:
    """A request, when it arrives, and when its first tokens and its end came; seconds from the first arrival on."""

    row: Row
    seed: int
    arrival: float
    first: float = 0.0
    end: float = 0.0

    @property
    def new(self) -> int:
        """Number of tokens to draw."""
        return self.row.count(None)


def jobs(lm: LanguageModel, seed: int, number: int, rate: float, prompt: int, tokens: int) -> list[Arrival]:
    """Poisson arrivals of requests with between half and one and a half times `tokens` new tokens."""
    rng, now, found = random.Random(seed), 0.0, list[Arrival]()
    for i in range(number):
        words = [rng.randrange(lm.system.mask_id) for _ in range(prompt)]
        new = rng.randint(max(1, tokens // 2), tokens + tokens // 2)
        found.append(Arrival([*words, *[None] * whole(lm, prompt, new)], seed + i, now))
        now += rng.expovariate(rate)
    return found


def whole(lm: LanguageModel, prompt: int, new: int) -> int:
    """At least `new` tokens after the prompt, so that a system that samples by blocks gets whole ones."""
    return new + -(prompt + new) % lm.system.block_size


def static(lm: LanguageModel, todo: Sequence[Arrival], options: dict[str, Any], batch: int) -> None:
    """Serve in batches: each takes what has arrived, and ends for all at once."""
    begin, waiting = time.perf_counter(), list(todo)
    while waiting:
        now = time.perf_counter() - begin
        if waiting[0].arrival > now:
            time.sleep(waiting[0].arrival - now)
            continue
        some = [job for job in waiting[:batch] if job.arrival <= now]
        waiting = waiting[len(some) :]
        first = None
        for _ in lm.stream(tokens=[job.row for job in some], **{**options, "seed": some[0].seed}):
            first = first or time.perf_counter() - begin
        for job in some:
            job.first, job.end = first or 0.0, time.perf_counter() - begin


def continuous(lm: LanguageModel, todo: Sequence[Arrival], options: dict[str, Any], batch: int) -> None:
    """Serve by the engine."""
    left, done = len(todo), threading.Event()

    def listener(job: Arrival, begin: float) -> Callable[..., None]:
        def listen(generation: Any, new: Sequence[Any]) -> None:
            nonlocal left
            now = time.perf_counter() - begin
            job.first = job.first or now
            if generation.ended:
                job.end = now
                left -= 1  # on the engine's thread, and only there
                if left == 0:
                    done.set()

        return listen

    longest = max(len(job.row) for job in todo)
    engine = Engine(lm, EngineOptions(max_batch=batch, max_queue=len(todo), max_length=longest))
    engine.pool.memory  # noqa: B018, allocated before the clock runs
    with engine:
        begin = time.perf_counter()
        for job in todo:
            if (early := job.arrival - (time.perf_counter() - begin)) > 0:
                time.sleep(early)
            how = SamplingOptions(**{**options, "seed": job.seed})
            engine.submit(engine.generation(job.row, how, listen=listener(job, begin)))
        done.wait()


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile, interpolated."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def under_load(
    lm: LanguageModel,
    options: dict[str, Any],
    level: float,
    seconds: float,
    number: int,
    prompt: int,
    tokens: int,
    batch: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """One record for each method at one load; seconds: of a request alone."""
    served: dict[str, list[list[Arrival]]] = {}

    def case(method: str) -> Callable[[int], object]:
        def serve(i: int) -> None:
            todo = jobs(lm, 1000 * i, number, level / seconds, prompt, tokens)
            if method == CONTINUOUS:
                continuous(lm, todo, options, batch)
            else:
                static(lm, todo, options, 1 if method == ONE else batch)
            served.setdefault(method, []).append(todo)

        return serve

    methods = (ONE, STATIC, CONTINUOUS)
    interleaved({f"{method}, load {level:g}": case(method) for method in methods}, rounds, warmup=0)
    speeds = {
        method: [sum(j.new for j in todo) / max(j.end for j in todo) for todo in served[method]] for method in methods
    }
    found = []
    for method in methods:
        every = [job for todo in served[method] for job in todo]
        latency, first = [j.end - j.arrival for j in every], [j.first - j.arrival for j in every]
        record = {"name": method, "load": level, "tokens_per_second": round(summary(speeds[method]).median, 1)}
        record |= ratio(speeds[method], speeds[ONE]).record("over_one", 2)
        for name, values in (("first_", first), ("", latency)):
            record |= {f"{name}p{p}": round(percentile(values, p / 100), 3) for p in (50, 99)}
        found.append(record)
    return found


def at_equal_p99(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The best throughput of continuous batching whose p99 is at most that of one at a time at its highest load below
    1, over the throughput there; None if there is no such load."""
    below = [r for r in records if r["name"] == ONE and r["load"] < 1]
    if not below:
        return None
    one = max(below, key=lambda r: r["load"])
    fine = [r for r in records if r["name"] == CONTINUOUS and r["p99"] <= one["p99"]]
    if not fine:
        return None
    best = max(fine, key=lambda r: r["tokens_per_second"])
    over = round(best["tokens_per_second"] / one["tokens_per_second"], 2)
    return {
        "load_of_one": one["load"],
        "p99_of_one": one["p99"],
        "load": best["load"],
        "p99": best["p99"],
        "over": over,
    }


@contextlib.contextmanager
def listening(engine: Engine) -> Iterator[int]:
    """The engine behind HTTP on a free port of this machine. Raises ImportError without the extra `serve`."""
    import uvicorn

    from ..serving.routes import make_app

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = make_app(engine, ServerOptions(max_n=engine.options.max_queue))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def post(port: int, body: dict[str, Any]) -> None:
    """One completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {answer[:200]!r}")


def overhead(lm: LanguageModel, options: dict[str, Any], prompt: int, tokens: int, batch: int, rounds: int) -> Any:
    """Seconds of a batch by lm.sample, the engine and the server, and their ratios to lm.sample."""
    new = whole(lm, prompt, tokens)
    rng = random.Random(0)
    prompts = [[rng.randrange(lm.system.mask_id) for _ in range(prompt)] for _ in range(batch)]  # no common prefix
    rows: list[Row] = [[*words, *[None] * new] for words in prompts]
    limits = EngineOptions(max_batch=batch, max_queue=batch, max_length=prompt + new)
    plain = Engine(lm, limits)

    def by_engine(i: int) -> None:
        how = SamplingOptions(**{**options, "seed": i})
        plain.submit(*(plain.generation(row, how, j, batch) for j, row in enumerate(rows)))
        plain.finish()

    def by_server(i: int) -> None:
        own = {name: value for name, value in options.items() if name != "batch_size"}
        bodies = [{"prompt": words, "max_tokens": new, "seed": i + j, **own} for j, words in enumerate(prompts)]
        with ThreadPoolExecutor(batch) as clients:
            list(clients.map(post, [port] * batch, bodies))

    cases: dict[str, Callable[[int], object]] = {
        SAMPLE: lambda i: lm.sample(tokens=rows, **{**options, "seed": i, "batch_size": batch}),
        ENGINE: by_engine,
    }
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(listening(Engine(lm, limits)))
            cases[SERVER] = by_server
        except ImportError:
            print("the server is not timed: pip install 'esolm[serve]'")
        seconds = interleaved(cases, rounds)
    return {
        name: {**ratio(times, seconds[SAMPLE]).record("over_sample", 3), "seconds": round(summary(times).median, 3)}
        for name, times in seconds.items()
    }


def gain(lm: LanguageModel, context: int, batch: int, rounds: int) -> dict[str, Any]:
    """How many times the tokens per second of a step of one row a step of `batch` rows has: the arithmetic's limit."""
    with torch.inference_mode():
        steps = {f"{rows} rows": cached_step(lm.net, context, 1, 1, rows) for rows in sorted({1, batch})}
        times = list(interleaved(steps, rounds, calls=3).values())
    return summary([batch * a / b for a, b in zip(times[0], times[-1], strict=True)]).record("times", 2)


def alone(lm: LanguageModel, options: dict[str, Any], prompt: int, tokens: int, rounds: int) -> float:
    """Median seconds of one request of average length."""

    def one(i: int) -> None:
        words = jobs(lm, i, 1, 1.0, prompt, tokens)[0].row[:prompt]
        static(lm, [Arrival([*words, *[None] * whole(lm, prompt, tokens)], i, 0.0)], options, 1)

    return summary(interleaved({"a request alone": one}, rounds)["a request alone"]).median


def random_model(layers: int, width: int, vocab_size: int, length: int, precision: str) -> LanguageModel:
    """An Eso-LM with random weights, and a tokenizer of one word for each id."""
    words = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, "w0"))
    system = find("esolm")(mask_id=vocab_size - 1, alpha_0=0.5)
    net = fold_for(network(layers, width, vocab_size, length), precision, "auto")
    return LanguageModel(net, system, Tokenizer(words, "words", vocab_size - 1))


def run(
    model: str | None = None,
    layers: int = 12,
    width: int = 768,
    vocab_size: int = 50258,
    precision: str = "float32",
    sampler: str | None = None,
    loads: list[float] | None = None,
    requests: int = 32,
    prompt: int = 16,
    tokens: int = 32,
    batch: int = 8,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure serving: throughput and latency under Poisson arrivals by three methods, and the overhead of the server.

    Args:
        model: a run, a model folder or a bundled model; by default a network with random weights.
        layers: number of blocks of that network.
        width: width of that network, a multiple of 64.
        vocab_size: vocabulary size of that network, including the mask token.
        precision: weight precision: float32, bf16, int8, int4.
        sampler: sampler of all requests; by default the system's.
        loads: arrivals, in requests that one at a time can serve; 0.5, 1, 2 and 4 by default.
        requests: requests of a round.
        prompt: given tokens of a request.
        tokens: new tokens of a request, on average.
        batch: most requests that run together.
        rounds: rounds of each load, and timed batches of the overhead.
    """
    if model is None:
        lm = random_model(layers, width, vocab_size, prompt + tokens + tokens // 2 + 16, precision)
    else:
        lm = load(model, precision=precision)
    options: dict[str, Any] = {} if sampler is None else {"sampler": sampler}
    bound = gain(lm, prompt + tokens // 2, batch, max(rounds, 3))
    seconds = alone(lm, options, prompt, tokens, max(rounds, 3))
    records: list[dict[str, Any]] = []
    for level in loads or [0.5, 1.0, 2.0, 4.0]:
        records += under_load(lm, options, level, seconds, requests, prompt, tokens, batch, rounds)
    table(f"{requests} requests of about {tokens} tokens, at most {batch} together", COLUMNS, records)
    cost = overhead(lm, options, prompt, tokens, batch, rounds)
    columns = {"a batch": "name", "× lm.sample": "over_sample:.3f", "quartiles": "quartiles", "seconds": "seconds"}
    table(f"{batch} samples of {tokens} tokens", columns, named(cost))
    equal = at_equal_p99(records)
    print(f"tokens/s of a step of {batch} rows over a step of one, which limits the gain: {bound['times']:.2f}")
    if equal is not None:
        print(f"tokens per second of continuous batching over one at a time, at equal p99: {equal['over']:.2f}")
    return {
        "method": METHOD,
        "seconds_alone": round(seconds, 4),
        "gain_of_a_batched_step": bound,
        "loads": records,
        "at_equal_p99": equal,
        "overhead": cost,
    }
