"""The server under Ray Serve: two replicas on this machine, of which one is killed.

Ray runs without its dashboard, usage statistics and network; all traffic stays on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import esolm
from support import runs

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_worker_niceness", "0")  # of 15, Ray's default, workers starve on a busy machine
for limit in ("PROXY_READY_CHECK", "PROXY_HEALTH_CHECK"):  # on a busy machine processes take long to start
    os.environ.setdefault(f"RAY_SERVE_{limit}_TIMEOUT_S", "300")
ray = pytest.importorskip("ray", reason="needs ray: pip install 'esolm[ray]'")
serve = pytest.importorskip("ray.serve", reason="needs ray[serve]: pip install 'esolm[ray]'")
httpx = pytest.importorskip("httpx", reason="needs httpx: pip install 'esolm[test]'")
from esolm.serving.ray_app import app, parsed  # noqa: E402

LENGTH, NEW = 64, 56


def test_options(monkeypatch):
    monkeypatch.delenv("ESOLM_MODEL", raising=False)
    found = parsed({"model": "m", "max_batch": "4", "timeout": "2.5", "threads": "1"})
    assert (found["max_batch"], found["timeout"], found["threads"], found["max_queue"]) == (4, 2.5, 1, 256)
    for wrong in ({}, {"model": "m", "max_batch": "0"}, {"model": "m", "nothing": 1}, {"model": "m", "max_n": "many"}):
        with pytest.raises(ValueError):
            parsed(wrong)
    monkeypatch.setenv("ESOLM_MODEL", "other")
    assert parsed({})["model"] == "other"
    monkeypatch.setenv("ESOLM_NAME", "mine")
    assert parsed({"api_key": "k"})["name"] == "mine"
    with pytest.raises(ValueError, match="empty"):
        parsed({"api_key": ""})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_run(tmp_path_factory.mktemp("model"), length=LENGTH, alpha_0=0.5)


@pytest.fixture
def deployed(model: Path) -> Iterator[tuple[str, Any]]:
    """The address of the application and a handle of its replicas."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 100 * 2**20}
    ray.init(num_cpus=4, _node_ip_address="127.0.0.1", **more)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = {"model": str(model), "num_replicas": 2, "precision": "float32", "threads": 1, "max_batch": 2}
        handle = serve.run(app({**options, "device": "cpu"}), name="esolm", route_prefix="/")
        yield f"http://127.0.0.1:{port}", handle
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()


def replicas(handle: Any) -> dict[int, int]:
    """Processes that answered some calls, and the tokens that they committed."""
    found = {}
    for _ in range(12):
        with contextlib.suppress(Exception):  # the call went to a replica that is gone
            about = handle.about.remote().result(timeout_s=30)
            found[about["pid"]] = about["committed"]
    return found


async def ask(url: str, seeds: range, meanwhile: Any = None) -> list[Any]:
    """The answers to requests sent together, or what was raised instead."""
    async with httpx.AsyncClient(timeout=120) as client:

        async def one(seed: int) -> Any:
            body = {"prompt": "ab", "max_tokens": NEW, "seed": seed, "sampler": "left_to_right"}
            return await client.post(f"{url}/v1/completions", json=body)

        tasks = [asyncio.create_task(one(seed)) for seed in seeds]
        if meanwhile is not None:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            meanwhile()
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # Ray starts a dozen processes
def test_two_replicas_of_which_one_is_killed(model, deployed):
    url, handle = deployed
    lm = esolm.load(model, precision="float32")
    ids = [lm.sample("ab", 1, 2 + NEW, seed=seed, sampler="left_to_right").tokens[0][2:] for seed in range(24)]
    eos = lm.tokenizer.eos_id
    texts = [lm.tokenizer.decode(row[: row.index(eos)] if eos in row else row) for row in ids]

    def check(found: list[Any]) -> int:
        good = 0
        for seed, each in enumerate(found):
            assert isinstance(each, httpx.Response | httpx.TransportError), each  # an answer, or an error
            if isinstance(each, httpx.Response) and each.status_code == 200:
                good += each.json()["choices"][0]["text"] == texts[seed]
            else:
                assert isinstance(each, httpx.TransportError) or each.status_code >= 500, each.text
        return good

    assert check(asyncio.run(ask(url, range(24)))) == 24
    before = replicas(handle)
    assert len(before) == 2
    assert all(before.values())  # both got work
    victim = min(before)
    found = asyncio.run(ask(url, range(24), lambda: os.kill(victim, signal.SIGKILL)))
    lost = sum(not (isinstance(each, httpx.Response) and each.status_code == 200) for each in found)
    assert check(found) == 24 - lost  # whatever was answered with 200 is right, and the rest are errors
    assert lost < 24
    end = time.monotonic() + 120
    while (after := replicas(handle)).keys() == before.keys() or len(after) < 2 or victim in after:
        assert time.monotonic() < end, after
        time.sleep(1)
    assert check(asyncio.run(ask(url, range(24)))) == 24  # both are back
