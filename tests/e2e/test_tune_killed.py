"""A run of `esolm tune grpo` that was killed resumes bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from esolm import cli
from support import tiny
from support.runs import make_run

SCRIPT = Path(tiny.__file__)


@pytest.mark.parametrize(("function", "call"), [("_write", 5), pytest.param("_prune", 1, marks=pytest.mark.slow)])
def test_killed_with_sigkill(tmp_path: Path, function: str, call: int) -> None:
    """Inside the writing of a checkpoint, while training has gone on; its workers end too."""
    make_run(tmp_path / "base", length=10, alpha_0=0.5)

    def words(run: Path) -> list[str]:
        model = tmp_path / "base" / "checkpoints" / "step-00000001"
        options = (
            "--reward=support.flawed:even", "--reward.workers=1", "--rollout.num_steps=3", "--rollout.keep=1",
            "--grpo.group=4", "--grpo.updates=2", "--steps=8", "--batch.size=8", "--optim.lr=0.01",
            "--validation.every=4", "--validation.batch_size=4", "--saving.every=2", "--compute.threads=1",
            "--compute.precision=float32", "--compute.device=cpu",
        )  # fmt: skip
        return ["tune", "grpo", str(model), str(run), *options]

    assert cli.main(words(tmp_path / "whole")) == 0
    argv = [sys.executable, str(SCRIPT), function, str(call), *words(tmp_path / "run")]
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}  # the reward is a module of the tests
    killed = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert cli.main(words(tmp_path / "run")) == 0
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")
    for file in sorted((tmp_path / "whole" / "samples").glob("*.jsonl")):
        assert file.read_text() == (tmp_path / "run" / "samples" / file.name).read_text()
