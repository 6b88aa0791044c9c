"""Patterns and lengths of blanks over HTTP are those of the library, and wrong ones are errors of the client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from esolm.sampling.options import SamplingOptions
from esolm.serving.engine import Engine
from esolm.serving.options import EngineOptions, ServerOptions
from support import served

pytest.importorskip("outlines_core", reason="needs outlines-core: pip install 'esolm[constraints]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")
from fastapi.testclient import TestClient

from esolm.serving.routes import make_app

LM = served.model(length=48)
TIME = "[01][0-9]:[0-5][0-9]"


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    engine = Engine(LM, EngineOptions(max_batch=4))
    with TestClient(make_app(engine, ServerOptions(max_n=8)), raise_server_exceptions=False) as found:
        yield found


@pytest.mark.parametrize("name", ["esolm", "any_order", "shift", "esolm-A", "mdlm", "bd3lm", "ar"])
def test_the_engine_gives_what_the_library_gives(name: str) -> None:
    """Requests with and without a pattern in the same passes."""
    lm = served.model(name)
    engine, asked = Engine(lm, EngineOptions(max_batch=3)), []
    for i, sampler in enumerate(served.samplers(lm)):
        more: dict[str, Any] = {"block": {"parallelism": 3}, "order": {"order": [*range(11, -1, -1)]}}.get(sampler, {})
        for regex in (TIME, None, "(ab)*c?"):
            options = SamplingOptions(sampler=sampler, seed=i, regex=regex, **more)
            asked.append((engine.generation([97, 98, *[None] * 10], options), options))
    engine.submit(*(generation for generation, _ in asked))
    engine.finish()
    for generation, options in asked:
        assert generation.error is None
        assert (generation.text(), generation.tokens) == served.alone(lm, [97, 98, *[None] * 10], options)


def test_infill(http: Any) -> None:
    asked: dict[str, Any] = {"text": "at ____ or ____.", "tokens_per_blank": ["1-7", 2], "seed": 1}
    for more in ({}, {"regex": [TIME, None]}, {"length_prior": [7, 6, 5, 4, 3, 2, 1]}, {"length_choice": "best"}):
        found = http.post("/v1/infill", json={**asked, **more, "n": 3})
        assert found.status_code == 200, found.text
        text = asked["text"]
        want = LM.infill(text, num_samples=3, **{k: v for k, v in {**asked, **more}.items() if k != "text"})
        assert [choice["text"] for choice in found.json()["choices"]] == want.texts
    assert all(re.match(f"at {TIME} or", text) for text in LM.infill(text, tokens_per_blank=5, regex=TIME).texts)
    row = [97, *[None] * 5, 98]
    found = http.post("/v1/infill", json={"tokens": row, "regex": TIME}).json()["choices"][0]["text"]
    assert re.fullmatch(f"a{TIME}b", found)


def test_completions(http: Any) -> None:
    found = http.post("/v1/completions", json={"prompt": ["at ", "by "], "regex": TIME, "max_tokens": 9, "n": 2}).json()
    assert all(re.fullmatch(TIME, choice["text"]) for choice in found["choices"])
    assert {choice["finish_reason"] for choice in found["choices"]} == {"stop"}
    asked = {"prompt": "at ", "suffix": " sharp", "regex": TIME, "max_tokens": 9}
    assert re.fullmatch(TIME, http.post("/v1/completions", json=asked).json()["choices"][0]["text"])
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    found = http.post("/v1/completions", json={"json_schema": schema, "max_tokens": 20}).json()["choices"][0]["text"]
    assert json.loads(found)["a"] in ("x", "y")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"regex": "(a"}), ("/v1/completions", {"regex": "a{40}", "max_tokens": 4}),
        ("/v1/completions", {"regex": 3}), ("/v1/completions", {"json_schema": {"type": "x"}}),
        ("/v1/completions", {"regex": "a", "json_schema": {"type": "null"}}), ("/v1/completions", {"match": "text"}),
        ("/v1/infill", {"text": "a ____", "tokens_per_blank": "3-1"}),
        ("/v1/infill", {"text": "a ____", "regex": ["a", "b"]}),
        ("/v1/infill", {"text": "a ____", "tokens_per_blank": "1-999"}),
        ("/v1/infill", {"text": "a ____", "tokens_per_blank": "1-4", "length_prior": [1]}),
        ("/v1/infill", {"text": "a ____", "tokens_per_blank": "1-4", "length_choice": "x"}),
        ("/v1/infill", {"text": "a ____", "tokens_per_blank": "1-2", "n": 99}),
    ],
)  # fmt: skip
def test_wrong_requests(http: Any, path: str, body: dict[str, Any]) -> None:
    found = http.post(path, json=body)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["message"]
    assert "\n" not in found.json()["error"]["message"]
