"""A run that was killed, interrupted or out of disk space resumes exactly; a damaged or foreign one is refused."""

from __future__ import annotations

import errno
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esolm import cli
from esolm.storage import checkpoint
from support import tiny, toy

SCRIPT = Path(tiny.__file__)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """A run without interruption."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main(tiny.command(data, run)) == 0
    return run


def test_info_reports_step_and_validations(whole, capsys):
    capsys.readouterr()
    assert cli.main(["info", str(whole), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["kind"], about["state"], about["step"]) == ("run", "finished", 12)
    assert list(about["validations"]) == ["4", "8", "12"]
    assert about["validations"]["12"] == about["validation"]["loss"]


def spawn(argv: list[str], function: str = "-", call: int = 0) -> subprocess.Popen:
    words = [sys.executable, str(SCRIPT), function, str(call), *argv]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_same_command_resumes(data, whole, tmp_path, monkeypatch, capsys, number, code):
    command = tiny.command(data, tmp_path / "run")
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 6, number)
        assert cli.main(command) == code
    assert "after step 6 of 12" in capsys.readouterr().out
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints")[-1] == 6
    assert cli.main(command) == 0
    assert "resuming from" in capsys.readouterr().out
    tiny.assert_same(tmp_path / "run", whole)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", toy.one_of_each())
def test_every_system_resumes_exactly(data, tmp_path, monkeypatch, name):
    """Interrupted in the middle; Duo's curriculum ends after the interruption."""
    options = toy.flags(toy.one_of_each()[name])
    more = (f"--system.name={name}", *options, "--steps=6", "--validation.every=3", "--saving.every=3")
    assert cli.main(tiny.command(data, tmp_path / "whole", *more)) == 0
    command = tiny.command(data, tmp_path / "run", *more)
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 3)
        assert cli.main(command) == 130
    assert cli.main(command) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_search_of_mask_rates_resumes_exactly(data, tmp_path, monkeypatch):
    """Validation chooses the rates of the steps after it; an interrupted run continues with them."""
    more = ("--system.name=bd3lm", "--system.block_size=4", "--system.clip_widths=[0.5]", "--system.resample=true",
            "--steps=6", "--validation.every=2", "--saving.every=0")  # fmt: skip
    assert cli.main(tiny.command(data, tmp_path / "whole", *more)) == 0
    command = tiny.command(data, tmp_path / "run", *more)
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 3)
        assert cli.main(command) == 130
    state = checkpoint.read(tmp_path / "run" / "checkpoints" / checkpoint.name_of(3))
    assert cli.main(command) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")
    _, records = tiny.outcome(tmp_path / "run")
    chosen = [record["validation"]["chosen"] for record in records if "validation" in record]
    assert len(chosen) == 3
    assert chosen[0] == state["chosen"]
    rates = chosen[0].get("mask_rate_max", 1.0) - chosen[0].get("mask_rate_min", 1e-3)
    assert rates == pytest.approx(0.5, abs=2e-3)


def test_two_resumes_agree(data, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 5)
        assert cli.main(tiny.command(data, tmp_path / "a")) == 130
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in "ab":
        assert cli.main(tiny.command(data, tmp_path / name)) == 0
    tiny.assert_same(tmp_path / "a", tmp_path / "b")
    tiny.assert_same(tmp_path / "a", whole)


@pytest.mark.parametrize("precision", ["float32"])
def test_exact_with_two_threads(tmp_path, monkeypatch, precision):
    """Large enough that PyTorch splits the work; scattered additions then need a fixed order."""
    data = tiny.make_data(tmp_path / "data", length=64)
    more = ("--compute.threads=2", "--net.width=64", "--net.layers=1", "--steps=4", "--validation.batches=1",
            "--batch.size=32", "--batch.micro=32", f"--compute.precision={precision}")  # fmt: skip
    assert cli.main(tiny.command(data, tmp_path / "whole", *more)) == 0
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 2)
        assert cli.main(tiny.command(data, tmp_path / "run", *more)) == 130
    assert cli.main(tiny.command(data, tmp_path / "run", *more)) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("function", "call"), [("_write", 5), ("_end", 2), ("_prune", 1)])
def test_killed_inside_the_writing_of_a_checkpoint(data, whole, tmp_path, function, call):
    command = tiny.command(data, tmp_path / "run", "--saving.keep=1")
    process = spawn(command, function, call)
    assert process.wait(timeout=60) == -signal.SIGKILL
    for step in checkpoint.list_steps(root := tmp_path / "run" / "checkpoints"):
        checkpoint.read(root / checkpoint.name_of(step))
    assert cli.main(command) == 0
    assert not list(root.glob(".*"))
    tiny.assert_same(tmp_path / "run", whole)


def test_killed_at_a_random_moment(data, whole, tmp_path):
    command = tiny.command(data, tmp_path / "run")
    process = spawn(command)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    process.wait(timeout=60)
    assert cli.main(command) == 0
    tiny.assert_same(tmp_path / "run", whole)


def test_sigint_to_the_process(data, whole, tmp_path):
    command = tiny.command(data, tmp_path / "run", "--steps=100000", "--validation.every=0", "--saving.every=0")
    process = spawn(command)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 130
    assert "stopped by SIGINT after step" in rest
    assert "Traceback" not in rest
    assert len(checkpoint.list_steps(tmp_path / "run" / "checkpoints")) == 1


def test_steps_of_a_finished_run_may_be_raised(data, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    before = tiny.contents(tmp_path / "run")
    assert cli.main(tiny.command(data, tmp_path / "run")) == 0
    assert "is finished: 12 of 12 steps" in capsys.readouterr().out
    assert tiny.contents(tmp_path / "run") == before
    assert cli.main(tiny.command(data, tmp_path / "run", "--steps=16")) == 0
    assert "steps changed from 12 to 16" in capsys.readouterr().out
    assert cli.main(tiny.command(data, tmp_path / "straight", "--steps=16")) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "straight")


def test_a_constant_rate_may_end_in_a_decay(data, whole, tmp_path, capsys):
    """Steps and decay may change as long as the steps already taken had the same rates."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    refused(run, capsys, tiny.command(data, run, "--steps=14", "--optim.decay=3"), "optim.decay was 0 and is now 3")
    assert cli.main(tiny.command(data, run, "--steps=14", "--optim.decay=2")) == 0
    assert "optim.decay changed from 0 to 2" in capsys.readouterr().out
    assert cli.main(tiny.command(data, tmp_path / "straight", "--steps=14", "--optim.decay=2")) == 0
    tiny.assert_same(run, tmp_path / "straight")
    refused(run, capsys, tiny.command(data, run, "--steps=16"), "optim.decay was 2 and is now 0", f"--init {run}")
    refused(run, capsys, tiny.command(data, run, "--steps=13", "--optim.decay=2"), "steps was 14 and is now 13")


def test_a_finished_cosine_run_suggests_what_is_possible(data, tmp_path, capsys):
    """Its steps cannot be raised, so neither message suggests --steps; a new run from its weights works."""
    run = tmp_path / "run"
    command = tiny.command(data, run, "--optim.schedule=cosine", "--optim.warmup=0", "--steps=2")
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(command) == 0
    assert f"--init {run} --run FOLDER" in capsys.readouterr().out
    short = tiny.command(data, tmp_path / "short", "--optim.schedule=cosine", "--optim.warmup=9", "--steps=2")
    assert cli.main(short) == cli.main(short) == 0
    assert "To train longer, raise --steps" in capsys.readouterr().out  # it has ended within the warm-up
    assert cli.main([*short, "--steps=3"]) == 0
    capsys.readouterr()
    longer = [*command, "--steps=4"]
    refused(run, capsys, longer, "steps was 2 and is now 4, which would change", f"--init {run} --run FOLDER")
    sizes = ("--net.layers", "--net.width", "--net.heads", "--net.cond_width")
    words = [word for word in longer if word.partition("=")[0] not in sizes]
    assert cli.main([*words, f"--init={run}", f"--run={tmp_path / 'next'}"]) == 0


def test_a_resumed_run_may_recompute_blocks(data, whole, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        tiny.interrupt_after(patch, 5)
        assert cli.main(tiny.command(data, tmp_path / "run")) == 130
    assert cli.main(tiny.command(data, tmp_path / "run", "--compute.checkpoint_blocks=true")) == 0
    assert "compute.checkpoint_blocks changed from False to True" in capsys.readouterr().out
    tiny.assert_same(tmp_path / "run", whole)


def refused(run: Path, capsys, command: list[str], *words: str) -> None:
    """Check that the command fails with one line that contains these words, and changes nothing."""
    before = tiny.contents(run)
    capsys.readouterr()
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    for word in words:
        assert word in said
    assert tiny.contents(run) == before


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def another_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


@pytest.mark.parametrize(
    ("file", "damage", "word"),
    [
        ("model.safetensors", half, "model.safetensors has"),
        ("optimizer.safetensors", flip, "SHA-256"),
        ("ema.safetensors", Path.unlink, "ema.safetensors is missing"),
        ("state.json", half, "state.json cannot be read"),
        ("state.json", Path.unlink, "no state.json"),
        ("state.json", another_format, "format 99"),
    ],
)
def test_a_damaged_checkpoint_is_refused(data, whole, tmp_path, capsys, file, damage, word):
    shutil.copytree(whole, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-00000012" / file)
    refused(tmp_path / "run", capsys, tiny.command(data, tmp_path / "run", "--steps=16"), "step-00000012", word)


def test_a_checkpoint_of_another_network_is_refused(data, whole, tmp_path, capsys):
    assert cli.main(tiny.command(data, tmp_path / "run", "--net.width=32", "--steps=2")) == 0
    root = tmp_path / "run" / "checkpoints"
    shutil.copytree(whole / "checkpoints" / "step-00000012", root / "step-00000012")
    command = tiny.command(data, tmp_path / "run", "--net.width=32", "--steps=20")
    refused(tmp_path / "run", capsys, command, "net.width is 16 there and 32 here")


def test_another_configuration_or_corpus_is_refused(data, whole, tmp_path, capsys):
    shutil.copytree(whole, run := tmp_path / "run")
    command = tiny.command(data, run, "--net.width=32", "--optim.lr=0.1")
    refused(run, capsys, command, "net.width was 16 and is now 32", "optim.lr was 0.01 and is now 0.1")
    refused(run, capsys, tiny.command(data, run, "--system.name=mdlm"), "system.name was 'esolm'")
    refused(run, capsys, tiny.command(data, run, "--steps=8"), "steps was 12 and is now 8")
    other = tiny.make_data(tmp_path / "other", seed=1)
    refused(run, capsys, tiny.command(other, run, "--steps=16"), "corpus", "has changed")


def test_metrics_cut_short_or_a_foreign_folder_are_refused(data, whole, tmp_path, capsys):
    shutil.copytree(whole, run := tmp_path / "run")
    half(run / "metrics.jsonl")
    refused(run, capsys, tiny.command(data, run, "--steps=16"), "metrics.jsonl has")
    (mine := tmp_path / "mine").mkdir()
    (mine / "thesis.tex").write_text("words")
    refused(mine, capsys, tiny.command(data, mine), "is not a run of esolm")


def test_a_full_disk_overwrites_nothing_and_the_run_resumes(data, whole, tmp_path, monkeypatch, capsys):
    original = checkpoint._write

    def full(path, tensors):
        if "step-00000008" in str(path) and path.stem == "optimizer":
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", full)
        assert cli.main(tiny.command(data, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "step-00000004" in said
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert cli.main(tiny.command(data, tmp_path / "run")) == 0
    tiny.assert_same(tmp_path / "run", whole)


def test_a_loss_that_is_not_finite_stops_with_step_term_and_checkpoint(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny.Exploding, "calls", [0])
    command = tiny.command(data, tmp_path / "run", "--system.name=support.tiny.Exploding", "--system.at=11")
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert "stopped at step 6: wild is nan" in said
    assert str(tmp_path / "run" / "checkpoints" / "step-00000004") in said
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [4]


def test_a_run_in_use_is_refused(data, whole, tmp_path, capsys):
    from esolm.training.runs import Metrics

    shutil.copytree(whole, run := tmp_path / "run")
    with Metrics(run / "metrics.jsonl"):
        refused(run, capsys, tiny.command(data, run, "--steps=16"), "another process is training")


def test_a_run_without_a_step_is_not_offered_as_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tiny.make_data(tmp_path / "data"), tmp_path / "run"
    assert cli.main(tiny.command(data, run, "--steps=1")) == 0
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    capsys.readouterr()
    assert cli.main(tiny.command(data, run, "--batch.size=4")) == 2
    assert "--init" not in capsys.readouterr().err
    assert cli.main(["train", str(run)]) == 2
    assert f"--run {run}" in capsys.readouterr().err
