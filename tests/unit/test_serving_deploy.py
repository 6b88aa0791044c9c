"""The Dockerfile: what it copies exists, its command is one that `esolm serve` takes, and it runs without rights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from esolm.cli import serve
from esolm.serving.options import EngineOptions

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def words(instruction: str) -> list[str]:
    """The lines of an instruction, without its name."""
    return [line.split(" ", 1)[1].strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_what_is_copied_exists_and_is_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for line in words("COPY") if not line.startswith("--from") for name in line.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored


def test_the_command_is_one_of_the_program(monkeypatch):
    command = [*json.loads(words("ENTRYPOINT")[0]), *json.loads(words("CMD")[0])]
    assert command[:2] == ["esolm", "serve"]
    seen = []
    monkeypatch.setattr(serve, "serve", lambda options: seen.append(options) or 0)
    assert serve.run(command[2:]) == 0
    assert seen[0]["run"] in words("VOLUME")
    assert seen[0]["host"] == "0.0.0.0"
    assert str(seen[0]["port"]) in words("EXPOSE")
    assert seen[0]["max_batch"] == EngineOptions().max_batch


def test_it_runs_without_rights_and_is_checked():
    assert int(words("USER")[0]) > 0
    pytest.importorskip("fastapi", reason="needs fastapi: pip install 'esolm[serve]'")
    from esolm.serving.routes import OPEN

    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", words("HEALTHCHECK")[0])
    assert path in OPEN  # also with a key
