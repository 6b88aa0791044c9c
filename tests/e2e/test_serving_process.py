"""`esolm serve` as a process: signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import esolm

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install 'esolm[test]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")


@contextlib.contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server of the bundled model on a free port, and its address."""
    words = [sys.executable, "-m", "esolm", "serve", "books", "--port", "0", "--precision", "float32", *options]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=one) as found:
        try:
            assert found.stderr is not None
            url = re.search(r"http://\S+", found.stderr.readline())[0]
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                time.sleep(0.05)
            yield found, url
        finally:
            found.kill()


def test_sigterm_finishes_what_was_accepted_and_refuses_the_rest():
    body = {"prompt": "It was", "max_tokens": 120, "seed": 1, "sampler": "left_to_right", "stream": True}
    with process("--max_batch", "1") as (server, url):
        texts: list[str] = []

        def read() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        texts.append(json.loads(line[6:])["choices"][0]["text"])
                    elif line:
                        texts.append(line)

        reader = threading.Thread(target=read)
        reader.start()
        while not texts and reader.is_alive():
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        reader.join(60)
        assert texts[-1] == "data: [DONE]"
        assert server.wait(30) == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/ready")
    want = esolm.load("books", precision="float32").sample("It was", 1, seed=1, sampler="left_to_right").texts[0]
    assert "It was" + "".join(texts[:-1]) == want[: len("It was" + "".join(texts[:-1]))]


def test_a_killed_server_is_back_in_seconds():
    with process() as (server, url):
        server.kill()
        server.wait()
    begin = time.monotonic()
    with process() as (_, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "It was"}, timeout=60).status_code == 200
    assert time.monotonic() - begin < 60
