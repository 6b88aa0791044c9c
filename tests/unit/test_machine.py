"""Devices and precisions by name, what loading imports, and the progress bar."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rich.console import Console

from esolm import load
from esolm.runtime import machine, progress


@pytest.mark.parametrize("name", ["gpu", "toaster", "cuda", "cuda:99", "mps", "vulkan"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(name: str) -> None:
    if name.startswith(("cuda", "mps")) and machine.pick_device("auto").type in name:
        pytest.skip("this machine has it")
    for function in (machine.pick_device, lambda name: load("stories", device=name)):
        with pytest.raises(ValueError, match=f"'{name}'.*cpu.*auto") as error:
            function(name)
        assert "\n" not in str(error.value)


def test_the_automatic_precision_of_a_process_does_not_change_with_load(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(([1.0, 2.0], [2.0, 1.0]))
    monkeypatch.setattr(machine, "_product_seconds", lambda *dtypes: next(seconds))
    monkeypatch.setattr(machine, "_probe", lambda name: True)
    monkeypatch.setattr(machine, "settle", lambda: True)
    machine.bf16_verdict.cache_clear()
    try:
        assert [machine.pick_precision("auto", torch.device("cpu")) for _ in range(3)] == ["bf16"] * 3
    finally:
        machine.bf16_verdict.cache_clear()


def test_measuring_products_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    assert all(time > 0 for time in machine._product_seconds(torch.float32))
    assert torch.get_num_threads() == before


def test_auto_is_a_device() -> None:
    assert machine.pick_device("auto").type in ("cpu", "cuda", "mps")
    assert machine.pick_device("cpu") == torch.device("cpu")


def test_bf16_is_tried_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(machine, "_probe", lambda name: True)
    monkeypatch.setattr(machine, "_survives_bf16", lambda: bool(tried.append(1)) or True)
    machine.settle.cache_clear()
    try:
        assert machine.settle()
        assert machine.settle()
        assert len(tried) == 1
    finally:
        machine.settle.cache_clear()


def test_loading_a_model_does_not_import_distributed_checkpoints() -> None:
    """They take a second, and only training on several processes needs them."""
    code = "import esolm, sys; esolm.load('stories'); print('torch.distributed.checkpoint' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("patience", [-1.0, 60.0])
def test_the_bar_is_for_long_work_on_a_terminal(
    patience: float, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(stderr=stderr, force_terminal=terminal))
    assert list(progress.track("abc", "working")) == ["a", "b", "c"]
    assert list(progress.progress([("a", 3), ("b", 4)], "working", None)) == ["a", "b"]
    with progress.ProgressBar("quiet", 3, quiet=True) as bar:
        bar.update(2, "silent")
    out, err = capsys.readouterr()
    assert not out
    assert ("working" in err) == (terminal and patience < 0)
    assert "quiet" not in err
    assert "silent" not in err
