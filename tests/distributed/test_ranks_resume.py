"""Checkpoints of several processes: atomic, and readable by any number of processes and by `esolm.load`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import esolm
from esolm import cli
from esolm.cli.info import describe
from esolm.storage import checkpoint
from support import crew, tiny
from support.ranks import assert_close, command

HERE = Path(crew.__file__)
HALF = 3


def halfway(data: Path, run: Path, parallel: str) -> list[str]:
    return command(data, run, "esolm", f"--compute.parallel={parallel}", f"--saving.every={HALF}", "--saving.keep=9")


def only_half(run: Path, target: Path) -> Path:
    """A copy of a run at its first checkpoint."""
    shutil.copytree(run, target)
    for step in checkpoint.list_steps(root := target / "checkpoints")[1:]:
        shutil.rmtree(root / checkpoint.name_of(step))
    return target


@pytest.fixture(scope="module")
def one(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("one") / "run"
    assert cli.main(halfway(data, run, "ddp")) == 0
    return run


@pytest.fixture(scope="module", params=["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def by_two(request, two, data, tmp_path_factory) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("two") / "run"
    assert two(crew.command, halfway(data, run, request.param))[0][0] == 0
    return run, request.param


def test_saved_by_two_and_resumed_by_one_and_two(by_two, one, two, data, tmp_path):
    run, parallel = by_two
    half = only_half(run, tmp_path / "half")
    state = checkpoint.read(half / "checkpoints" / checkpoint.name_of(HALF))
    assert state["processes"] == 2
    assert all(name.startswith("shards/") for name in state["files"])
    shutil.copytree(half, tmp_path / "1")
    assert cli.main(halfway(data, tmp_path / "1", parallel)) == 0
    assert_close(tmp_path / "1", one)
    resumes(half, two, one, data, parallel)


@pytest.mark.slow
def test_saved_by_two_and_resumed_by_four(by_two, one, four, data, tmp_path):
    run, parallel = by_two
    resumes(only_half(run, tmp_path / "half"), four, one, data, parallel)


def resumes(run, processes, one, data, parallel):
    results = processes(crew.command, halfway(data, run, parallel))
    assert results[0][0] == 0, results[0][2]
    assert "resuming from" in results[0][1]
    assert_close(run, one)


def test_saved_by_one_and_resumed_by_two(one, two, data, tmp_path):
    run = only_half(one, tmp_path / "run")
    assert two(crew.command, halfway(data, run, "fsdp"))[0][0] == 0
    assert_close(run, one)


def test_parts_and_their_consolidation_open_as_one(by_two, tmp_path, capsys):
    half = only_half(by_two[0], tmp_path / "half")
    folder = half / "checkpoints" / checkpoint.name_of(HALF)
    parts = {stem: checkpoint.load(folder, stem) for stem in checkpoint.STEMS}
    about = describe(folder)
    net = esolm.load(half).net
    capsys.readouterr()
    assert cli.main(["consolidate", str(half), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"paths": [str(folder)]}
    assert sorted(p.name for p in folder.iterdir()) == sorted([*(f"{s}.safetensors" for s in parts), "state.json"])
    for stem, tensors in parts.items():
        assert checkpoint.load(folder, stem).keys() == tensors.keys()
        assert all(torch.equal(t, tensors[name]) for name, t in checkpoint.load(folder, stem).items())
    assert describe(folder)["parameters"] == about["parameters"] == sum(p.numel() for p in net.parameters())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), esolm.load(half).net.parameters()))


def test_a_damaged_part_is_refused_by_all(by_two, two, data, tmp_path):
    half = only_half(by_two[0], tmp_path / "half")
    part = sorted((half / "checkpoints" / checkpoint.name_of(HALF) / "shards").iterdir())[-1]
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    results = two(crew.command, halfway(data, half, by_two[1]))
    assert [code for code, _, _ in results] == [2, 2]
    assert "does not have the SHA-256" in results[0][2]
    assert results[1][1:] == ("", "")


def test_a_full_disk_stops_all_and_leaves_no_trace(two, data, tmp_path):
    results = two(crew.command, halfway(data, tmp_path / "run", "fsdp"), "full")
    assert [code for code, _, _ in results] == [2, 2]
    assert "rank 1 of 2: could not write checkpoint" in results[0][2]
    assert "No space left on device" in results[0][2]
    assert results[1][1:] == ("", "")
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def torchrun(argv: list[str], flaw: tuple, restarts: int = 0) -> subprocess.Popen:
    """Start two processes, one with a flaw: rank, function of checkpoint.py, call, seconds to sleep (0: killed)."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words += [f"--max_restarts={restarts}", "--", str(HERE), *map(str, flaw), *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.slow
def test_torchrun_resumes_after_a_rank_was_killed_inside_a_checkpoint(one, data, tmp_path):
    """Rank 1 is killed while it hashes its part of the second checkpoint; the job resumes from the first."""
    argv = halfway(data, tmp_path / "run", "fsdp")
    process = torchrun(argv, (1, "_describe", 2, 0), restarts=1)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert "exitcode: -9) local_rank: 1" in said
    assert f"resuming from {tmp_path / 'run' / 'checkpoints' / checkpoint.name_of(HALF)}" in said
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert_close(tmp_path / "run", one)


@pytest.mark.slow
def test_a_dead_rank_is_named_and_nothing_is_lost(data, tmp_path):
    process = torchrun(halfway(data, tmp_path / "run", "fsdp"), (1, "_describe", 2, 0))
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 1
    cause = said[said.index("Root Cause") :]
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause
    root = tmp_path / "run" / "checkpoints"
    assert checkpoint.list_steps(root) == [HALF]
    checkpoint.verify(root / checkpoint.name_of(HALF))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_after_the_time_out(data, tmp_path):
    argv = [*halfway(data, tmp_path / "run", "fsdp"), "--compute.timeout=15"]
    begin = time.monotonic()
    process = torchrun(argv, (1, "_describe", 1, 1000))
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 1
    assert "15 s of compute.timeout" in said
    assert time.monotonic() - begin < 200


@pytest.mark.slow
def test_sigterm_to_torchrun_saves(one, data, tmp_path):
    argv = [*halfway(data, tmp_path / "run", "fsdp"), "--steps=100000", "--validation.every=0", "--saving.every=0"]
    process = torchrun(argv, (9, "_describe", 0, 0))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGTERM)
            break
    said = process.stdout.read()
    process.wait(timeout=200)
    assert "stopped by SIGTERM after step" in said
    last = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert last is not None
    checkpoint.verify(last)
    assert json.loads((last / "state.json").read_text())["processes"] == 2


@pytest.mark.parametrize(
    ("flaw", "word"),
    [
        ("--optim.lr=0.5", "config.optim.lr is 0.5 there and 0.01 on rank 0"),
        ("--data=OTHER", "corpus is"),
        ("code", "code is 'another' there"),
        ("--data=NOWHERE", "rank 1 of 2: no data in NOWHERE"),
    ],
)
def test_a_rank_of_another_run_is_refused(two, data, tmp_path, flaw, word):
    if "OTHER" in flaw:
        flaw = f"--data={tiny.make_data(tmp_path / 'other', seed=1)}"
    results = two(crew.command, halfway(data, tmp_path / "run", "ddp"), flaw)
    assert [code for code, _, _ in results] == [2, 2]
    assert word in results[0][2]
    assert "rank 1 of 2" in results[0][2]
    assert results[1][1:] == ("", "")
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_divide_is_refused(two, data, tmp_path):
    argv = [*halfway(data, tmp_path / "run", "ddp"), "--batch.size=9", "--batch.micro=3"]
    results = two(crew.command, argv)
    assert "batch.size 9 does not divide among 2 processes" in results[0][2]
