"""`esolm train --init`: a run that starts from the weights of a run, checkpoint or model, and resumes exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import esolm
from esolm import cli
from esolm.data import prepare
from esolm.storage import checkpoint
from esolm.training.config import RunConfig
from support import tiny

NET = ("--net.layers", "--net.width", "--net.heads", "--net.cond_width")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with data and a run to start from."""
    home = tmp_path_factory.mktemp("init")
    assert cli.main(tiny.command(tiny.make_data(home / "data"), home / "first")) == 0
    return home


def command(home: Path, run: Path, init: Path, *more: str, data: str = "data") -> list[str]:
    words = tiny.command(home / data, run, f"--init={init}", *more)
    return [word for word in words if word.partition("=")[0] not in NET]


def weights(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    last = checkpoint.latest(folder / "checkpoints")
    assert last is not None
    return checkpoint.load(last, stem)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def failing(capsys, argv: list[str]) -> str:
    assert cli.main(argv) == 2
    return capsys.readouterr().err


def test_the_initial_weights_are_those_of_a_run_checkpoint_or_model(home, tmp_path):
    assert cli.main(["export", str(home / "first"), str(tmp_path / "exported")]) == 0
    best = checkpoint.best(home / "first" / "checkpoints")
    expected = checkpoint.load(best, "ema")
    for name, init in {"run": home / "first", "checkpoint": best, "model": tmp_path / "exported"}.items():
        assert cli.main(command(home, tmp_path / name, init, "--steps=1", "--optim.lr=0")) == 0
        assert same(weights(tmp_path / name), expected)
    assert esolm.load(tmp_path / "model").net.config.layers == 2


def test_training_continues_from_the_weights(home, tmp_path):
    assert cli.main(command(home, tmp_path / "run", home / "first", "--optim.warmup=0")) == 0
    losses = [record["loss"] for record in tiny.outcome(tmp_path / "run")[1] if "loss" in record]
    first = [record["loss"] for record in tiny.outcome(home / "first")[1] if "loss" in record]
    assert losses[0] < first[0]


def test_another_system_and_a_longer_context(home, tmp_path):
    tiny.make_data(home / "long", length=4 * tiny.LENGTH)
    assert cli.main(command(home, tmp_path / "run", home / "first", "--system.name=mdlm", data="long")) == 0
    lm = esolm.load(tmp_path / "run")
    assert lm.net.config.length == 4 * tiny.LENGTH
    assert len(lm.sample(num_samples=1, seed=1).tokens[0]) == 4 * tiny.LENGTH


@pytest.mark.matrix(3)
@pytest.mark.parametrize("preset", ["owt-esolm-10240", "owt-bd3lm-10240", "xsum-esolm", "xsum-mdlm"])
def test_the_presets_that_fine_tune(home, tmp_path, preset):
    """The whole path of the paper's fine-tuning runs, at toy size: longer sequences, or summaries of given texts."""
    if preset.startswith("xsum"):
        lines = [json.dumps({"document": f"{i} is a number", "summary": f"no. {i}"}) for i in range(99)]
        (tmp_path / "xsum.jsonl").write_text("\n".join(lines))
        options = RunConfig.preset(preset).corpus.options.replace("--target_length 64", "--target_length 16").split()
        words = ["prepare", str(tmp_path / "xsum.jsonl"), str(tmp_path / "data"), "--tokenizer=bytes", "--length=40"]
        assert cli.main([*words, *options]) == 0
    else:
        tiny.make_data(tmp_path / "data", length=10 * tiny.LENGTH)
    small = ("--steps=2", "--batch.size=8", "--batch.micro=4", "--validation.batches=1", "--compute.precision=float32")
    argv = ["train", preset, f"--data={tmp_path / 'data'}", f"--run={tmp_path / 'run'}", f"--init={home / 'first'}"]
    assert cli.main([*argv, *small, "--compute.device=cpu", "--compute.threads=1"]) == 0
    lm = esolm.load(tmp_path / "run", which="last")
    assert lm.net.config.length == (40 if preset.startswith("xsum") else 10 * tiny.LENGTH)
    assert lm.net.config.layers == 2
    assert len(lm.sample(num_samples=1, seed=1, num_steps=40).tokens[0]) == lm.net.config.length


def test_resuming_is_exact_even_when_the_weights_are_gone(home, tmp_path, monkeypatch, capsys):
    shutil.copytree(home / "first", init := tmp_path / "init")
    assert cli.main(command(home, tmp_path / "whole", init)) == 0
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 6)
        assert cli.main(command(home, tmp_path / "run", init)) == 130
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert cli.main(tiny.command(tiny.make_data(tmp_path / "more", seed=1), tmp_path / "second")) == 0
    said = failing(capsys, command(home, tmp_path / "other", tmp_path / "second"))
    assert "init is" in said
    shutil.rmtree(init)
    for foreign in ("nowhere", "stories"):  # `init` of another name is read, not taken for a model that is gone
        assert foreign in failing(capsys, command(home, tmp_path / "other", Path(foreign)))
    assert cli.main(command(home, tmp_path / "run", init)) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")
    assert not same(weights(tmp_path / "run"), weights(home / "first"))
    said = failing(capsys, command(home, tmp_path / "fresh", init))
    assert str(init) in said
    assert not (tmp_path / "fresh").exists()


def test_the_tokenizer_must_be_that_of_the_weights(home, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat and the dog and a bird in the garden " * 99)
    (tmp_path / "b.txt").write_text("a dog and a cat " * 99)
    text, held = (f"text:{tmp_path / name}.txt" for name in "ab")
    prepare(text, tmp_path / "words", tokenizer="bpe:260", length=16, valid=held)
    prepare(text, tmp_path / "bytes", tokenizer=str(home / "first"), length=16, valid=held)
    argv = command(tmp_path, tmp_path / "run", home / "first", data="words")
    said = failing(capsys, argv)
    assert "has tokenizer bytes with 258 ids" in said
    assert f"prepare it with --tokenizer {home / 'first'}" in said
    assert not (tmp_path / "run").exists()
    assert cli.main(command(tmp_path, tmp_path / "run", home / "first", "--steps=1", data="bytes")) == 0


def test_sizes_come_from_the_weights(home, tmp_path, capsys):
    said = failing(capsys, [*command(home, tmp_path / "run", home / "first"), "--net.layers=3"])
    assert "net.layers" in said


def test_embeddings_of_another_width_are_refused(home: Path, tmp_path: Path, capsys) -> None:
    options = ("--system.name=diffusion_lm", "--system.num_steps=4", "--steps=2")
    assert "latent_width" in failing(capsys, command(home, tmp_path / "a", home / "first", *options))
    assert cli.main(tiny.command(home / "data", tmp_path / "b", *options, "--system.latent_width=3")) == 0
    assert "latent_width" in failing(capsys, command(home, tmp_path / "c", tmp_path / "b", "--steps=2"))
    assert cli.main(command(home, tmp_path / "d", tmp_path / "b", *options, "--system.latent_width=3")) == 0
