"""What a user holds: sample, infill and stream on a small network with random weights and a tokenizer of bytes.

Shapes: B batch, L length.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from esolm.data.tokenizer import tokenizer
from esolm.generation.samples import Samples
from esolm.model import LanguageModel, collect, load
from esolm.sampling.events import Event, until
from esolm.storage import checkpoint, folder
from support import toy

BYTES = tokenizer("bytes")
MASK, EOS = BYTES.mask_id, BYTES.eos_id
L = 16
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "esolm": ("esolm", {"alpha_0": 0.5}),
    "any_order": ("esolm", {"alpha_0": 0.5, "loss": "any_order"}),
    "esolm-A": ("esolm", {"alpha_0": 0.5, "variant": "A"}),
    "mdlm": ("mdlm", {}),
    "bd3lm": ("bd3lm", {"block_size": 4}),
    "ar": ("ar", {}),
}
ANY_ORDER = [name for name in SYSTEMS if name != "ar"]


def model(name: str, dtype: torch.dtype = torch.float64, **sizes: Any) -> LanguageModel:
    system, options = SYSTEMS[name]
    return LanguageModel(toy.network(BYTES.vocab_size, L, dtype, **sizes), toy.make(system, MASK, **options), BYTES)


MODELS = {name: model(name) for name in SYSTEMS}


@pytest.fixture(params=SYSTEMS)
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return MODELS[request.param]


@pytest.fixture(params=ANY_ORDER)
def free(request: pytest.FixtureRequest) -> LanguageModel:
    """Systems that can fill in anything."""
    return MODELS[request.param]


def same(one: Samples, two: Samples) -> None:
    for name in ("texts", "tokens", "nfe", "steps"):
        assert getattr(one, name) == getattr(two, name), name


def consistent(lm: LanguageModel, found: Samples, number: int) -> None:
    """Every field has a row for each sample, and they agree with each other."""
    assert len(found.texts) == len(found.tokens) == len(found.nfe) == len(found.steps) == number
    for ids, nfe, steps in zip(found.tokens, found.nfe, found.steps):
        assert nfe == len(steps)
        assert all(0 <= token < BYTES.vocab_size and token != MASK for token in ids)
        drawn = [i for step in steps for i in step]
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(range(len(ids)))
    assert found.passes >= max(found.nfe)
    assert found.seconds > 0


def test_sample(lm: LanguageModel) -> None:
    found = lm.sample(num_samples=5)
    consistent(lm, found, 5)
    assert [len(ids) for ids in found.tokens] == [L] * 5  # the training length
    assert [sorted(i for step in steps for i in step) for steps in found.steps] == [list(range(L))] * 5
    assert found.texts == [BYTES.decode(until(ids, EOS)) for ids in found.tokens]
    assert len(set(map(tuple, found.tokens))) == 5
    longer = lm.sample(num_samples=2, length=2 * L)
    assert [len(ids) for ids in longer.tokens] == [2 * L] * 2


def test_one_at_a_time_needs_a_pass_a_token(lm: LanguageModel) -> None:
    found = lm.sample(num_samples=3)
    assert found.nfe == [L] * 3
    if lm is not MODELS["esolm-A"]:  # whose rows pass from one phase to the other at different times
        assert found.passes == L
    assert lm.sample(num_samples=3, batch_size=2).passes >= 2 * L


@pytest.mark.parametrize("name", ["esolm", "any_order", "esolm-A", "mdlm"])
def test_few_steps(name: str) -> None:
    lm = MODELS[name]
    options = {} if name == "mdlm" else {"alpha_0": 1.0}
    found = lm.sample(num_samples=4, num_steps=3, **options)
    consistent(lm, found, 4)
    assert max(found.nfe) <= found.passes <= 3
    found = lm.sample(num_samples=4, sampler="block", parallelism=4)
    assert found.nfe == [4] * 4
    assert found.passes == 4
    assert all(len(step) == 4 for steps in found.steps for step in steps)


def test_bd3lm_shares_the_steps_out_to_its_blocks() -> None:
    """Sixteen tokens in four blocks with T = 8: at most two steps a block, one block after another."""
    found = MODELS["bd3lm"].sample(num_samples=6, num_steps=8)
    consistent(MODELS["bd3lm"], found, 6)
    assert found.passes <= 8
    for steps in found.steps:
        blocks = [{i // 4 for i in step} for step in steps]
        assert all(len(block) == 1 for block in blocks)
        assert [min(b) for b in blocks] == sorted(min(b) for b in blocks)


def test_prompts_are_kept(lm: LanguageModel) -> None:
    found = lm.sample(num_samples=3, prompt="héllo ")
    consistent(lm, found, 3)
    prompt = BYTES.encode("héllo ")
    assert len(prompt) == 7
    for ids, steps in zip(found.tokens, found.steps):
        assert ids[:7] == prompt
        assert sorted(i for step in steps for i in step) == list(range(7, L))
    assert all(text.startswith("héllo ") for text in found.texts)


def test_prompts_of_different_length(lm: LanguageModel) -> None:
    prompts = ["", "ab", "abcdefghijklmno", "abcd"]
    found = lm.sample(num_samples=4, prompt=prompts)
    consistent(lm, found, 4)
    for text, ids, prompt, nfe in zip(found.texts, found.tokens, prompts, found.nfe):
        assert text.startswith(prompt)
        assert len(ids) == L
        assert nfe == L - len(prompt)


def test_a_prompt_that_leaves_nothing_to_draw_among_others(lm: LanguageModel) -> None:
    """Alone in its batch or not, its sample is the prompt itself, at no cost."""
    full = "0123456789abcdef"
    prompts = [full, "ab", full]
    for batch_size in (1, 2, 3):
        found = lm.sample(num_samples=3, prompt=prompts, batch_size=batch_size)
        consistent(lm, found, 3)
        assert [found.texts[0], found.texts[2]] == [full, full]
        assert found.texts[1].startswith("ab")
        assert found.nfe == [0, L - 2, 0]
        assert found.passes == L - 2
    with pytest.raises(ValueError, match="nothing to generate"):
        lm.sample(num_samples=2, prompt=full)


def test_infill_keeps_the_text_at_its_place(free: LanguageModel) -> None:
    text = "The ____ fox ____!!"
    found = free.infill(text, tokens_per_blank=(3, 2), num_samples=6)
    consistent(free, found, 6)
    for row, steps in zip(found.tokens, found.steps):
        assert BYTES.decode(row[:4]) == "The "
        assert BYTES.decode(row[7:12]) == " fox "
        assert BYTES.decode(row[14:]) == "!!"
        assert sorted(i for step in steps for i in step) == [4, 5, 6, 12, 13]
    assert len(set(found.texts)) == 6
    assert found.texts == [BYTES.decode(row) for row in found.tokens]


def test_the_space_before_a_blank_belongs_to_the_word_that_fills_it() -> None:
    words = tokenizer("bpe:264", ["the cat and the dog and the cat"] * 9)
    assert words.spaced
    assert not BYTES.spaced
    lm = LanguageModel(toy.network(words.vocab_size, L), toy.make("esolm", words.mask_id), words)
    for text in ("the ____ and ____ dog", "the____ and____ dog"):
        found = lm.infill(text, tokens_per_blank=(1, 2)).tokens[0]
        the, end, dog = (words.encode(piece) for piece in ("the", " and", " dog"))
        assert found[: len(the)] == the
        assert found[len(the) + 1 :][: len(end)] == end
        assert found[len(the) + 1 + len(end) + 2 :] == dog
    with pytest.raises(ValueError, match="length"):
        lm.sample(num_samples=1, length=3, tokens=[[None, 1]])


def test_infill_is_never_cut() -> None:
    """An end-of-sequence token in a blank leaves the text behind it."""
    lm = model("esolm")
    with torch.no_grad():
        lm.net.head.bias[EOS] += 1e3
    found = lm.infill("ab____cd", tokens_per_blank=2)
    assert found.tokens == [[*b"ab", EOS, EOS, *b"cd"]]
    assert found.texts[0] == "ab<|endoftext|><|endoftext|>cd"
    assert lm.sample(num_samples=1, prompt="ab").texts == ["ab"]


def test_only_a_drawn_end_token_ends_a_text() -> None:
    """A given one, such as the one that begins every training sequence, does not."""
    lm = model("mdlm")
    with torch.no_grad():
        lm.net.head.bias[ord("x")] += 1e3
    assert lm.sample(tokens=[[EOS, *b"ab", None, None]]).texts == ["<|endoftext|>abxx"]
    assert until([1, 2, 3, 2], 2) == [1]
    assert until([1, 2, 3, 2], 2, {0, 3}) == [1, 2, 3]
    assert until([1, 2, 3, 2], 2, {0}) == until([1, 2, 3, 2], None) == until([1, 2, 3, 2], 9) == [1, 2, 3, 2]


@pytest.mark.parametrize("blank", ["____", "<gap>", "?"])
def test_blanks_of_any_spelling_and_place(blank: str) -> None:
    lm = MODELS["esolm"]
    found = lm.infill(f"{blank}ab{blank}-{blank}c{blank}", blank, [1, 2, 3, 4])
    assert len(found.tokens[0]) == 14
    assert found.tokens[0][1:3] == [*b"ab"]
    assert found.tokens[0][9:10] == [*b"c"]
    assert len(lm.infill(blank, blank, 5).tokens[0]) == 5


def test_tokens_at_any_position(free: LanguageModel) -> None:
    rows = [[None, 65, None, None, 66, None, None, 67], [68, None, None, None], [None] * 12]
    found = free.sample(tokens=rows)
    consistent(free, found, 3)
    for row, ids, steps in zip(rows, found.tokens, found.steps):
        assert len(ids) == len(row)
        assert all(kept is None or kept == token for kept, token in zip(row, ids))
        assert sorted(i for step in steps for i in step) == [i for i, kept in enumerate(row) if kept is None]


def test_an_order_is_followed() -> None:
    for name in ("esolm", "esolm-A", "mdlm"):
        found = MODELS[name].sample(num_samples=2, length=5, sampler="order", order=[3, 1, 0, 4, 2])
        assert found.steps == [[[3], [1], [0], [4], [2]]] * 2
        found = MODELS[name].sample(sampler="order", order=[3, 1, 0, 4, 2], tokens=[[None, 65, None, None, None]])
        assert found.steps == [[[3], [0], [4], [2]]]
    found = MODELS["esolm"].sample(num_samples=2, length=5, sampler="left_to_right")
    assert found.steps == [[[0], [1], [2], [3], [4]]] * 2


def test_the_stream_is_the_sample(lm: LanguageModel) -> None:
    """What the steps commit, put together, with the prompt; and each event holds everything so far."""
    options = {"prompt": "ab", "seed": 3, "batch_size": 2}
    expected = lm.sample(num_samples=3, **options)
    tokens = [[*b"ab", *[None] * (L - 2)] for _ in range(3)]
    shown: list[int] = []
    for event in lm.stream(num_samples=3, **options):
        assert isinstance(event, Event)
        assert event.step == shown.count(event.first)
        shown.append(event.first)
        at, token, drawn = event.committed[:3]
        assert drawn.any()
        for b, column in drawn.nonzero().tolist():
            row, i = tokens[event.first + b], int(at[b, column])
            assert row[i] is None  # nothing is drawn twice
            row[i] = int(token[b, column])
        for b, ids in enumerate(event.tokens.tolist()):
            assert ids == [MASK if t is None else t for t in tokens[event.first + b]]
        assert event.schedule.nfe.tolist() == expected.nfe[event.first : event.first + 2]
    assert tokens == expected.tokens
    assert len(shown) == expected.passes
    same(collect(lm, lm.stream(num_samples=3, **options)), expected)


def test_a_stream_may_be_left_early_and_holds_no_mode() -> None:
    """Between events the caller computes as ever: no inference mode, gradients on."""
    stream = MODELS["esolm"].stream(num_samples=2)
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    other = MODELS["esolm"].sample(num_samples=2, seed=1)  # and may sample something else meanwhile
    next(stream)
    same(other, MODELS["esolm"].sample(num_samples=2, seed=1))
    stream.close()


def test_infill_streams_too(free: LanguageModel) -> None:
    text = "ab____cd"
    expected = free.infill(text, tokens_per_blank=4, num_samples=2)
    events = list(free.infill_stream(text, tokens_per_blank=4, num_samples=2))
    assert len(events) == expected.passes
    assert events[-1].tokens.tolist() == expected.tokens


def test_wrong_requests_fail_before_any_work(lm: LanguageModel) -> None:
    """The stream is refused when it is asked for, not when it is first looked at."""
    with pytest.raises(ValueError, match="has no sampler"):
        lm.stream(num_samples=1, sampler="gibbs")


def test_seeds(lm: LanguageModel) -> None:
    one = lm.sample(num_samples=4, seed=1)
    same(one, lm.sample(num_samples=4, seed=1))
    two = lm.sample(num_samples=4, seed=2)
    assert not any(a == b for a, b in zip(one.tokens, two.tokens))


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "esolm": [{}, {"num_steps": 4, "alpha_0": 1.0, "top_p": 0.9}, {"sampler": "block", "parallelism": 3}],
    "any_order": [{"num_steps": 4}, {"sampler": "ancestral"}],
    "esolm-A": [{}, {"num_steps": 4}, {"sampler": "ancestral"}],
    "mdlm": [{}, {"num_steps": 4, "temperature": 0.7, "top_k": 20}, {"sampler": "ancestral"}],
    "bd3lm": [{}, {"num_steps": 8}, {"sampler": "ancestral"}],
    "ar": [{}, {"top_p": 0.5}],
}


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", SYSTEMS)
def test_batches_do_not_matter(name: str) -> None:
    """In float64, exactly: any batch size, any number of samples; prompts and rows of different length."""
    lm = MODELS[name]
    prompts = ["", "abc", "a", "abcdefg", ""]
    rows: list[list[int | None]] = [[65, *[None] * n] for n in (11, 2, 7, 5, 9)]
    for options in OPTIONS[name]:
        together = lm.sample(num_samples=5, prompt=prompts, **options)
        ragged = lm.sample(tokens=rows, **options)
        for batch_size in (1, 2, 3):
            same(lm.sample(num_samples=5, prompt=prompts, batch_size=batch_size, **options), together)
            same(lm.sample(tokens=rows, batch_size=batch_size, **options), ragged)
        fewer = lm.sample(num_samples=2, prompt=prompts[:2], **options)
        assert fewer.tokens == together.tokens[:2]
        assert fewer.steps == together.steps[:2]


@pytest.mark.parametrize("name", ["esolm", "mdlm"])
def test_an_order_for_rows_of_different_length(name: str) -> None:
    """It is a permutation of the longest row's positions, whatever the batches are."""
    rows: list[list[int | None]] = [[None] * 3, [None] * 5]
    options = {"sampler": "order", "order": [4, 2, 0, 3, 1]}
    found = MODELS[name].sample(tokens=rows, batch_size=1, **options)
    assert found.steps == [[[2], [0], [1]], [[4], [2], [0], [3], [1]]]
    same(found, MODELS[name].sample(tokens=rows, **options))


def test_what_stands_beside_a_row_does_not_decide_its_steps() -> None:
    """T defaults to the row's own length: a short row is drawn alike alone and beside a long one."""
    for name in ("esolm", "mdlm", "esolm-A"):
        lm = MODELS[name]
        alone = lm.sample(num_samples=1, length=6, sampler="ancestral")
        beside = lm.sample(tokens=[[None] * 6, [None] * 15], sampler="ancestral")
        assert (alone.tokens[0], alone.steps[0]) == (beside.tokens[0], beside.steps[0])


def test_temperature_and_nucleus_reach_the_draw(lm: LanguageModel) -> None:
    greedy = lm.sample(num_samples=2, temperature=0)
    same(greedy, lm.sample(num_samples=2, top_k=1))
    same(greedy, lm.sample(num_samples=2, top_p=1e-9))
    assert greedy.tokens != lm.sample(num_samples=2).tokens
    assert lm.sample(num_samples=2, temperature=0.5).tokens != lm.sample(num_samples=2).tokens


def test_given_order_is_part_of_the_request() -> None:
    """It changes what (B) draws, and nothing in (A), whose given tokens see each other."""
    rows = [[65, None, 66, None, 67, None, 68, None]] * 4
    for name, differs in (("esolm", True), ("esolm-A", False), ("mdlm", False)):
        one, two = (MODELS[name].sample(tokens=rows, given_order=order) for order in ("random", "ascending"))
        assert (one.tokens != two.tokens) == differs
        assert one.steps == two.steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0; it must be at least 1"),
        ({"length": 0}, "length is 0; it must be at least 1"),
        ({"length": 4, "prompt": "hello"}, "the prompt has 5 tokens and length is 4: shorten it, or raise length"),
        ({"num_samples": 3, "prompt": ["a", "b"]}, "2 prompts for 3 samples"),
        ({"tokens": [[1, None]], "prompt": "a"}, "prompt"),
        ({"num_samples": 2, "tokens": [[1, None]]}, "num_samples"),
        ({"num_samples": 2, "tokens": [[1, None], []]}, "a row of tokens is empty"),
        ({"tokens": [[258, None]]}, "token 258 is not one of"),
        ({"tokens": [[-1, None]]}, "token -1 is not one of"),
        ({"tokens": [[MASK, None]]}, "token 257 is not one of"),
        ({"tokens": [[1, 2]]}, "nothing to generate"),
        ({"alpha_0": 1.5}, r"alpha_0 is 1\.5; it must be between 0 and 1"),
        ({"alpha_0": -0.5}, r"alpha_0 is -0\.5; it must be between 0 and 1"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"temperature": -1}, "temperature is -1; it must be 0"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"num_steps": 0}, "num_steps is 0; it must be at least 1"),
        ({"sampler": "gibbs"}, "esolm has no sampler 'gibbs'"),
        ({"sampler": "block"}, "sampler block needs parallelism"),
        ({"sampler": "block", "parallelism": 2, "num_steps": 3}, "does not use num_steps"),
        ({"sampler": "left_to_right", "alpha_0": 0.5}, "does not use alpha_0"),
        ({"sampler": "order"}, "sampler order needs order"),
        ({"sampler": "order", "order": [0, 1]}, r"order must be a permutation of 0 \.\. 15"),
        ({"sampler": "order", "order": [0] * 16}, r"order must be a permutation of 0 \.\. 15"),
        ({"order": list(range(16))}, "sampler first_hitting of esolm does not use order"),
        ({"given_order": "sorted"}, "given_order is 'sorted'; it must be one of random, ascending"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ],
)  # fmt: skip
def test_wrong_requests_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODELS["esolm"].sample(**options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ar", {"tokens": [[None, 65, None]]}, "given tokens must come first"),
        ("ar", {"given_order": "random"}, "given_order is 'random'"),
        ("ar", {"num_steps": 4}, "sampler left_to_right of ar does not use num_steps"),
        ("ar", {"sampler": "first_hitting"}, "ar has no sampler 'first_hitting'"),
        ("mdlm", {"alpha_0": 0.5}, "does not use alpha_0"),
        ("bd3lm", {"length": 15}, "length 15 is not a multiple of block_size 4"),
        ("bd3lm", {"num_steps": 3}, "num_steps is 3; 4 blocks need at least 4"),
    ],
)
def test_what_a_system_cannot_do(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODELS[name].sample(**options)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("no blank", {}, "the text has no blank: mark what is to be filled in with '____'"),
        ("a ____ b", {"tokens_per_blank": 0}, r"tokens_per_blank is \[0\]; the text has 1 blanks: give a number"),
        ("a ____ b", {"tokens_per_blank": [1, 2]}, r"tokens_per_blank is \[1, 2\]; the text has 1 blanks"),
        ("a ____ b ____", {"tokens_per_blank": [1, 0]}, "each has at least one token"),
        ("a ____ b", {"num_samples": 0}, "num_samples is 0"),
    ],
)
def test_wrong_infills_say_what_is_allowed(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODELS["esolm"].infill(text, **options)


def test_ar_fills_in_only_what_comes_last() -> None:
    assert MODELS["ar"].infill("abc____", tokens_per_blank=2).texts[0].startswith("abc")
    with pytest.raises(ValueError, match="given tokens must come first"):
        MODELS["ar"].infill("abc____d")


def test_a_loaded_model_samples_as_the_one_that_was_saved(tmp_path: Any) -> None:
    for name in ("esolm", "bd3lm"):
        lm = model(name, torch.float32)
        run = tmp_path / name
        run.mkdir()
        BYTES.save(run)
        fields = {"name": SYSTEMS[name][0], **dataclasses.asdict(lm.system)}
        state = {"identity": {"net": dataclasses.asdict(lm.net.config), "system": fields}, "metric": 1.0}
        raw = {key: value + 1 for key, value in lm.net.state_dict().items()}
        checkpoint.save(run / "checkpoints", 1, {"model": raw, "ema": lm.net.state_dict()}, state, keep=1)
        found = load(run)
        assert found.system == lm.system
        assert not found.net.training
        same(found.sample(num_samples=3), lm.sample(num_samples=3))
        assert load(run, weights="model").sample(num_samples=3).tokens != lm.sample(num_samples=3).tokens
        for options, message in [({"weights": "raw"}, "'ema' or 'model'"), ({"which": "first"}, "'best' or 'last'")]:
            with pytest.raises(ValueError, match=message):
                load(run, **options)
    with pytest.raises(ValueError, match="is not a folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"neither a run.*nor a model"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "config.yaml").write_text("steps: 1\n")
    with pytest.raises(ValueError, match="has no checkpoint: train it first"):
        load(tmp_path / "empty")


def test_a_model_of_the_package_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name comes first."""
    lm = model("esolm", torch.float32)
    for home, change in ((tmp_path / "package", 0.0), (tmp_path / "here", 1.0)):
        net = copy.deepcopy(lm.net)
        with torch.no_grad():
            net.head.bias[0] += change
        (home / "small").mkdir(parents=True)
        folder.write(home / "small", net, lm.system, lm.tokenizer)
    monkeypatch.setattr("esolm.storage.folder.PACKAGED", tmp_path / "package")
    assert torch.equal(load("small").net.head.bias, lm.net.head.bias)
    with pytest.raises(ValueError, match=r"large is not a folder: .*small"):
        load("large")
    monkeypatch.chdir(tmp_path / "here")
    assert load("small").net.head.bias[0] == lm.net.head.bias[0] + 1


def test_rounded_weights_are_half_as_large_and_load_as_any(tmp_path: Path) -> None:
    lm = model("esolm", torch.float32)
    for name, dtype in (("whole", None), ("rounded", torch.bfloat16)):
        (tmp_path / name).mkdir()
        folder.write(tmp_path / name, lm.net, lm.system, lm.tokenizer, dtype=dtype)
    whole, rounded = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "rounded"))
    assert rounded < 0.7 * whole
    found = load(tmp_path / "rounded").net.state_dict()
    for name, value in lm.net.state_dict().items():
        assert torch.equal(found[name], value.bfloat16().float())


# Convenience


def test_the_prompt_comes_first_and_prompts_say_how_many() -> None:
    lm = MODELS["esolm"]
    assert lm.sample("ab").tokens == lm.sample(prompt="ab", num_samples=1).tokens
    assert lm.sample(["ab", "cd"]).tokens == lm.sample(["ab", "cd"], num_samples=2).tokens
    assert len(lm.sample("ab", 3)) == 3
    with pytest.raises(ValueError, match="num_samples="):
        lm.sample(3)  # type: ignore[arg-type]


def test_several_texts_are_filled_in_each_several_times() -> None:
    lm = MODELS["esolm"]
    found = lm.infill(["a____b", "c____"], tokens_per_blank=2, num_samples=2)
    assert [text[0] for text in found.texts] == ["a", "a", "c", "c"]
    assert [len(tokens) for tokens in found.tokens] == [4, 4, 3, 3]


@pytest.mark.parametrize("underscores", [4, 5, 8, 19])
def test_a_run_of_underscores_is_one_blank(underscores: int) -> None:
    found = MODELS["esolm"].infill(f"a{'_' * underscores}b", tokens_per_blank=1)
    assert len(found.tokens[0]) == 3


def test_unknown_options_and_short_reprs() -> None:
    lm = MODELS["esolm"]
    with pytest.raises(TypeError, match="promt"):
        lm.sample(promt="a")  # type: ignore[call-arg]
    assert len(repr(lm.sample(num_samples=9))) < 200
    assert len(repr(lm.log_prob(["ab"] * 9))) < 200


def test_many_samples_are_planned_as_they_are_needed() -> None:
    """A hundred million samples cost no memory until they are drawn."""
    events = MODELS["esolm"].stream(num_samples=100_000_000, batch_size=2)
    assert next(events).tokens.shape == (2, L)


def test_not_a_number_names_the_step() -> None:
    lm = model("esolm")
    with torch.no_grad():
        lm.net.head.weight.fill_(float("nan"))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="step 0"):
        lm.sample()


def test_another_alpha_0_than_the_one_kappa_was_pinned_to() -> None:
    lm = LanguageModel(MODELS["esolm"].net, toy.make("esolm", BYTES.mask_id, alpha_0=1.0, kappa=1.0), BYTES)
    assert lm.log_prob("abc", alpha_0=0.3).total < 0
    assert lm.at(0.3).system.alpha_0 == 0.3  # type: ignore[attr-defined]


def test_an_option_that_does_not_exist_gets_a_suggestion() -> None:
    lm = MODELS["esolm"]
    with pytest.raises(TypeError, match=r"no sampling option 'num_sample': did you mean num_samples\?"):
        lm.sample(num_sample=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'tokens_per_blanks': did you mean tokens_per_blank\?"):
        lm.infill("a ____ b", tokens_per_blanks=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'zzz': choose from sampler, "):
        lm.blank_lengths("a ____ b", 2, zzz=2)  # type: ignore[call-arg]
