"""Adapting a left-to-right model: the first step changes nothing, the vocabulary may shrink, alpha_0 rises."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from esolm import cli
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.data import tokenizer
from esolm.interop.convert import convert
from esolm.interop.vocabulary import cut, needed, parts
from esolm.net.protocol import trainable
from esolm.storage import folder
from esolm.storage.models import read_model
from esolm.systems import find
from support import causal, toy

TEXTS = ["the cat sat on the mat", "a cat and a hat and a bat", "that mat is the cat's mat"]
LLAMA: dict[str, Any] = {
    "norm": "rms", "mlp": "swiglu", "mlp_bias": False, "head_bias": False, "tied": True, "adaln": False, "kv_heads": 1,
}  # fmt: skip


def bpe(texts: list[str], size: int) -> Any:
    return tokenizer(f"bpe:{size}", texts)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A left-to-right network of Llama's shape with a tokenizer that knows more than TEXTS needs."""
    words = bpe([*TEXTS * 20, "zebras zigzag quietly through zoos " * 20], 290)
    net = toy.network(words.vocab_size, 16, torch.float32, **LLAMA)
    system = find("ar")(mask_id=words.mask_id, bos_id=words.bos_id, first="bos")
    path = tmp_path / "model"
    path.mkdir()
    folder.write(path, net, system, words, {})
    return path


@pytest.fixture
def data(tmp_path: Path, model: Path) -> Path:
    return prepared(tmp_path, model)


def prepared(tmp_path: Path, model: Path) -> Path:
    """TEXTS in the tokens of a model."""
    for name, texts in (("train", TEXTS * 40), ("valid", [f"{text} too" for text in TEXTS * 4])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "data"
    words = [str(tmp_path / "train.jsonl"), str(path), "--tokenizer", str(model), "--length", "16"]
    assert cli.main(["prepare", *words, "--valid", str(tmp_path / "valid.jsonl")]) == 0
    return path


def adapt(model: Path, run: Path, data: Path, *options: str) -> int:
    small = ("--steps=4", "--batch.size=8", "--validation.every=2", "--system.curriculum=3", "--compute.threads=1")
    return cli.main(["adapt", str(model), str(run), "--data", str(data), *small, *options])


def test_likely_mistakes_are_named(model: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert adapt(model, run, data, "--system.curriculum=40", "--optim.warmup=4") == 0
    said = capsys.readouterr().out
    assert "system.curriculum is 40 and steps is 4" in said
    assert "optim.warmup is 4 and steps is 4" in said
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "| trained from | model |" in (tmp_path / "out" / "README.md").read_text()
    for options, word in ((["--run", "x"], "leave out --run"), (["--max_steps", "3"], "did you mean --steps?")):
        assert adapt(model, run, data, *options) == 2
        assert word in capsys.readouterr().err
    assert cli.main(["adapt", str(model), str(run), "--data", str(tmp_path / "none")]) == 2
    assert f"--tokenizer {model}" in capsys.readouterr().err
    assert cli.main(["convert", str(model), str(tmp_path / "again")]) == 2
    assert "is already a model of esolm" in capsys.readouterr().err


def test_before_the_first_step_it_is_the_checkpoint(model: Path, tmp_path: Path, data: Path) -> None:
    """Left to right, a shifted query gives the likelihood of the original, token by token."""
    stored = read_model(model)
    system = find("esolm")(
        mask_id=stored.system.mask_id, bos_id=stored.tokenizer.bos_id, query="shift", first="bos", alpha_0=0.0
    )
    x, rng = toy.text(5, 16, stored.net.config.vocab_size - 1), Randomness(0, 0, 5)
    net = stored.net.double()
    with torch.no_grad():
        (before,), after = stored.system.terms(net, Batch(x), rng, False), system.terms(net, Batch(x), rng, False)
    torch.testing.assert_close(sum(term.nats for term in after), before.nats, rtol=1e-10, atol=1e-10)


def test_the_first_validation_is_the_score_of_the_converted_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way with the commands: a checkpoint of transformers is converted, and before its first step `adapt`
    finds at alpha_0 = 0 what `score` finds for the left-to-right model, to float32's rounding."""
    causal.save("llama", tmp_path / "theirs")
    model, run = tmp_path / "converted", tmp_path / "run"
    assert cli.main(["convert", str(tmp_path / "theirs"), str(model)]) == 0
    data = prepared(tmp_path, model)
    assert adapt(model, run, data, "--steps=1", "--validation.batches=null", "--compute.precision=float32") == 0
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    capsys.readouterr()
    assert cli.main(["score", str(model), str(data), "--length=16", "--json"]) == 0
    (scored,) = json.loads(capsys.readouterr().out)
    assert first["validation"]["alpha_0"]["0"] == pytest.approx(scored["nats"], abs=1e-5)


def test_a_run(model: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert adapt(model, run, data) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [record["validation"] for record in records if "validation" in record]
    assert [set(found["alpha_0"]) for found in validations] == [{"0", "0.25"}] * 3  # also before the first step
    stored = read_model(run)
    assert (stored.system.name, stored.net.config.kv_heads) == ("esolm", 1)
    capsys.readouterr()
    assert cli.main(["sample", str(run), "--length", "12", "--num_samples", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["texts"]) == 2


def test_a_preset(model: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adapt", str(model), str(tmp_path / "run"), "--data", str(data), "--print_config"]
    found = []
    for more in ([], ["--preset", "adapt"], ["--preset=adapt-smollm2-135m", "--optim.lr=0.5"]):
        assert cli.main([*words, *more]) == 0
        found.append(yaml.safe_load(capsys.readouterr().out))
    assert found[0] == found[1]
    small = found[2]
    assert (small["steps"], small["optim"]["lr"], small["init"]) == (8000, 0.5, str(model))
    assert cli.main([*words, "--preset", "adapts"]) == 2
    assert "adapt-smollm2-135m" in capsys.readouterr().err


def test_a_preset_that_adapts_needs_a_model(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (file := tmp_path / "mine.yaml").write_text("base: adapt\nsteps: 1\n")
    words = ["--data", str(data), "--run", str(run), "--validation.batches=1", "--compute.threads=1", "--batch.size=8"]
    for preset in ("adapt", "adapt-llama-1b", str(file)):
        assert cli.main(["train", preset, *words, "--optim.lr=1e-3"]) == 2
        assert "--init MODEL" in capsys.readouterr().err
    assert not run.exists()
    scratch = ["--net.layers=1", "--net.width=32", "--net.heads=2"]
    assert cli.main(["train", str(file), *words, *scratch]) == 0
    assert cli.main(["train", "adapt", *words, "--steps=1"]) == 2  # the run exists, and has other sizes
    assert "net.layers" in capsys.readouterr().err


def test_a_system_without_alpha_0(model: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The preset validates at some; the error names the option that is to be emptied."""
    words = ["adapt", str(model), str(tmp_path / "run"), "--data", str(data), "--system.name=mdlm", "--steps=1"]
    assert cli.main(words) == 2
    assert "--validation.alpha_0 '[]'" in capsys.readouterr().err
    assert cli.main([*words, "--validation.alpha_0", "[]", "--validation.batches=1", "--batch.size=8"]) == 0


def test_resuming_changes_no_bit(model: Path, tmp_path: Path, data: Path) -> None:
    assert adapt(model, tmp_path / "whole", data) == 0
    assert adapt(model, tmp_path / "parts", data, "--optim.schedule=constant") == 0
    assert adapt(model, tmp_path / "one", data, "--optim.schedule=constant", "--steps=2") == 0
    assert adapt(model, tmp_path / "one", data, "--optim.schedule=constant") == 0
    one, two = (read_model(tmp_path / name, "model", "last").net.state_dict() for name in ("parts", "one"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_distillation(model: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It resumes exactly, weight 0 changes nothing, and it needs a model and shifted queries."""
    plainly = ("--optim.schedule=constant", "--compute.precision=float32")  # in bf16 the KL begins at rounding errors
    options = ("--distill.weight=2", "--log_every=1", *plainly)
    assert adapt(model, tmp_path / "whole", data, *options) == 0
    assert adapt(model, tmp_path / "parts", data, *options, "--steps=2") == 0
    assert adapt(model, tmp_path / "parts", data, *options) == 0
    assert adapt(model, tmp_path / "plain", data, *plainly) == 0
    assert adapt(model, tmp_path / "zero", data, *plainly, "--distill.weight=0") == 0
    names = ("whole", "parts", "plain", "zero")
    whole, parts, plain, zero = (read_model(tmp_path / name, "model", "last").net.state_dict() for name in names)
    assert all(torch.equal(whole[name], parts[name]) and torch.equal(plain[name], zero[name]) for name in whole)
    assert any(not torch.equal(whole[name], plain[name]) for name in whole)
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    kl = [record["terms"]["distill"] for record in records if "terms" in record]
    assert len(kl) == 4
    assert 0 <= kl[0] < 1e-6 < kl[-1]
    assert {"distill", "any_order"} == set(records[1]["terms"])
    assert all("distill" not in record["validation"]["terms"] for record in records if "validation" in record)
    assert adapt(model, tmp_path / "parts", data, *plainly, "--steps=9", "--distill.weight=1") == 2
    assert "distill.weight" in capsys.readouterr().err
    assert (
        adapt(model, tmp_path / "mask", data, "--distill.weight=1", "--system.query=mask", "--system.first=mask") == 2
    )
    assert "query shift" in capsys.readouterr().err
    run = ["--run", str(tmp_path / "scratch"), "--data", str(data)]
    assert cli.main(["train", "adapt", "--distill.weight=1", *run]) == 2
    assert "--init" in capsys.readouterr().err
    shutil.move(model, tmp_path / "gone")
    assert adapt(model, tmp_path / "parts", data, *options, "--steps=9") == 2  # the teacher is gone


def test_checkpoints_of_others_are_named(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert adapt(tmp_path / "llama", tmp_path / "run", data) == 2
    assert "esolm convert" in capsys.readouterr().err
    assert cli.main(["adapt", "--data", str(data)]) == 2
    assert not (tmp_path / "run").exists()


def test_alpha_0_rises() -> None:
    system = find("esolm")(mask_id=6, loss="any_order", alpha_0=1.0, mixture=(0, 0.25, 1), curriculum=8)
    assert [system.at_step(step).mixture for step in (0, 1, 4, 8, 99)] == [
        (0, 0, 0), (0, 0.125, 0.125), (0, 0.25, 0.5), (0, 0.25, 1), (0, 0.25, 1),
    ]  # fmt: skip
    plain = find("esolm")(mask_id=6, loss="any_order", alpha_0=0.5, curriculum=4)
    assert [plain.at_step(step).mixture for step in (0, 1, 4)] == [(0,), (0.25,), None]
    for wrong in ({"curriculum": -1}, {"curriculum": 2, "loss": "two_term"}):
        with pytest.raises(ValueError, match="curriculum"):
            find("esolm")(mask_id=6, **{"loss": "any_order", **wrong})


def test_parts_are_the_merges_that_happen() -> None:
    rank = {("a", "b"): 0, ("ab", "c"): 1, ("b", "c"): 2, ("a", "bc"): 3}
    assert parts("abc", rank) == {"a", "b", "c", "ab", "abc"}
    assert parts("xyz", rank) == {"x", "y", "z", "xyz"}


def test_a_cut_vocabulary_keeps_the_texts(model: Path) -> None:
    """The same tokens for the texts, the same logits for these tokens, and other texts can still be written."""
    stored = read_model(model)
    net, words = cut(stored.net, stored.tokenizer, TEXTS)
    old = stored.tokenizer
    assert 257 < words.vocab_size < old.vocab_size == stored.net.config.vocab_size
    index = torch.tensor(needed(old, TEXTS))
    for text in TEXTS:
        ids = words.encode(text)
        assert index[ids].tolist() == old.encode(text)
        assert words.decode(ids) == text
        few = find("ar")(mask_id=words.mask_id, bos_id=words.bos_id, first="bos")
        with torch.no_grad():
            found = few.logits(net, Batch(torch.tensor([ids])))
            expected = stored.system.logits(stored.net, Batch(torch.tensor([old.encode(text)])))
        torch.testing.assert_close(found, expected[..., index])
    assert words.decode(words.encode("zebras é 猫")) == "zebras é 猫"
    assert [old.core.id_to_token(i) for i in (old.mask_id, old.eos_id)] == [
        words.core.id_to_token(i) for i in (words.mask_id, words.eos_id)
    ]


def test_rare_pieces_are_cut_too(model: Path) -> None:
    """Pieces below the least count are gone, and texts are still spelled exactly."""
    stored = read_model(model)
    old = stored.tokenizer
    used = Counter(number for text in TEXTS for number in old.encode(text))
    net, words = cut(stored.net, old, TEXTS, 2)
    assert words.vocab_size == net.config.vocab_size < len(needed(old, TEXTS))
    assert {number for number, count in used.items() if count > 1} <= set(needed(old, TEXTS, 2))
    assert [words.decode(words.encode(text)) for text in TEXTS] == list(TEXTS)
    with pytest.raises(ValueError, match="at least 1"):
        cut(stored.net, old, TEXTS, 0)


def test_a_cut_reads_delimited_documents(tmp_path: Path) -> None:
    """A cut by a text file with a delimiter is that by its documents, without the pieces of the delimiter."""
    words = bpe([*TEXTS * 20, "<|endoftext|> " * 40], 290)
    causal.write(causal.make("llama", vocab_size=words.vocab_size - 1), tmp_path / "theirs")
    (tmp_path / "words").mkdir()
    words.save(tmp_path / "words")
    (tmp_path / "texts.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    source, file, options = (
        str(tmp_path / "theirs"),
        str(tmp_path / "texts.txt"),
        {"tokenizer": str(tmp_path / "words")},
    )
    lm = convert(source, tmp_path / "ours", cut=file, delimiter="<|endoftext|>", **options)
    assert lm.tokenizer.vocab_size == len(needed(words, TEXTS))
    assert lm.tokenizer.vocab_size < convert(source, tmp_path / "more", cut=file, **options).tokenizer.vocab_size
    with pytest.raises(ValueError, match="delimiter"):
        convert(source, tmp_path / "none", delimiter="<|endoftext|>", **options)


def test_the_mask_of_a_cut_model_is_the_mean_of_what_the_texts_use(tmp_path: Path) -> None:
    """Bytes and special tokens that are only kept for other texts have no share in it."""
    words = bpe([*TEXTS * 20, "zebras zigzag quietly through zoos " * 20], 290)
    causal.write(causal.make("llama", vocab_size=words.vocab_size - 1), tmp_path / "theirs")
    (tmp_path / "words").mkdir()
    words.save(tmp_path / "words")
    (tmp_path / "texts.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    options = {"cut": str(tmp_path / "texts.txt"), "delimiter": "<|endoftext|>", "tokenizer": str(tmp_path / "words")}
    lm = convert(str(tmp_path / "theirs"), tmp_path / "ours", **options)
    used = sorted({number for text in TEXTS for number in lm.tokenizer.encode(text)})
    embedding = trainable(lm.net).state_dict()["embed.weight"]
    assert len(used) < len(embedding) - 200
    torch.testing.assert_close(embedding[lm.tokenizer.mask_id], embedding[used].mean(0))


def test_a_mask_that_was_trained_is_kept_by_a_cut(model: Path) -> None:
    stored = read_model(model)
    net, words = cut(stored.net, stored.tokenizer, TEXTS)
    before = stored.net.state_dict()["embed.weight"][stored.tokenizer.mask_id]
    assert torch.equal(net.state_dict()["embed.weight"][words.mask_id], before)


def test_only_bpe_can_be_cut(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    with pytest.raises(ValueError, match="WordPiece"):
        needed(tokenizer(str(tmp_path)), ["a b"])
