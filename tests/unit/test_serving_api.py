"""The HTTP API on a live server, by the real `openai` client and by plain requests."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import esolm
from esolm.serving.engine import Engine
from esolm.serving.options import EngineOptions
from support import served

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install 'esolm[test]'")
openai = pytest.importorskip("openai", reason="needs openai: pip install 'esolm[test]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")
from fastapi.testclient import TestClient  # noqa: E402

from esolm.serving import routes, server  # noqa: E402
from esolm.serving.choices import completion_rows, piece, pieces  # noqa: E402

LM = served.model(length=64)
KEY = "secret-key"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(LM, EngineOptions(max_batch=4, max_queue=16))


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with served.live(engine, api_key=KEY, name="toy", max_body=20_000) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[Any]:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as found:
        yield found


def expected(prompt: str, length: int, **options: Any) -> str:
    return LM.sample(prompt, 1, length, **options).texts[0][len(prompt) :]


def test_the_openai_client_completes_as_the_library_samples(client):
    found = client.completions.create(model="toy", prompt="abc", max_tokens=20, seed=3, top_p=0.9, temperature=0.8)
    assert found.choices[0].text == expected("abc", 23, seed=3, top_p=0.9, temperature=0.8)
    assert found.object == "text_completion"
    assert found.model == "toy"
    assert found.usage.prompt_tokens == 3
    assert 0 < found.usage.completion_tokens <= 20
    assert found.usage.total_tokens == 3 + found.usage.completion_tokens
    assert client.completions.create(model="toy", prompt="abc").choices[0].finish_reason in ("length", "stop")


def test_several_prompts_and_samples(client):
    found = client.completions.create(model="toy", prompt=["ab", "cd"], n=2, max_tokens=8, seed=5)
    texts = LM.sample(["ab", "ab", "cd", "cd"], 4, 10, seed=5).texts
    assert [choice.text for choice in found.choices] == [text[2:] for text in texts]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model="toy", prompt=[97, 98], max_tokens=8, seed=5)
    assert ids.choices[0].text == texts[0][2:]


def test_our_own_options_stand_beside_openais(client):
    more = {"sampler": "speculative", "window": 3, "alpha_0": 0.0}
    found = client.completions.create(model="toy", prompt="abc", max_tokens=8, seed=1, extra_body=more)
    assert found.choices[0].text == expected("abc", 11, seed=1, **more)
    more = {"sampler": "threshold", "tau": 0.02, "confidence": "entropy", "window": 40}
    found = client.completions.create(model="toy", prompt="abc", max_tokens=8, seed=1, extra_body=more)
    assert found.choices[0].text == expected("abc", 11, seed=1, **more)
    more = {"num_steps": 4, "alpha_0": 1.0}
    found = client.completions.create(model="toy", prompt="abc", max_tokens=8, seed=1, extra_body=more)
    assert found.choices[0].text == expected("abc", 11, seed=1, **more)


@pytest.mark.parametrize(
    ("name", "value"), [("cache", "dual"), ("refresh", 2), ("freeze", "last_pass"), ("confidence", "sure"), ("tau", 2)]
)
def test_what_cannot_be_served_is_named(http, name, value):
    body = {"prompt": "abc", "max_tokens": 4, "sampler": "threshold", name: value}
    found = http.post("/v1/completions", json=body)
    assert found.status_code == 400
    assert name in found.text
    samplers = http.get("/v1/models").json()["data"][0]["samplers"]
    assert not {"cache", "refresh", "freeze"} & {option for taken in samplers.values() for option in taken}


def test_the_text_between_prompt_and_suffix(client):
    found = client.completions.create(model="toy", prompt="abc", suffix="xyz", max_tokens=6, seed=2)
    row = [*b"abc", *[None] * 6, *b"xyz"]
    assert found.choices[0].text == LM.tokenizer.decode(LM.sample(tokens=[row], seed=2).tokens[0][3:9])


def test_a_stream_has_the_same_text(client):
    options = {"model": "toy", "prompt": "abc", "max_tokens": 30, "seed": 4}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert [part.finish_reason for part in parts][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    left = list(client.completions.create(**options, stream=True, extra_body={"sampler": "left_to_right"}))
    assert len(left) > 3  # each token is final at once, and a busy machine sends several together


def test_a_stream_with_positions(http):
    body = {"prompt": "abc", "max_tokens": 12, "seed": 4, "stream": True, "stream_positions": True}
    tokens = {}
    with http.stream("POST", "/v1/completions", json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    for event in events:
        if event["object"] == "step":
            tokens.update(zip(event["positions"], event["tokens"]))
            assert set(event["phases"]) <= {"diffusion", "sequential"}
    assert [tokens[i] for i in range(3, 15)] == LM.sample("abc", 1, 15, seed=4).tokens[0][3:]
    assert [event["step"] for event in events if event["object"] == "step"] == [*range(12)]


def test_stop_echo_and_logprobs(client):
    options = {"model": "toy", "prompt": "abc", "max_tokens": 16, "seed": 8, "extra_body": {"sampler": "left_to_right"}}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[4:6]
    cut = client.completions.create(**options, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    chunks = client.completions.create(**options, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text
    found = client.completions.create(**options, echo=True, logprobs=2).choices[0]
    assert found.text == "abc" + whole
    lists = found.logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset) == 16
    assert "".join(lists.tokens) == whole
    assert lists.text_offset[0] == 3
    assert all(value < 0 for value in lists.token_logprobs)


def test_errors_are_the_clients_exceptions(client, url, http):
    create = client.completions.create
    with pytest.raises(openai.BadRequestError) as found:
        create(model="toy", prompt="abc", temperature=-1)
    assert found.value.param == "temperature"
    for wrong in (
        {"max_tokens": 0}, {"max_tokens": 65}, {"n": 17}, {"extra_body": {"sampler": "nothing"}}, {"best_of": 3},
        {"extra_body": {"unknown": 1}}, {"extra_body": {"alpha_0": 2}}, {"prompt": [9999]}, {"stop": [""]},
        {"logit_bias": {"5": 1}}, {"extra_body": {"order": [0, 0]}},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as found:
            create(**{"model": "toy", "prompt": "abc", **wrong})
        assert found.value.body["message"]
        assert found.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        create(model="other", prompt="abc")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").completions.create(model="toy", prompt="abc")
    assert http.post("/v1/completions", content=b"{").status_code == 400
    assert http.post("/v1/completions", json={"prompt": "a" * 30_000}).status_code == 413
    large = (b"x" * 1000 for _ in range(30))  # does not declare its size
    assert http.post("/v1/completions", content=large).status_code == 413
    assert http.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405


def test_other_forms_of_infilling(http):
    row = [*b"abc", *[None] * 6, *b"xyz"]
    tokens = LM.sample(tokens=[row], seed=2).tokens[0]
    middle = LM.tokenizer.decode(tokens[3:9])
    asked = {"prompt": "abc", "suffix": "xyz", "max_tokens": 6, "random_seed": 2}
    assert http.post("/v1/fim/completions", json=asked).json()["choices"][0]["message"]["content"] == middle
    asked = {"input_prefix": "abc", "input_suffix": "xyz", "n_predict": 6, "seed": 2, "cache_prompt": True}
    found = http.post("/infill", json=asked).json()
    assert (found["content"], found["stop"], found["tokens_predicted"]) == (middle, True, 6)
    with http.stream("POST", "/infill", json={**asked, "stream": True}) as response:
        parts = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(part["content"] for part in parts) == middle
    found = http.post("/v1/infill", json={"tokens": row, "seed": 2, "logprobs": 1}).json()["choices"][0]
    assert found["tokens"] == tokens
    assert found["drawn"] == list(range(3, 9))
    assert [value is None for value in found["logprobs"]] == [token is not None for token in row]
    assert http.post("/v1/infill", json={"tokens": [97]}).status_code == 400
    assert http.post("/v1/infill", json={}).status_code == 400


def test_a_text_with_blanks(http):
    asked = {"text": "ab ____ cd ____.", "tokens_per_blank": 3, "seed": 1, "n": 2}
    found = http.post("/v1/infill", json=asked).json()
    want = LM.infill("ab ____ cd ____.", tokens_per_blank=3, num_samples=2, seed=1)
    assert [choice["text"] for choice in found["choices"]] == want.texts
    with http.stream("POST", "/v1/infill", json={**asked, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert [event["object"] for event in events[:2]] == ["start", "start"]
    texts = {c["index"]: c["text"] for event in events for c in event.get("choices", [])}
    assert [texts[0], texts[1]] == want.texts
    assert "".join(found["choices"][0]["pieces"]) == found["choices"][0]["text"]


def test_scores(http):
    found = http.post("/v1/score", json={"text": ["abc", "abd"], "num_orders": 8, "given": [0]}).json()
    want = LM.log_prob(["abc", "abd"], given=[0], num_orders=8)
    assert [each["log_prob"] for each in found["data"]] == pytest.approx(want.total.tolist())
    assert found["data"][0]["standard_error"] > 0
    assert http.post("/v1/score", json={"text": "abc", "num_orders": 10**6}).status_code == 400
    assert http.post("/v1/score", json={"text": ""}).status_code == 400


def test_tokens_models_health_metrics_and_documents(http, url):
    found = http.post("/tokenize", json={"content": "añb", "with_pieces": True}).json()
    assert found["tokens"] == list("añb".encode())
    assert found["pieces"] == ["a", "", "ñ", "b"]
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["content"] == "añb"
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert http.get("/v1/models").json()["data"][0]["id"] == "toy"
    for path in ("/health", "/ready", "/openapi.json", "/"):
        assert httpx.get(url + path).status_code == 200
    for path in re.findall(r'(?:href|src)="(.+?)"', httpx.get(url + "/docs").text):  # no other host is asked
        assert httpx.get(url + path).status_code == 200
    assert httpx.get(url + "/metrics").status_code == 401
    text = http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["esolm_tokens_committed_total"]) > 0
    assert float(values["esolm_request_seconds_count"]) > 0
    assert float(values["esolm_kv_slots_used"]) == 0


def test_overload_is_429_and_loses_nothing():
    """16 rows and places for 100 samples; the queue holds 4 and one runs."""
    engine = Engine(LM, EngineOptions(max_batch=1, max_queue=4))
    with served.live(engine) as url:
        statuses, lock = [], threading.Lock()

        def ask(seed: int) -> None:
            body = {"prompt": "abc", "max_tokens": 40, "seed": seed}
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            with lock:
                statuses.append((found.status_code, seed, found.json(), found.headers.get("retry-after")))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {status for status, *_ in statuses} == {200, 429}
    for status, seed, found, retry in statuses:
        if status == 200:
            assert found["choices"][0]["text"] == expected("abc", 43, seed=seed)
        else:
            assert retry == "1"
            assert found["error"]["code"] == "queue_full"


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away_free_their_rows(stream):
    slow = served.model(length=512, layers=4)
    engine = Engine(slow, EngineOptions(max_batch=2))
    with served.live(engine) as url:
        for _ in range(3):
            body = {"prompt": "abc", "max_tokens": 500, "stream": stream}
            with (
                contextlib.suppress(httpx.TimeoutException),
                httpx.Client(timeout=0.3) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as response,
            ):
                next(response.iter_lines())  # and leave
        assert served.eventually(lambda: served.is_empty(engine))


@pytest.mark.parametrize("name", ["ar", "bd3lm", "mdlm"])
def test_other_systems(name):
    lm = served.model(name)
    with served.live(Engine(lm)) as url:
        found = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 9, "seed": 1}).json()
        length = 12 if name == "bd3lm" else 11
        ids = lm.sample("ab", 1, length, seed=1).tokens[0][2:11]
        assert found["choices"][0]["text"] == lm.tokenizer.decode(ids).split("<|endoftext|>")[0]
        middle = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "suffix": "c", "max_tokens": 9})
        assert middle.status_code == (400 if name == "ar" else 200)


def test_usage_counts_a_prompt_once_and_a_suffix(http):
    asked = {"prompt": ["abc", "de"], "suffix": "xy", "n": 2, "max_tokens": 4, "seed": 1}
    usage = http.post("/v1/completions", json=asked).json()["usage"]
    assert usage["prompt_tokens"] == 3 + 2 + 2 * 2
    assert 4 <= usage["completion_tokens"] <= 4 * 4  # fewer after an end-of-sequence token
    usage = http.post("/v1/infill", json={"tokens": [97, None, 98], "n": 3}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 3)


def test_one_model_by_its_name(client):
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_have_one_form_also_before_a_route(http):
    for found in (
        http.post("/v1/completions", content=b"\xff\xfe", headers={"Content-Type": "application/json"}),
        http.post("/v1/completions", content=b"prompt=abc"),
        http.get("/v1/completions"),
        http.get("/nothing"),
        http.post("/v1/score", json={"text": "ab", "unknown": 1}),
    ):
        assert 400 <= found.status_code < 500
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_more_samples_than_places_are_refused_for_good():
    """429 would tell the client to try again."""
    with served.live(Engine(LM, EngineOptions(max_queue=2))) as url:
        found = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 3}, timeout=60)
        assert (found.status_code, found.json()["error"]["param"]) == (400, "n")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 2}, timeout=60).status_code == 200


def test_a_score_that_takes_too_long_is_504_and_stops():
    engine = Engine(LM)
    with served.live(engine, timeout=0.2) as url:
        body = {"text": ["ab" * 30] * 8, "num_orders": 256}
        assert httpx.post(f"{url}/v1/score", json=body, timeout=120).status_code == 504
        assert served.eventually(lambda: engine._errand is None)


def test_the_key_is_compared_in_constant_time(monkeypatch, url):
    compared = []
    original = routes.hmac.compare_digest
    monkeypatch.setattr(routes.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b))
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        found = httpx.get(f"{url}/v1/models", headers=header)
        assert found.status_code == 401
        assert found.headers["www-authenticate"] == "Bearer"
    assert len(compared) == 3
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_cors_is_off_unless_an_origin_is_named(url):
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(f"{url}/v1/completions", headers=asked).headers
    app = routes.make_app(Engine(LM))
    server.allow_origin(app, "https://example.org")
    with TestClient(app) as client:
        found = client.options("/v1/completions", headers=asked)
        assert found.headers["access-control-allow-origin"] == "https://example.org"
        other = client.options("/v1/completions", headers={**asked, "Origin": "https://other.org"})
        assert "access-control-allow-origin" not in other.headers


def test_the_space_before_a_word_is_kept_by_tokenizers_that_drop_it_at_the_start_of_a_text():
    """Llama's: a completion begins with its space, and a suffix gets no space that it does not have."""
    tokenizer = esolm.load("stories").tokenizer
    text = "Tom saw a dog. He ran home."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids[3:]) == tokenizer.decode_after(ids[3:], ids[2]).removeprefix(" ")
    assert tokenizer.decode(ids[:3]) + tokenizer.decode_after(ids[3:], ids[2]) == text
    names = pieces(tokenizer, ids[3:], ids[2])
    assert tokenizer.decode(ids[:3]) + "".join(names) == text
    assert [piece(tokenizer, token) for token in ids[3:]] == names
    for suffix in (" He ran home.", "s and cats."):
        row, start, count = completion_rows(tokenizer, ["Tom saw a dog"], suffix, 2, 1)[0]
        after = row[start + count :]
        assert "x" + tokenizer.decode_after(after, tokenizer.encode("x")[-1]) == f"x{suffix}"


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ('{"prompt": "a"', "application/json", "the body is not JSON: Expecting ',' delimiter at character 14"),
        ('{"prompt": "a"}', "application/x-www-form-urlencoded", "send the header Content-Type: application/json"),
        ("[1]", "application/json", "the body must be a JSON object"),
    ],
)
def test_a_body_that_is_no_object(http, content, kind, said):
    found = http.post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("response_format", {}, "response_format is not a field of this route: did you mean json_schema?"),
        ("max_token", 3, "max_token is not a field of this route: did you mean max_tokens?"),
        ("min_p", 0.1, "min_p is not a field of this route: leave it out"),
        ("best_of", 3, "best_of is not supported: leave it out"),
        ("frequency_penalty", 1.0, "frequency_penalty is not supported: leave it out"),
        ("json_schema", "{}", "json_schema: Input should be a valid dictionary"),
    ],
)
def test_a_field_that_is_refused_is_named(http, field, value, said):
    found = http.post("/v1/completions", json={"prompt": "a", field: value})
    error = found.json()["error"]
    assert (found.status_code, error["message"], error["param"]) == (400, said, field)


def test_a_path_that_does_not_exist_is_named(http):
    said = [http.post(path, json={}).json()["error"]["message"] for path in ("/v1/chat/completions", "/v1/completion")]
    assert said == ["this server has no chat route: use /v1/completions", "no route /v1/completion: see /docs"]


@pytest.mark.parametrize(
    ("path", "body", "field", "code"),
    [
        ("completions", {"sampler": "foo"}, "sampler", None),
        ("completions", {"prompt": [1, 99999]}, "prompt", None),
        ("completions", {"max_tokens": 10000}, "max_tokens", "context_length_exceeded"),
        ("infill", {"text": "no blank"}, "text", None),
        ("score", {"text": ""}, "text", None),
        ("score", {"prompt": "abc", "text": "a"}, "prompt", None),
    ],
)
def test_a_refusal_names_its_field(http, path, body, field, code):
    found = http.post(f"/v1/{path}", json=body)
    assert (found.status_code, found.json()["error"]["param"], found.json()["error"]["code"]) == (400, field, code)
    assert "did you mean prompt" not in found.json()["error"]["message"]
