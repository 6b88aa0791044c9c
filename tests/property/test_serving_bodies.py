"""No request body makes the server fail: schemathesis over the OpenAPI document, hypothesis over usual and odd values.

In this process, without a socket; the examples are the same in every run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esolm.serving.engine import Engine
from esolm.serving.options import EngineOptions, ServerOptions
from support import served

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install 'esolm[test]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")
from fastapi.testclient import TestClient  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from esolm.serving.routes import make_app  # noqa: E402

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 12
LM = served.model()
ENGINE = Engine(LM, EngineOptions(max_batch=4))
APP = make_app(ENGINE, ServerOptions(max_n=4, max_body=100_000, timeout=60.0))
APP.router.lifespan_context = lambda app: (
    contextlib.nullcontext()
)  # the fixture starts the engine, once for all requests
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
FEW = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def _engine() -> Iterator[None]:
    with ENGINE:
        yield


def test_the_document_has_every_route():
    paths = {name.split()[1] for name in OPERATIONS}
    assert paths >= {"/v1/completions", "/v1/fim/completions", "/infill", "/v1/infill", "/v1/score", "/v1/models"}
    assert paths >= {"/tokenize", "/detokenize", "/health", "/ready", "/metrics"}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_document_describes_the_server(name, mode):
    """Bodies that fit the document, and bodies that do not."""
    operation = OPERATIONS[name]
    if mode == "negative" and operation.method == "get":
        pytest.skip("has no body to get wrong")

    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    @FEW
    def every(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    every()


def mixed(*usual: Any) -> st.SearchStrategy[Any]:
    """Mostly usual values, and sometimes anything that JSON can hold."""
    return st.one_of(st.sampled_from(usual), st.sampled_from(usual), ANYTHING)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.sampled_from(["\ud800", "\x00", "<|endoftext|>", "😀", -1, 0, 1, 2**31, 2**63, 1e-320, 1e308, "ancestral"]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner))
)
ORDERS = [None, *(list(range(n)) for n in (1, 6, 8))]
SAMPLING = {
    "n": mixed(1, 2, 3),
    "seed": mixed(0, -5, 2**63 - 1),
    "temperature": mixed(0, 0.7, 1.0, 1e-300, 100),
    "top_p": mixed(0.9, 1, 1e-9),
    "top_k": mixed(1, 5, 10**9),
    "stream": mixed(True, False),
    "stream_positions": mixed(True, False),
    "sampler": mixed("ancestral", "first_hitting", "block", "left_to_right", "order", "speculative"),
    "alpha_0": mixed(0, 0.5, 1),
    "num_steps": mixed(1, 3, 2**20),
    "parallelism": mixed(1, 4, 2**20),
    "window": mixed(1, 5, 31),
    "order": mixed(*ORDERS),
    "given_order": mixed("ascending", "random"),
    "user": mixed("me"),
    "model": mixed("esolm"),
}
COMPLETION = {
    "prompt": mixed("ab", "", ["a", "bc"], [97, 98], [[97], [98, 99]], "añ😀", [255], [300], [[]], []),
    "suffix": mixed("c", "", None),
    "max_tokens": mixed(1, 4, 6, None),
    "stop": mixed("a", ["b", "c"], None),
    "echo": mixed(True, False),
    "logprobs": mixed(0, 3, 20),
    "stream_options": mixed({"include_usage": True}),
    "best_of": mixed(1),
}
ROUTES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/v1/completions": {**SAMPLING, **COMPLETION},
    "/v1/fim/completions": {**SAMPLING, **COMPLETION, "random_seed": mixed(3), "min_tokens": mixed(0)},
    "/infill": {
        **SAMPLING, "input_prefix": mixed("ab"), "input_suffix": mixed("c"), "prompt": mixed("d"),
        "n_predict": mixed(-1, 0, 4), "stop": mixed("a"), "anything": ANYTHING,
    },
    "/v1/infill": {
        **SAMPLING, "text": mixed("a ____ b", "____"), "tokens": mixed([97, None, 98], [None, None]),
        "tokens_per_blank": mixed(1, 3, [2]), "blank": mixed("____", "_"), "logprobs": mixed(0, 2),
    },
    "/v1/score": {
        "text": mixed("ab", ["ab", "c"]), "tokens": mixed([[97, 98]]), "context": mixed("x"), "given": mixed([0]),
        "alpha_0": mixed(0, 0.5), "estimator": mixed("iw", "jackknife"), "num_orders": mixed(1, 2, 4),
        "antithetic": mixed(True), "given_order": mixed("random"), "seed": mixed(1),
    },
    "/tokenize": {"content": mixed("ab"), "prompt": mixed("c"), "with_pieces": mixed(True)},
    "/detokenize": {"tokens": mixed([97, 195], []), "with_pieces": mixed(True)},
}  # fmt: skip


@pytest.mark.matrix(3)
@pytest.mark.parametrize("path", ROUTES)
def test_no_body_is_an_error_of_the_server(path):
    """At most four fields at a time, so that many bodies are accepted."""
    client, statuses = TestClient(APP), set()

    @given(body=st.dictionaries(st.sampled_from(sorted(ROUTES[path])), st.just(None), max_size=4), data=st.data())
    @settings(FEW, max_examples=40)
    def every(body: dict[str, Any], data: st.DataObject) -> None:
        filled = {name: data.draw(ROUTES[path][name]) for name in body}
        found = client.post(path, content=json.dumps(filled).encode(), headers={"Content-Type": "application/json"})
        statuses.add(found.status_code)
        assert found.status_code in (200, 400, 404), (filled, found.text)
        if found.status_code != 200:
            assert found.json()["error"]["message"]
        elif filled.get("stream") is True:
            assert '"error"' not in found.text

    every()
    assert statuses >= {200, 400}
