"""The scripts in examples/ run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from esolm.storage import checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_train(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "train.py"), "4", str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "step 4: perplexity" in found.stdout
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [4]
