"""The outside judge: its nats are those of the texts alone, whatever the batch; entropy flags repetition."""

from __future__ import annotations

import json
import math

import pytest
import torch

from esolm import cli
from esolm.data.tokenizer import tokenizer
from esolm.metrics.judge import entropy, judge, judged_nats, load_judge, read

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


def test_nats_are_those_of_each_text_alone(folder: str) -> None:
    model, words = load_judge(folder)
    texts = ["a longer text", "b", "", "two words"]
    nats, counts = judged_nats(model.eval(), words, texts, batch_size=3)
    assert counts.tolist() == [13, 1, 0, 9]
    for text, value in zip(texts, nats.tolist()):
        ids = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            log_p = model(ids).logits.log_softmax(-1)[0]
        expected = -sum(log_p[i, token].item() for i, token in enumerate(text.encode()))
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert nats[0] > 1


def test_the_report_of_a_file(folder: str, tmp_path) -> None:
    file = tmp_path / "samples.jsonl"
    samples = [{"text": text, "tokens": [*text.encode()]} for text in ("aaaa", "abcd")]
    file.write_text("\n".join(map(json.dumps, samples)))
    found = judge(str(file), folder)
    assert found["samples"] == 2
    assert found["entropy"] == pytest.approx((0 + math.log(4)) / 2)
    assert found["generative_perplexity"] == pytest.approx(math.exp(found["nats"]))
    assert found["bits_per_byte"] == pytest.approx(found["nats"] / math.log(2))


def test_one_sample_has_no_error(folder: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({"text": "abcd", "tokens": [1, 2, 3, 4]}))
    assert cli.main(["judge", str(file), folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["samples"], found["stderr"], found["entropy_stderr"]) == (1, None, None)


def test_lines_are_not_split_inside_a_text(tmp_path) -> None:
    sample = {"text": "a\u2028b\x85c", "tokens": [1]}
    (file := tmp_path / "samples.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n", "utf-8")
    assert read(file) == [sample]


def test_entropy() -> None:
    assert entropy([7] * 9) == 0
    assert entropy(range(8)) == pytest.approx(math.log(8))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no file"), ("", r"samples\.jsonl"), ('{"text": "a"}', r"samples\.jsonl"), ("text", r"samples\.jsonl")],
)
def test_wrong_files_say_what_to_do(tmp_path, content: str | None, message: str) -> None:
    file = tmp_path / "samples.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        judge(str(file), str(tmp_path))


def test_a_folder_that_is_no_judge(tmp_path) -> None:
    with pytest.raises(ValueError, match="no judge could be loaded"):
        load_judge(str(tmp_path))


def test_a_text_too_long_for_the_judge(folder: str) -> None:
    model, words = load_judge(folder)
    with pytest.raises(ValueError, match="the judge takes 64"):
        judged_nats(model, words, ["x" * 64], 1)
