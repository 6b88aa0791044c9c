"""Small models and random requests for the tests of serving."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from esolm.data.tokenizer import tokenizer
from esolm.model import LanguageModel, Row
from esolm.sampling.options import SamplingOptions
from esolm.serving.engine import Engine
from esolm.serving.options import UNSERVED
from esolm.serving.request import Generation
from support import foreign, toy

BYTES = tokenizer("bytes")
LENGTH = 24
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "esolm": ("esolm", {"alpha_0": 0.5}),
    "any_order": ("esolm", {"alpha_0": 0.5, "loss": "any_order"}),
    "esolm-A": ("esolm", {"alpha_0": 0.5, "variant": "A"}),
    "shift": ("esolm", {"alpha_0": 0.5, "query": "shift"}),
    "mdlm": ("mdlm", {}),
    "bd3lm": ("bd3lm", {"block_size": 4}),
    "ar": ("ar", {}),
    "foreign": ("support.foreign.FixedRate", {}),
}
SYSTEMS |= {name: (name, options) for name, options in toy.one_of_each().items() if name not in SYSTEMS}
assert foreign.FixedRate
SERVED = [name for name, (found, options) in SYSTEMS.items() if toy.make(found, 9, **options).latent_width is None]
"""Those that the engine takes."""


def model(name: str = "esolm", dtype: torch.dtype = torch.float64, length: int = LENGTH, **sizes: Any) -> LanguageModel:
    system, options = SYSTEMS[name]
    made = toy.make(system, BYTES.mask_id, **options)
    return LanguageModel(toy.fitting(made, BYTES.vocab_size, length, dtype, **sizes), made, BYTES)


BAD = 122
"""A token whose embedding is NaN in `damaged`."""


def damaged() -> LanguageModel:
    """A model that fails on texts with the token BAD."""
    lm = model()
    with torch.no_grad():
        lm.net.embed.weight[BAD] = float("nan")  # type: ignore[attr-defined]
    return lm


def random_row(lm: LanguageModel, rng: random.Random) -> Row:
    """Given bytes at random positions, or at the beginning if the system is left to right."""
    block = lm.system.block_size
    length = block * rng.randint(1, LENGTH // block)
    if lm.system.name == "ar" or rng.random() < 0.4:
        given = set(range(rng.randint(0, length - 1)))
    else:
        given = set(rng.sample(range(length), rng.randint(0, length - 1)))
    return [rng.randint(97, 122) if i in given else None for i in range(length)]


def samplers(lm: LanguageModel) -> list[str]:
    """Those that the model has; variant A lacks some of its system's."""
    every = list(lm.system.samplers)
    return [name for name in every if lm.system.any_order or name not in ("speculative", "confidence", "threshold")]


def random_options(lm: LanguageModel, rng: random.Random, length: int) -> SamplingOptions:
    """A sampler of the system with random values of the options that it takes."""
    values: dict[str, Any] = {
        "alpha_0": rng.choice([0.0, 0.3, 1.0]),
        "num_steps": rng.randint(1, 8),
        "parallelism": rng.randint(1, 5),
        "order": rng.sample(range(length), length),
        "window": rng.randint(1, 6),
        "confidence": rng.choice(["probability", "entropy", "margin"]),
        "tau": rng.choice([0.02, 0.2, 0.9]),
        "block_length": rng.randint(1, 9),
    }
    sampler = rng.choice([s for s in lm.system.samplers if not (s == "speculative" and lm.system.name != "esolm")])
    taken = [o for o in lm.system.samplers[sampler] if o not in UNSERVED and rng.random() < 0.5]
    taken += {"order": ["order"], "block": ["parallelism"]}.get(sampler, [])
    if lm.system.timed and "num_steps" not in taken:
        taken.append("num_steps")  # a chain has many by default
    if sampler == "speculative" and "order" in taken:
        taken = [o for o in taken if o != "alpha_0"]
    return SamplingOptions(
        sampler=sampler,
        seed=rng.randint(0, 999),
        temperature=rng.choice([0.0, 0.8, 1.0]),
        top_p=rng.choice([0.9, 1.0]),
        given_order="ascending" if lm.system.name == "ar" else rng.choice(["ascending", "random"]),
        **{name: values[name] for name in taken},
    )


def alone(lm: LanguageModel, row: Row, options: SamplingOptions) -> tuple[str, list[int]]:
    """Text and tokens of the same request by the library."""
    found = lm.sample(tokens=[row], **vars(options))
    return found.texts[0], found.tokens[0]


def waited(engine: Engine, row: Row, options: SamplingOptions) -> Generation:
    """A request served by a running engine to its end."""
    done = threading.Event()
    found = engine.generation(row, options, listen=lambda each, new: each.ended and done.set())
    engine.submit(found)
    assert done.wait(60), "the request did not end"
    return found


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_empty(engine: Engine) -> bool:
    """Whether nothing runs, waits, or holds a row."""
    kept = (engine.scheduler.queue, engine.scheduler.live, engine.scheduler.errands, engine._pending, engine._leases)
    return not any(kept) and not engine.pool.leases and not engine.runner.firsts and engine.pool.slots_used == 0


@contextlib.contextmanager
def process(model: str | Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`esolm serve` as a process on a free port, and its address."""
    import httpx

    words = [sys.executable, "-m", "esolm", "serve", str(model), "--port", "0", "--precision", "float32", *options]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=one) as found:
        try:
            assert found.stderr is not None
            address = re.search(r"http://\S+", found.stderr.readline())
            assert address is not None
            url, deadline = address[0], time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                time.sleep(0.05)
            yield found, url
        finally:
            found.kill()


@contextlib.contextmanager
def live(engine: Engine, **options: Any) -> Iterator[str]:
    """A server on a free port of this machine, in a thread; its address."""
    import uvicorn

    from esolm.serving.options import ServerOptions
    from esolm.serving.routes import make_app

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(engine, ServerOptions(**options)), log_level="warning")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
