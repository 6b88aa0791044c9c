"""The outside judge: nats do not depend on the batch, long texts are scored in windows, entropy shows repetition."""

from __future__ import annotations

import json
import math

import pytest
import torch

from esolm import cli
from esolm.data.tokenizer import tokenizer
from esolm.metrics.judge import entropy, judge, judged_nats
from esolm.metrics.outside_models import load_causal
from esolm.metrics.samples import read_samples

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 with random weights and a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=258, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    model = transformers.GPT2LMHeadModel(config)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.5)
    model.save_pretrained(path)
    core = tokenizer("bytes").core
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|endoftext|>")
    wrapped.save_pretrained(path)
    return str(path)


def test_nats_do_not_depend_on_the_batch(folder: str) -> None:
    outside = load_causal(folder)
    texts = ["a longer text", "b", "", "two words"]
    nats, counts, long_texts = judged_nats(outside, texts, batch_size=3)
    assert long_texts == 0
    assert counts.tolist() == [13, 1, 0, 9]
    for text, value in zip(texts, nats.tolist()):
        ids = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            log_p = outside.model(ids).logits.log_softmax(-1)[0]
        expected = -sum(log_p[i, token].item() for i, token in enumerate(text.encode()))
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert nats[0] > 1


def test_real_texts_are_judged_as_samples_are(folder: str, tmp_path) -> None:
    """A corpus with a tokenizer gives what its documents give as samples; num_texts takes the first ones."""
    texts = ["aaaa", "abcd", "xyz"]
    (tmp_path / "real.txt").write_text("\n<end>\n".join(texts))
    samples = [json.dumps({"text": text, "tokens": [*text.encode()]}) for text in texts[:2]]
    (tmp_path / "samples.jsonl").write_text("\n".join(samples))
    found = judge(str(tmp_path / "real.txt"), folder, tokenizer="bytes", delimiter="<end>", num_texts=2)
    assert found == judge(str(tmp_path / "samples.jsonl"), folder)


def test_judge_of_a_file(folder: str, tmp_path) -> None:
    file = tmp_path / "samples.jsonl"
    samples = [{"text": text, "tokens": [*text.encode()]} for text in ("aaaa", "abcd")]
    file.write_text("\n".join(map(json.dumps, samples)))
    found = judge(str(file), folder)
    assert found["samples"] == 2
    assert found["entropy"] == pytest.approx((0 + math.log(4)) / 2)
    assert found["generative_perplexity"] == pytest.approx(math.exp(found["nats"]))
    assert found["bits_per_byte"] == pytest.approx(found["nats"] / math.log(2))


def test_one_sample_has_no_standard_error(folder: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({"text": "abcd", "tokens": [1, 2, 3, 4]}))
    assert cli.main(["judge", str(file), folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["samples"], found["stderr"], found["entropy_stderr"]) == (1, None, None)


def test_lines_are_not_split_inside_a_text(tmp_path) -> None:
    sample = {"text": "a\u2028b\x85c", "tokens": [1]}
    (file := tmp_path / "samples.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n", "utf-8")
    assert read_samples(file) == [sample]


def test_entropy() -> None:
    assert entropy([7] * 9) == 0
    assert entropy(range(8)) == pytest.approx(math.log(8))


@pytest.mark.parametrize("content", [None, "", '{"text": "a"}', '{"text": "a", "tokens": 1}', "text", "[1]", "\xff"])
def test_wrong_files_name_the_file_and_the_command(tmp_path, content: str | None) -> None:
    file = tmp_path / "samples.jsonl"
    if content is not None:
        file.write_text(content, "latin-1")
    with pytest.raises(ValueError, match=r"samples\.jsonl.*esolm sample"):
        judge(str(file), str(tmp_path))


def test_a_folder_without_a_model_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=tmp_path.name):
        load_causal(str(tmp_path))
    with pytest.raises(ValueError, match=r"none\.gguf"):
        load_causal(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("length", [63, 64, 65, 100, 200])
def test_long_texts_are_scored_in_windows(folder: str, length: int) -> None:
    """64 positions: each token is scored once, after the start token or at least 32 tokens."""
    outside = load_causal(folder)
    text = "".join(chr(97 + i * i % 26) for i in range(length))
    (nats,), (count,), long_texts = judged_nats(outside, [text], batch_size=2)
    assert (count, long_texts) == (length, int(length > 63))
    ids = torch.tensor([256, *text.encode()])
    expected, end = 0.0, 1
    while end < len(ids):
        first, end = end, min(64 if end == 1 else end + 32, len(ids))
        with torch.no_grad():
            log_p = outside.model(ids[None, max(0, end - 64) : end]).logits[0].log_softmax(-1)
        where = range(first - max(0, end - 64), min(64, end))
        assert end <= 64 or where[0] >= 32
        expected -= sum(log_p[i - 1, ids[max(0, end - 64) + i]].item() for i in where)
    assert nats.item() == pytest.approx(expected, rel=1e-4)


def test_one_long_text_does_not_fail_the_file(folder: str, tmp_path) -> None:
    file = tmp_path / "samples.jsonl"
    texts = ["abcd", "x" * 300, "", "efgh"]
    file.write_text("\n".join(json.dumps({"text": text, "tokens": [*text.encode()]}) for text in texts))
    found = judge(str(file), folder)
    assert (found["samples"], found["long_texts"], found["empty_texts"]) == (4, 1, 1)
    assert all(math.isfinite(value) for value in found.values())


def test_only_empty_texts_are_an_error(folder: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"text": "", "tokens": []}\n{"text": "", "tokens": []}\n')
    assert cli.main(["judge", str(file), folder, "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "none of the 2 texts" in printed.err
