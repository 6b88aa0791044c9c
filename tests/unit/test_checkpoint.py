"""A checkpoint is whole or absent, is checked before it is used, and the last and the best stay."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from esolm.runtime import files
from esolm.storage import checkpoint

TENSORS = {"model": {"a": torch.arange(6.0).view(2, 3)}, "ema": {"a": torch.ones(2, 3)}}


def save(root: Path, step: int, metric: float | None = None, keep: int = 10) -> Path:
    return checkpoint.save(root, step, TENSORS, {"metric": metric, "identity": {"net": {"width": 3}}}, keep)


def test_what_is_saved_is_read(tmp_path):
    folder = save(tmp_path, 7, metric=1.5)
    assert folder.name == "step-00000007"
    state = checkpoint.read(folder)
    assert (state["step"], state["metric"]) == (7, 1.5)
    assert torch.equal(checkpoint.load(folder, "model")["a"], TENSORS["model"]["a"])
    assert sorted(p.name for p in folder.iterdir()) == ["ema.safetensors", "model.safetensors", "state.json"]


def test_the_last_and_the_best_stay(tmp_path):
    for step, metric in enumerate([3.0, 1.0, 2.0, None, 2.5], 1):
        save(tmp_path, step, metric, keep=2)
    assert checkpoint.list_steps(tmp_path) == [2, 4, 5]
    assert checkpoint.best(tmp_path) == tmp_path / "step-00000002"
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000005"


def test_no_checkpoint_at_all(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.best(tmp_path / "none") is None


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("os error 28")])
def test_a_full_disk_leaves_the_old_and_no_part_of_the_new(tmp_path, monkeypatch, error):
    save(tmp_path, 1)

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(ValueError, match=r"step-00000002.*last complete checkpoint is .*step-00000001"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="exists already"):
        save(tmp_path, 1)


def test_what_a_kill_left_is_no_checkpoint_and_goes_away(tmp_path):
    (tmp_path / ".step-00000003.partial").mkdir()
    (tmp_path / ".step-00000001.old").mkdir()
    assert checkpoint.list_steps(tmp_path) == []
    save(tmp_path, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_another_identity_is_named(tmp_path):
    folder = save(tmp_path, 1)
    state = checkpoint.read(folder)
    checkpoint.check_identity(folder, state, {"net": {"width": 3}})
    with pytest.raises(ValueError, match=r"net\.width is 3 there and 4 here"):
        checkpoint.check_identity(folder, state, {"net": {"width": 4}})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', json.dumps({"format": 1, "files": 3})])
def test_a_foreign_state_is_refused(tmp_path, content):
    (folder := tmp_path / "step-00000001").mkdir()
    (folder / "state.json").write_text(content)
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.read(folder)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"half")])
def test_only_the_file_that_is_read_must_be_whole(tmp_path, damage):
    """Weights are used without the state of the optimizer; resuming needs both."""
    tensors = {**TENSORS, "optimizer": {"a": torch.zeros(3)}}
    folder = checkpoint.save(tmp_path / "run" / "checkpoints", 1, tensors, {"metric": 1.0}, 1)
    damage(folder / "optimizer.safetensors")
    assert checkpoint.best(folder.parent) == folder
    assert torch.equal(checkpoint.load(folder, "ema")["a"], TENSORS["ema"]["a"])
    for check in (checkpoint.read, checkpoint.verify):
        with pytest.raises(ValueError, match=rf"optimizer\.safetensors.*--init {tmp_path / 'run'} --run NEW"):
            check(folder)
    damage(folder / "ema.safetensors")
    with pytest.raises(ValueError, match=r"damaged: ema\.safetensors.*start again with another --run$"):
        checkpoint.load(folder, "ema")


def test_an_unknown_file_names_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"no optimizer\.safetensors: it holds ema\.safetensors, model\.safetensors"):
        checkpoint.load(save(tmp_path, 1), "optimizer")
