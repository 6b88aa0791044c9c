"""Benchmarks that start processes of their own, at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esolm import cli
from esolm.bench import weak
from esolm.net.denoiser import DenoiserConfig

STEP = ("--vocabularies=[50]", "--lengths=[16]", "--tokens=64", "--layers=1", "--width=64", "--rounds=2")


@pytest.mark.slow
@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["start", "--vocab_size=50", "--rounds=1", "--layers=1", "--width=64", "--length=8", "--num_steps=4"],
         {"seconds"}),
        (["train", *STEP, "--plain=true", "--systems=['mdlm']"], {"precision", "cases"}),
        (["train", *STEP, "--distributed=2"], {"precision", "processes", "cases"}),
    ],
    ids=["start", "plain", "distributed"],
)  # fmt: skip
def test_benchmarks_write_their_results(words: list[str], keys: set[str], tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    assert cli.main(["bench", *words, "--out", str(target)]) == 0
    assert json.loads(target.read_text()).keys() == {"bench", "options", "machine"} | keys


@pytest.mark.slow
def test_weak_scaling_times_every_mode() -> None:
    config = DenoiserConfig(7, 16, 2, 16, 2, 4, dropout=0.0)
    found = weak.seconds_by_mode(2, config, 4, 3, "float32")
    assert {name: len(times) for name, times in found.items()} == {"alone": 3, "ddp": 3, "fsdp": 3}
    assert min(min(times) for times in found.values()) > 0
