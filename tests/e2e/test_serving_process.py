"""`esolm serve` as a process: signals."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest

import esolm
from support import runs, served

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install 'esolm[test]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")


def test_sigterm_finishes_what_was_accepted_and_refuses_the_rest():
    body = {"prompt": "It was", "max_tokens": 120, "seed": 1, "sampler": "left_to_right", "stream": True}
    with served.process("stories", "--max_batch", "1") as (server, url):
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
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "stories"
        while not texts and reader.is_alive():
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        # The port is open until the accepted request has its answer.
        assert served.eventually(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
        reader.join(60)
        assert texts[-1] == "data: [DONE]"
        assert server.wait(30) == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/ready")
    want = esolm.load("stories", precision="float32").sample("It was", 1, seed=1, sampler="left_to_right").texts[0]
    assert "It was" + "".join(texts[:-1]) == want[: len("It was" + "".join(texts[:-1]))]


@pytest.mark.slow
def test_what_does_not_finish_in_time_after_sigterm_gets_an_answer(tmp_path):
    """16 samples one after another, and half a second for them."""
    model = runs.make_run(tmp_path / "run", length=256)
    with served.process(model, "--max_batch", "1", "--drain", "0.5") as (server, url):
        found = []
        body = {"prompt": "ab", "max_tokens": 250, "n": 16, "sampler": "left_to_right"}
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
        )
        asking.start()
        while b"esolm_batch_size 1" not in httpx.get(f"{url}/metrics").content:
            assert asking.is_alive()
        server.send_signal(signal.SIGTERM)
        asking.join(60)
        assert server.wait(30) == 0
    assert found[0].status_code == 503
    assert found[0].headers["retry-after"]
    assert found[0].json()["error"]["type"] == "service_unavailable_error"


@pytest.mark.slow
def test_a_killed_server_is_back_in_seconds():
    with served.process("stories") as (server, url):
        server.kill()
        server.wait()
    begin = time.monotonic()
    with served.process("stories") as (_, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "It was"}, timeout=60).status_code == 200
    assert time.monotonic() - begin < 60
