"""Patterns as users give them: compiled, cached, refused in bounded time, and held by every system or refused by it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esolm import cli, load
from esolm.constraints import compile as compiling
from esolm.constraints.automaton import MOST_ENTRIES, TooLarge, Vocabulary, _Functions
from esolm.constraints.compile import Pattern, byte_automaton, compiled
from esolm.constraints.guide import Guide, PatternSpan
from esolm.constraints.schema import Checked
from esolm.constraints.walk import spelled
from esolm.data.pieces import vocabulary
from esolm.data.tokenizer import tokenizer
from esolm.generation.rows import Blanked, runs
from support import served

pytest.importorskip("outlines_core", reason="needs outlines-core: pip install 'esolm[constraints]'")
STORIES = load("stories")
TIME = "[01][0-9]:[0-5][0-9]"
TOKENIZERS = {
    "bytes": tokenizer("bytes"),
    "bpe": tokenizer("bpe:280", ["the cat sat on the mat, naïve 猫 and the dog sat on the cat " * 3]),
    "sentencepiece": STORIES.tokenizer,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_text_of_tokens_is_what_decode_returns(name: str) -> None:
    text, dice = TOKENIZERS[name], np.random.default_rng(3)
    found = vocabulary(text)
    plain = [i for i, piece in enumerate(found.pieces) if piece]
    assert len(plain) > 0.98 * text.vocab_size
    for _ in range(300):
        ids = dice.choice(plain, 6).tolist()
        joined = b"".join(found.pieces[i] for i in ids)  # type: ignore[misc]
        try:
            expected = joined.decode()
        except UnicodeDecodeError:
            continue
        assert text.decode(ids) == (expected.removeprefix(" ") if found.strips else expected)


def test_other_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]))
    with pytest.raises(ValueError, match="WordPiece"):
        vocabulary(tokenizer(str(tmp_path)))


PATTERNS = {
    "[0-9]{4}-[0-9]{2}-[0-9]{2}": ["2024-01-31"], "a|ab|abc": ["ab", "abc"], ".{2}": ["é猫", "ab"],
    "(?i)yes|no": ["YeS", "No"], r'"[^"\\]*"': ['""', '"a b"'], "(red|blue) (cat|dog)": ["red dog"], "^x+$": ["xxx"],
    r"\$[0-9]+": ["$5"], "[]a]+": ["]a"],
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("regex", PATTERNS)
def test_encoded_texts_match_as_python_says(name: str, regex: str) -> None:
    text = TOKENIZERS[name]
    words = ["ab", "yes", "2024-01-31", '"a b"', "red dog", "red  dog", "xxx", "$5", "é猫", "]a", "$", "24-01-31"]
    for word in PATTERNS[regex] + words:
        ids = text.encode(word)
        pattern = Pattern.of(regex, None)
        span = PatternSpan(0, len(ids), pattern, compiled(pattern, text.vocabulary), False)
        expected = re.fullmatch(regex, word) is not None
        assert fits(span, ids) == expected, word
    assert any(re.fullmatch(regex, word) for word in words)


def fits(span: PatternSpan, ids: list[int]) -> bool:
    try:
        span.walk(ids)
    except ValueError:
        return False
    return True


def test_files_are_read_and_damaged_ones_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESOLM_CACHE", str(tmp_path))
    words = TOKENIZERS["bpe"].vocabulary
    pattern = Pattern.of("cat|dog", None)
    first = compiling._compiled.__wrapped__(pattern, compiling._Kept(words)).automaton
    (file,) = (tmp_path / "constraints").iterdir()
    monkeypatch.setattr(compiling, "byte_automaton", lambda pattern: pytest.fail("the file was not used"))
    again = compiling._compiled.__wrapped__(pattern, compiling._Kept(words)).automaton
    assert np.array_equal(first.table, again.table)
    assert np.array_equal(first.class_of, again.class_of)
    monkeypatch.undo()
    monkeypatch.setenv("ESOLM_CACHE", str(tmp_path))
    whole = file.read_bytes()
    arrays = dict(np.load(file))
    for damage in (whole[: len(whole) // 2], b"", whole[:-400] + b"x" * 400):
        file.write_bytes(damage)
        assert np.array_equal(
            compiling._compiled.__wrapped__(pattern, compiling._Kept(words)).automaton.table, first.table
        )
        assert len(file.read_bytes()) == len(whole)
    arrays["table"] = arrays["table"] + 1000  # states that do not exist
    np.savez_compressed(file.with_suffix(""), **arrays)
    np.savez_compressed(file, **arrays)
    assert np.array_equal(compiling._compiled.__wrapped__(pattern, compiling._Kept(words)).automaton.table, first.table)


@pytest.mark.parametrize(
    "regex",
    ["(a", "a)|(b", "a(?=b)", r"(a)\1", "[z-a]", r"\bfoo", r"[^\s\S]", "a^b", "a{3,2}", "a\0", "x" * 20000, "(?x)a #"],
)
def test_wrong_expressions_are_one_line(regex: str) -> None:
    with pytest.raises(ValueError) as caught:
        compiled(Pattern.of(regex, None), TOKENIZERS["bytes"].vocabulary)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_large_expressions_end_at_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SECONDS", 2)
    for regex in ("(a|b)*a(a|b){40}", "(.{1,500}){1,500}"):
        with pytest.raises(ValueError, match="too large"):
            byte_automaton(Pattern.of(regex, None))
    monkeypatch.setattr(compiling, "MOST_STATES", 100)
    with pytest.raises(ValueError, match="states"):
        byte_automaton(Pattern.of("[a-z]{200}", None))


def test_too_many_functions_of_tokens_are_refused() -> None:
    table = np.stack([np.roll(np.arange(64), b) for b in range(256)], 1).astype(np.int32)
    with pytest.raises(TooLarge):
        _Functions(table, 1000).of([bytes([b, 7 * b % 256]) for b in range(256)])
    assert MOST_ENTRIES > 1000


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "integer"}},
     "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", 'q"\\', 1, None]}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": {"k": [1]}}]},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "[a-z]{2}|x"}]},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"]},
    {"$defs": {"n": {"type": "number"}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    {"type": ["boolean", "null"]},
    {"type": "object", "properties": {'q"\\': {"enum": [1]}, "a\tb": {"type": "null"}}, "required": ['q"\\', "a\tb"]},
    {"enum": [{"k.": [1]}, [{'"(|\\': None}]]},
]  # fmt: skip


@pytest.mark.matrix(3)
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_samples_are_valid_by_another_validator(schema: Any) -> None:
    validator = pytest.importorskip("jsonschema_rs").Draft202012Validator(schema)
    for sampler in ("first_hitting", "left_to_right"):
        made = STORIES.sample(length=36, json_schema=schema, num_samples=3, sampler=sampler)
        for text in made.texts:
            assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "integer", "minimum": 3}, "minimum"), ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"), ({"oneOf": [{"type": "null"}]}, "oneOf"), ({"type": "foo"}, "foo"),
        ({"type": "string", "format": "email"}, "email"), ({"type": "object", "required": ["a"]}, "required"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, "required"), ({}, "type"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "pattern"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "pattern": ".*"}, "quote"), ({"$ref": "#"}, "ref"), ({"$ref": "#/$defs/x"}, "json_schema"),
        ({"enum": []}, "enum"), ({"const": 1, "type": "string"}, "const"), (True, "object"), ("{", "JSON"),
        (float("nan"), "JSON"),
        ({"type": "string", "pattern": "a)|(b"}, "pattern"), ({"type": "array", "items": False}, "items"),
        ({"type": "object", "minProperties": 2}, "minProperties"), ('{"const": NaN}', "NaN"),
        ({"type": "object", "maxProperties": 2}, "maxProperties"), ('{"const": 1e999}', "const"),
        ({"const": "\ud800"}, "const"), ({"type": "string", "minLength": 2, "maxLength": 1}, "minLength"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1}, "minItems"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "$ref"),
    ],
)  # fmt: skip
def test_what_a_schema_cannot_enforce_is_named(schema: Any, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        compiled(Pattern.of(None, schema), TOKENIZERS["bytes"].vocabulary)
    assert "\n" not in str(caught.value)


def accepts(schema: Any, text: str) -> bool:
    """Whether the automaton of a schema reads a text, byte by byte."""
    found = byte_automaton(Pattern.of(None, schema))
    state = found.start
    for byte in text.encode():
        state = int(found.table[state, byte]) if state < len(found.table) else state
    return state < len(found.table) and bool(found.accepts[state])


def test_names_of_properties_and_keys_of_values_are_those_of_the_schema() -> None:
    """Names with a quote, a backslash or a control are escaped; characters of regular expressions mean themselves."""
    value = {'q"': 1, "b\\": 1, "tab\t": 1, "k.": 1, "(": 1, "é": 1}
    text = json.dumps(value, ensure_ascii=False)
    named = {"type": "object", "properties": {key: {"const": 1} for key in value}, "required": [*value]}
    for schema in ({"const": value}, named):
        assert accepts(schema, text)
        for right, wrong in ((r"q\"", 'q"'), (r"b\\", "b"), (r"tab\t", "tab\t"), ("k.", "kx")):
            assert right in text
            assert not accepts(schema, text.replace(right, wrong))


def test_references_may_lead_through_several_definitions() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(8)} | {"d8": {"type": "null"}}
    assert accepts({"$ref": "#/$defs/d0", "$defs": chain}, "null")
    tree = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
    assert accepts({"$ref": "#/$defs/n", "$defs": {"n": tree}}, '{"n": {"n": {}}}')


def test_deep_and_long_schemas_end() -> None:
    deep: Any = {"type": "null"}
    for _ in range(2000):
        deep = {"type": "array", "items": deep}
    value: Any = 1
    for _ in range(200):
        value = [value]
    for schema in (deep, {"enum": ["x" * 100_000]}, {"const": value}):
        with pytest.raises(ValueError):
            Checked(Pattern.of(None, schema).source)


def test_one_commit_costs_the_same_whatever_the_vocabulary() -> None:
    """A commit looks at sets of states only: it never reads an array as long as the vocabulary."""
    small, large = (
        Vocabulary([b"a", b"b", None, *[b"c%d" % i for i in range(n)]], None, False, f"of {n}") for n in (10, 20_000)
    )
    shapes = []
    for words in (small, large):
        pattern = Pattern.of("[ab]{6}", None)
        span = PatternSpan(0, 6, pattern, compiled(pattern, words), False)
        span.walk([None] * 6).commit(2, 1)
        shapes.append(span.steps.automaton.table.shape)
    assert shapes[0] == shapes[1]


class TestModels:
    """Small models of every system."""

    @pytest.mark.parametrize("name", served.SYSTEMS)
    def test_every_system_holds_the_pattern_or_refuses_it(self, name: str) -> None:
        lm = served.model(name)
        if name in ("d3pm", "diffusion_lm", "diffusionbert", "duo", "sedd", "udlm"):
            with pytest.raises(ValueError, match=lm.system.name):
                lm.sample(length=8, regex=TIME)
            return
        for sampler in served.samplers(lm):
            more = {"block": {"parallelism": 3}, "order": {"order": [*range(7, -1, -1)]}}.get(sampler, {})
            made = lm.sample(length=8, regex=TIME, num_samples=3, sampler=sampler, **more)  # type: ignore[arg-type]
            assert all(re.fullmatch(TIME, text) for text in made.texts), (sampler, made.texts)
            assert [row[5:] for row in made.tokens] == [[lm.tokenizer.eos_id] * 3] * 3

    def test_the_pattern_is_that_of_what_follows_the_prompt(self) -> None:
        lm = served.model()
        assert re.fullmatch(f"at {TIME}", lm.sample("at ", length=10, regex=TIME).texts[0])
        assert lm.sample("12:", length=5, regex=TIME, match="text").texts[0].startswith("12:")
        with pytest.raises(ValueError, match="given"):
            lm.sample("99:", length=5, regex=TIME, match="text")
        with pytest.raises(ValueError, match="5 tokens"):
            lm.infill("____", tokens_per_blank=4, regex=TIME)
        with pytest.raises(ValueError, match="5 to"):
            lm.sample(length=4, regex=TIME)

    def test_blanks_have_patterns_of_their_own(self) -> None:
        lm = served.model()
        made = lm.infill("a ____ b ____ c", tokens_per_blank=[5, 2], regex=[TIME, "[x-z]+"], num_samples=3)
        assert all(re.fullmatch(f"a {TIME} b [x-z]{{2}} c", text) for text in made.texts)
        made = lm.infill("a ____ b ____ c", tokens_per_blank=[5, 2], regex=[TIME, None])
        assert made.texts[0].startswith("a ")
        with pytest.raises(ValueError, match="blanks"):
            lm.infill("a ____ b ____ c", regex=["a", "b", "c"])
        with pytest.raises(ValueError, match="either"):
            lm.sample(regex="a", json_schema={"type": "null"})
        with pytest.raises(ValueError, match="match"):
            lm.sample(match="text")

    def test_the_space_before_a_blank_stays(self) -> None:
        made = STORIES.infill("Tom met a ____ and ran.", tokens_per_blank=2, regex="(red|big) (cat|dog)", num_samples=8)
        assert all(re.fullmatch(r"Tom met a (red|big) (cat|dog) and ran\.", text) for text in made.texts)

    def test_a_system_that_does_not_ask_the_guide_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lm = served.model()
        monkeypatch.setattr("esolm.sampling.request.Request.guide", lambda request: None)
        with pytest.raises(ValueError, match="esolm"):
            lm.sample(length=8, regex=TIME)

    def test_weights_are_refused_where_they_are_unknown(self) -> None:
        lm = served.model()
        for options in ({}, {"regex": "a*", "sampler": "confidence"}, {"regex": "a*", "given_order": "random"}):
            with pytest.raises(ValueError, match="importance weights"):
                lm.log_weights(lm.sample("x", length=4, **options))  # type: ignore[arg-type]


def test_the_commands_take_patterns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(*words: str) -> list[str]:
        assert cli.main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["texts"]

    (text,) = run("sample", "stories", "--length", "12", "--regex", TIME)
    assert re.fullmatch(TIME, text)
    words = ["infill", "stories", "It was ____ when ____ came.", "--tokens_per_blank", "1-8,2"]
    for text in run(*words, "--regex", TIME, "--regex", "", "--num_samples", "3"):
        assert re.match(f"It was {TIME} when", text)
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["cat", "dog"]}))
    (text,) = run("sample", "stories", "--length", "8", "--json_schema", str(schema))
    assert json.loads(text) in ("cat", "dog")
    for wrong in (["--regex", "(a"], ["--json_schema", '{"type": "x"}'], ["--regex", "a{50}"]):
        assert cli.main(["sample", "stories", "--length", "8", *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_helpers() -> None:
    assert spelled([1, 2, 3, 5, 8, 9]) == "1 to 3, 5, 8 to 9"
    assert runs([None, 1, None, None, 2, None]) == [(0, 1), (2, 4), (5, 6)]
    assert runs([1]) == []
    cut = Blanked([[1], [2, 3], []], ["", ""])
    assert cut.row([2, 1]) == [1, None, None, 2, 3, None]
    assert cut.spans([2, 1]) == [(1, 3), (5, 6)]
    assert cut.candidates("1-3") == [[1, 2, 3]] * 2
    assert cut.candidates([2, "4"]) == [[2], [4]]
    for wrong in ("0-3", "3-1", "x", [1], 0, "1-99999"):
        with pytest.raises(ValueError, match="tokens_per_blank"):
            cut.candidates(wrong)  # type: ignore[arg-type]
    assert Guide([[]], [[None]]).finished
