"""The scripts in examples/ run."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from esolm.storage import checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_train(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(20_000)]
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(words[i : i + 50]) for i in range(0, len(words), 50)))
    command = [sys.executable, str(EXAMPLES / "train.py"), f"text:{tmp_path / 'text.txt'}", str(tmp_path), "4"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "step 4: perplexity" in found.stdout
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [4]
