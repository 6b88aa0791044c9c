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


def started(monkeypatch, *words: str, **variables: str):
    """The limits of the API with which `esolm serve stories` starts, with these variables of the environment."""
    server = pytest.importorskip("esolm.serving.server", reason="needs fastapi: pip install 'esolm[serve]'")
    for name in ("ESOLM_API_KEY", "ESOLM_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(server, "serve_app", lambda engine, settings, *rest: seen.append(settings) or 0)
    assert serve.run(["stories", *words]) == 0
    return seen[0]


def test_an_empty_key_is_refused(monkeypatch):
    for words, variables in (
        (["--api_key", ""], {}),
        (["--api_key="], {"ESOLM_API_KEY": "other"}),
        ([], {"ESOLM_API_KEY": ""}),
        (["--host", "0.0.0.0"], {"ESOLM_API_KEY": " "}),
    ):
        with pytest.raises(ValueError, match="empty"):
            started(monkeypatch, *words, **variables)


def test_the_key_and_the_name_may_be_variables(monkeypatch):
    variables = {"ESOLM_API_KEY": "secret", "ESOLM_NAME": "mine"}
    for words, expected in (([], ("secret", "mine")), (["--api_key", "#k", "--name=other"], ("#k", "other"))):
        found = started(monkeypatch, *words, **variables)
        assert (found.api_key, found.name) == expected
    found = started(monkeypatch)
    assert (found.api_key, found.name) == (None, "stories")


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ([], 0),
        (["--host=localhost"], 0),
        (["--host=::1"], 0),
        (["--host=0.0.0.0"], 1),
        (["--host=::"], 1),
        (["--host=0.0.0.0", "--api_key=k"], 0),
    ],
)
def test_a_server_that_is_open_to_others_says_so(monkeypatch, capsys, words, warned):
    started(monkeypatch, *words)
    assert capsys.readouterr().err.count("--api_key") == warned
