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
from esolm.tune.options import Reward
from esolm.tune.pool import Pool

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
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    wrapped.save_pretrained(path)
    return str(path)


def test_nats_do_not_depend_on_the_batch(folder: str) -> None:
    outside = load_causal(folder)
    texts = ["a longer text", "b", "", "two words"]
    nats, counts, long, cut = judged_nats(outside, texts, batch_size=3)
    assert (long, cut) == (0, 0)
    assert counts.tolist() == [13, 1, 0, 9]
    for text, value in zip(texts, nats.tolist()):
        ids = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            log_p = outside.model(ids).logits.log_softmax(-1)[0]
        expected = -sum(log_p[i, token].item() for i, token in enumerate(text.encode()))
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert nats[0] > 1


@pytest.mark.slow
def test_as_a_reward(folder: str) -> None:
    """Minus the nats per token, in the processes of a pool, and the floor for a text without tokens."""
    texts = ["a longer text", "b", ""]
    nats, counts, *_ = judged_nats(load_causal(folder), texts, batch_size=3)
    with Pool(Reward("judge", json.dumps({"model": folder, "floor": -100.0}), workers=1, timeout=120.0)) as pool:
        found = pool(texts, [{}] * 3)
    assert [scored.reward for scored in found[:2]] == pytest.approx((-nats / counts)[:2].tolist())
    assert found[2].reward == -100
    assert [scored.parts["judged"] for scored in found] == [13, 1, 0]


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
    (nats,), (count,), long, cut = judged_nats(outside, [text], batch_size=2)
    assert (count, long, cut) == (length, int(length > 63), 0)
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


EOS = 256
TEXTS = {"short": "abcdefgh", "full": "ab" * 31 + "cd", "long": "".join(chr(97 + i * i % 26) for i in range(640))}
"""With a judge of 64 positions: as many tokens as those of the paper's samples have for one of 1024, and ten times."""


def by_hand(folder: str, ids: list[int], chunk: int, bos: bool, first: bool, every_eos: bool) -> tuple[float, int]:
    """Nats and number of scored tokens of a text that is scored in chunks, one token after another."""
    model, nats, count = load_causal(folder).model, 0.0, 0
    for k in range(0, len(ids), chunk):
        part, seen = ids[k : k + chunk], 0
        whole = [EOS] * bos + part
        with torch.no_grad():
            log_p = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        for i, token in enumerate(part):
            seen += token == EOS
            if i + bos == 0 or (i == 0 and not first) or (not every_eos and token == EOS and seen > 1):
                continue
            nats -= log_p[i + bos - 1, token].item()
            count += 1
    return nats, count


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("long", ["chunks", "cut"])
def test_chunks_and_cut_texts(folder: str, name: str, bos: bool, first: bool, long: str) -> None:
    text, room = TEXTS[name], 64 - bos
    ids = [*text.encode()]
    found = judged_nats(load_causal(folder), [text], 3, long, None, bos, first)
    expected, count = by_hand(folder, ids[:room] if long == "cut" else ids, room, bos, first, True)
    assert found.nats.item() == pytest.approx(expected, rel=1e-5)
    assert found.counts.item() == count
    assert (found.long, found.cut) == (len(ids) > room, long == "cut" and len(ids) > room)


@pytest.mark.parametrize("long", ["windows", "chunks", "cut"])
def test_texts_are_cut_to_max_tokens(folder: str, long: str) -> None:
    """20 tokens of the 640, as if the text ended there."""
    outside = load_causal(folder)
    cut = judged_nats(outside, [TEXTS["long"], "abc"], 2, long, max_tokens=20)
    short = judged_nats(outside, [TEXTS["long"][:20], "abc"], 2, long)
    assert torch.equal(cut.nats, short.nats)
    assert (cut.counts.tolist(), cut.cut) == ([20, 3], 1)


def samples_with_eos(tmp_path) -> tuple[str, list[list[int]]]:
    """Samples of `bytes` with text after EOS, and several EOS; `text` ends at the first, as `esolm sample` does it."""
    rows = [[*b"abc", EOS, *b"de", EOS, EOS, *b"f" * 70], [EOS, *b"gh", EOS], [*b"ij"]]
    made = tokenizer("bytes")
    assert made.eos_id == EOS
    texts = [bytes(row[: row.index(EOS) if EOS in row else None]).decode() for row in rows]
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(json.dumps({"text": t, "tokens": row}) for t, row in zip(texts, rows)))
    return str(file), rows


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", ["first", "all"])
def test_whole_samples_with_eos(folder: str, tmp_path, bos: bool, eos: str) -> None:
    """As the authors do with bos false, eos first: chunks without BOS, in each only the first EOS is scored."""
    file, rows = samples_with_eos(tmp_path)
    options = {"tokenizer": "bytes", "long": "chunks", "bos": bos, "eos": eos}
    found = judge(file, folder, **options)
    nats, counts = zip(*(by_hand(folder, row, 64 - bos, bos, True, eos == "all") for row in rows))
    assert found["tokens"] == sum(counts)
    assert found["nats"] == pytest.approx(sum(nats) / sum(counts), rel=1e-5)
    assert (found["samples"], found["long_texts"], found["cut_texts"]) == (3, 1, 0)
    cut = judge(file, folder, bos=bos, long="chunks")
    assert cut["tokens"] == 5 if bos else 3
    assert cut["empty_texts"] == 1
    assert cut["entropy"] == found["entropy"]  # of all tokens of the samples


def test_the_options_of_the_command(folder: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = samples_with_eos(tmp_path)
    words = ["judge", file, folder, "--json", "--tokenizer=bytes", "--eos=first", "--long=chunks", "--bos=false"]
    assert cli.main([*words, "--max_tokens=50"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cut_texts"], found["bits_per_byte"]) == (1, None)
    for wrong in (
        ["judge", file, folder, "--eos=all"],
        ["judge", file, folder, "--max_tokens=0"],
        ["judge", file, folder, "--long=x"],
    ):
        assert cli.main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "real.txt").write_text("abc")
    assert cli.main(["judge", str(tmp_path / "real.txt"), folder, "--tokenizer=bytes", "--eos=all"]) == 2


def test_only_empty_texts_are_an_error(folder: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"text": "", "tokens": []}\n{"text": "", "tokens": []}\n')
    assert cli.main(["judge", str(file), folder, "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "none of the 2 texts" in printed.err
