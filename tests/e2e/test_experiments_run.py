"""The experiments' runner end to end: processes, signals, and the whole pipeline at tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from experiments.runner import jobs, main, spec
from rich.console import Console

ROOT = Path(__file__).parents[2]


@pytest.fixture
def experiments(tmp_path: Path) -> Path:
    """A folder with one empty experiment."""
    folder = tmp_path / "experiments"
    (folder / "one").mkdir(parents=True)
    (folder / "settings.yaml").write_text(json.dumps({"experiments": ["one"], "values": {}, "smoke": {}}))
    (folder / "shared.yaml").write_text("jobs: []")
    return folder


def space(experiments: Path) -> jobs.Workspace:
    places = {"CORPORA": str(experiments.parent)}
    return jobs.Workspace(experiments.parent / "work", spec.read(experiments), places)


def titles(found: list[spec.Job]) -> list[str]:
    return [job.title for job in found]


PROCESSES = """
jobs:
- name: made
  makes: data/x
  command: prepare text:$CORPORA/words.txt data/x --valid text:$CORPORA/more.txt --tokenizer bytes --length 32
- name: good
  alone: true
  command: info data/x --json
- name: bad
  command: info data/nothing --json
- name: lost
  makes: lost
  command: info data/nothing2 --json
- name: after-lost
  command: info lost --json
- name: wordless
  command: info data/x
"""


@pytest.mark.slow
def test_failure_stops_only_the_jobs_that_need_it(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (experiments / "one" / "experiment.yaml").write_text(PROCESSES)
    work = space(experiments)
    work.folder.mkdir()
    for name in ("words", "more"):
        (experiments.parent / f"{name}.txt").write_text(f"some {name} " * 50)
    failed = jobs.run_all(work, work.missing(["one"]), 2, Console())
    assert set(failed) == {"one/bad", "one/lost", "one/after-lost", "one/wordless"}  # the last prints no JSON
    found = json.loads((experiments / "one" / "results" / "good.json").read_text())
    assert found["result"]["length"] == 32
    assert "one/bad" in capsys.readouterr().out
    assert "data/nothing" in (work.folder / "logs" / "one.bad.log").read_text()
    assert titles(work.missing(["one"])) == ["one/bad", "one/lost", "one/after-lost", "one/wordless"]


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_signal_stops_running_jobs(experiments: Path, ctrl_c: Any) -> None:
    """The child process ends and its result is still missing, also if Ctrl-C is ignored as in background jobs."""
    command = "prepare pydocs data/x --tokenizer bytes --length 32"
    (experiments / "one" / "experiment.yaml").write_text(f"jobs: [{{name: long, command: {command}}}]")
    work = space(experiments)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    before = signal.signal(signal.SIGINT, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        jobs.run_all(work, work.missing(["one"]), 1, Console())
    signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert titles(work.missing(["one"])) == ["one/long"]


def test_smoke_runs_the_whole_pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["--smoke", "true"]) == 0
    assert "characters" in capsys.readouterr().err
