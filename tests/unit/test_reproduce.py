"""`esolm reproduce`: what is planned, run, kept, and told."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from experiments.runner import document, jobs, reproduce, spec
from rich.console import Console

from esolm import cli

ROOT = Path(__file__).parents[2]
SETTINGS = {"experiments": ["one"], "values": {"sizes": [1, 2], "steps": 4}, "smoke": {"sizes": [1]}}
SHARED = """
jobs:
- name: data
  makes: data/x
  command: prepare text:$CORPORA/x data/x
- name: run-{size}
  for: {size: sizes}
  makes: runs/{size}
  command: train demo --run runs/{size} --data data/x --steps {steps}
"""
ONE = """
jobs:
- name: score-{size}
  for: {size: sizes}
  command: score runs/{size} data/x --json
- name: time
  alone: true
  command: bench points --points "['runs/1 num_steps=2', 'runs/2']" --json -
"""


@pytest.fixture
def experiments(tmp_path: Path) -> Path:
    folder = tmp_path / "experiments"
    (folder / "one").mkdir(parents=True)
    (folder / "settings.yaml").write_text(json.dumps(SETTINGS))
    (folder / "shared.yaml").write_text(SHARED)
    (folder / "one" / "experiment.yaml").write_text(ONE)
    return folder


def space(experiments: Path) -> jobs.Workspace:
    plan = spec.read(experiments)
    return jobs.Workspace(experiments.parent / "work", plan, {"CORPORA": "/corpora"})


def titles(found: list[spec.Job]) -> list[str]:
    return [job.title for job in found]


def test_loops_and_values_are_put_in(experiments: Path) -> None:
    plan = spec.read(experiments)
    assert titles(list(plan.jobs)) == ["data", "run-1", "run-2", "one/score-1", "one/score-2", "one/time"]
    assert plan.jobs[1].command == "train demo --run runs/1 --data data/x --steps 4"
    assert titles(list(spec.read(experiments, smoke=True).jobs)) == ["data", "run-1", "one/score-1", "one/time"]


def test_a_job_needs_what_its_command_names(experiments: Path) -> None:
    plan = spec.read(experiments)
    needs = {job.title: titles(plan.needs(job)) for job in plan.jobs}
    assert needs["run-1"] == ["data"]
    assert needs["one/score-2"] == ["run-2", "data"]
    assert needs["one/time"] == ["run-1", "run-2"]
    assert needs["data"] == []


def test_only_what_is_missing_is_run(experiments: Path) -> None:
    """A model whose results are all there is not trained again."""
    work = space(experiments)
    assert len(work.missing(["one"])) == 6
    assert titles(work.missing(["one/score-2"])) == ["data", "run-2", "one/score-2"]
    assert titles(work.missing(["one/score-*"])) == ["data", "run-1", "one/score-1", "run-2", "one/score-2"]
    by_title = {job.title: job for job in work.plan.jobs}
    work.keep(by_title["one/score-2"], (0, '{"nats": 1}', 2.0))
    work.keep(by_title["one/time"], (0, "{}", 2.0))
    assert titles(work.missing(["one"])) == ["data", "run-1", "one/score-1"]
    (work.folder / "data" / "x").mkdir(parents=True)
    work.keep(by_title["data"], (0, "whatever it says", 2.0))
    assert titles(work.missing(["one"])) == ["run-1", "one/score-1"]


def test_a_report_sees_the_results_that_it_uses(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are made once, also when only the experiment that uses them is asked for."""
    (experiments / "settings.yaml").write_text(json.dumps(SETTINGS | {"experiments": ["one", "two"]}))
    (experiments / "two").mkdir()
    (experiments / "two" / "experiment.yaml").write_text(
        "uses: [one/score-*]\njobs:\n- {name: own, command: info runs/1 --json}\n"
    )
    work = space(experiments)
    work.keep(next(job for job in work.plan.jobs if job.title == "one/score-1"), (0, "3", 1.0))
    assert dict(document.Results(work.plan, "two")) == {"score-1": 3}
    assert document.Results(work.plan, "two").missing() == ["score-2", "own"]
    reproduce(["two"], str(experiments), str(work.folder), corpora="/corpora", list=True)
    listed = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["data", "run-2", "one/score-2", "run-1", "two/own"]


def test_two_results_of_one_name_are_refused(experiments: Path) -> None:
    (experiments / "settings.yaml").write_text(json.dumps(SETTINGS | {"experiments": ["one", "two"]}))
    (experiments / "two").mkdir()
    (experiments / "two" / "experiment.yaml").write_text("uses: [one/time]\njobs: [{name: time, command: x}]\n")
    with pytest.raises(ValueError, match=r"two/experiment.yaml sees two results named time: rename one"):
        spec.read(experiments)


def test_what_another_command_made_is_refused(experiments: Path) -> None:
    work = space(experiments)
    job = work.plan.jobs[3]
    work.keep(job, (0, "{}", 1.0))
    path = experiments / "one" / "experiment.yaml"
    path.write_text(path.read_text().replace("score runs", "score --seed 1 runs"))
    with pytest.raises(ValueError, match=r"was made by `esolm score runs/1 .* delete it"):
        space(experiments).missing(["one"])


def test_results_name_no_place_of_this_machine(experiments: Path) -> None:
    work = space(experiments)
    job = next(job for job in work.plan.jobs if job.title == "one/score-1")
    work.keep(job, (0, '{"corpus": "/corpora/x"}', 1.25))
    record = json.loads((experiments / "one" / "results" / "score-1.json").read_text())
    assert record == {"command": f"esolm {job.command}", "seconds": 1.2, "result": {"corpus": "$CORPORA/x"}}
    with pytest.raises(ValueError, match="printed no JSON"):
        work.keep(job, (0, "no", 1.0))


def test_an_unknown_place_is_said_before_anything_runs(experiments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESOLM_CORPORA", raising=False)
    with pytest.raises(ValueError, match=r"data needs --corpora \(or ESOLM_CORPORA\)"):
        reproduce(experiments=str(experiments), workspace=str(experiments.parent / "work"))
    assert not (experiments.parent / "work").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("one/experiment.yaml", "jobs: [{name: a, command: x, quick: 1}]", "'quick' in a job; allowed are"),
        (
            "one/experiment.yaml",
            "jobs: [{name: a, command: 'x {nothing}'}]",
            r"names \{nothing\}; known are sizes, steps",
        ),
        ("one/experiment.yaml", "jobs: [{name: a, command: x}, {name: a, command: y}]", "the name one/a: rename"),
        ("one/experiment.yaml", "jobs: [", "is not YAML"),
        ("one/experiment.yaml", "uses: [two/score]", "uses two/score, and no job makes such a result"),
    ],
)
def test_mistakes_in_a_file_are_named(experiments: Path, file: str, text: str, message: str) -> None:
    (experiments / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        spec.read(experiments)


def test_no_experiments_here(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run `esolm reproduce` in a clone"):
        spec.read(tmp_path)
    with pytest.raises(ValueError, match="no experiment 'speling': choose from"):
        reproduce(["speling"], experiments=str(ROOT / "experiments"), list=True)
    with pytest.raises(ValueError, match="workers is 0; it must be at least 1"):
        reproduce(workers=0, experiments=str(ROOT / "experiments"), list=True)


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


def test_processes_run_in_order_and_a_failure_stops_only_what_needs_it(
    experiments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (experiments / "shared.yaml").write_text("jobs: []")
    (experiments / "one" / "experiment.yaml").write_text(PROCESSES)
    work = space(experiments)
    work.folder.mkdir()
    work.places = {"CORPORA": str(experiments.parent)}
    for name in ("words", "more"):
        (experiments.parent / f"{name}.txt").write_text(f"some {name} " * 50)
    failed = jobs.run_all(work, work.missing(["one"]), 2, Console())
    assert set(failed) == {"one/bad", "one/lost", "one/after-lost", "one/wordless"}  # the last prints no JSON
    found = json.loads((experiments / "one" / "results" / "good.json").read_text())
    assert found["result"]["length"] == 32
    said = " ".join(capsys.readouterr().out.split())
    assert "one/bad failed" in said
    assert "data/nothing" in (work.folder / "logs" / "one.bad.log").read_text()
    assert titles(work.missing(["one"])) == ["one/bad", "one/lost", "one/after-lost", "one/wordless"]


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_a_signal_stops_what_runs(experiments: Path, ctrl_c: Any) -> None:
    """The child ends with the driver, and what it would have made is still missing; also where a shell had it ignore
    Ctrl-C, as for what goes to the background."""
    (experiments / "shared.yaml").write_text("jobs: []")
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


def test_the_document_is_what_the_results_say(tmp_path: Path) -> None:
    """docs/results.md, rebuilt from the committed result files, is the committed one."""
    plan = spec.read(ROOT / "experiments")
    path = document.build(plan, tmp_path, figures=False)
    assert path.read_text("utf-8") == (ROOT / "docs" / "results.md").read_text("utf-8")


def test_the_readme_shows_what_the_results_say() -> None:
    """Its table is that of docs/results.md, and its figures are there."""
    readme, results = ((ROOT / name).read_text("utf-8").splitlines() for name in ("README.md", "docs/results.md"))
    first = readme.index(next(line for line in readme if line.startswith("| system | exact, nats")))
    rows = [line for line in readme[first : first + 20] if line.startswith("|")]
    start = results.index(rows[0])
    assert rows == results[start : start + len(rows)]
    assert len(rows) > 10
    figures = re.findall(r"\]\((docs/\S+\.svg)\)", "\n".join(readme))
    assert len(figures) >= 3
    for figure in figures:
        assert (ROOT / figure).is_file()


def test_every_result_file_belongs_to_a_job_and_names_its_command() -> None:
    plan = spec.read(ROOT / "experiments")
    expected = {job.result(plan.folder): f"esolm {job.command}" for job in plan.results(plan.experiments)}
    found = {path: json.loads(path.read_text("utf-8")) for path in (ROOT / "experiments").glob("*/results/*.json")}
    assert {path: record["command"] for path, record in found.items()} == {path: expected[path] for path in found}


def test_figures_depend_on_the_results_alone(experiments: Path) -> None:
    pytest.importorskip("matplotlib")
    (experiments / "one" / "report.py").write_text(
        "def report(results): return f'score {results[\"score-1\"]}'\n"
        "def figures(results):\n"
        "    from matplotlib import pyplot as plt\n"
        "    figure, axes = plt.subplots()\n"
        "    axes.plot([0, results['score-1']])\n"
        "    return {'line': figure}\n"
    )
    work = space(experiments)
    work.keep(work.plan.jobs[3], (0, "3", 1.0))
    texts = []
    for folder in ("a", "b"):
        path = document.build(work.plan, experiments.parent / folder)
        texts.append((path.parent / "results" / "line.svg").read_bytes())
        assert "score 3" in path.read_text()
        assert "Not measured yet: 2 of 3" in path.read_text()
    assert texts[0] == texts[1]


def test_smoke_runs_the_whole_pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["reproduce", "--smoke", "true"]) == 0
    assert "a document of" in capsys.readouterr().err
