"""`python -m experiments`: planning, results and the document."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from experiments.evidence import gains
from experiments.frontier import report as frontier
from experiments.runner import document, jobs, main, run, spec

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


def test_loops_and_values_are_expanded(experiments: Path) -> None:
    plan = spec.read(experiments)
    assert titles(list(plan.jobs)) == ["data", "run-1", "run-2", "one/score-1", "one/score-2", "one/time"]
    assert plan.jobs[1].command == "train demo --run runs/1 --data data/x --steps 4"
    assert titles(list(spec.read(experiments, smoke=True).jobs)) == ["data", "run-1", "one/score-1", "one/time"]


def test_job_needs_the_outputs_its_command_names(experiments: Path) -> None:
    plan = spec.read(experiments)
    needs = {job.title: titles(plan.needs(job)) for job in plan.jobs}
    assert needs["run-1"] == ["data"]
    assert needs["one/score-2"] == ["run-2", "data"]
    assert needs["one/time"] == ["run-1", "run-2"]
    assert needs["data"] == []


def test_only_missing_jobs_run(experiments: Path) -> None:
    """A model whose results all exist is not trained again."""
    work = space(experiments)
    assert len(work.missing(["one"])) == 6
    assert titles(work.missing(["one/score-2"])) == ["data", "run-2", "one/score-2"]
    assert titles(work.missing(["one/score-*"])) == ["data", "run-1", "one/score-1", "run-2", "one/score-2"]
    by_title = {job.title: job for job in work.plan.jobs}
    work.keep(by_title["one/score-2"], (0, '{"nats": 1}', 2.0))
    work.keep(by_title["one/time"], (0, "{}", 2.0))
    assert titles(work.missing(["one"])) == ["data", "run-1", "one/score-1"]
    (work.folder / "data" / "x").mkdir(parents=True)
    work.keep(by_title["data"], (0, "ignored output", 2.0))
    assert titles(work.missing(["one"])) == ["run-1", "one/score-1"]


def test_report_has_the_results_it_uses(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They run once, also if only the experiment that uses them is requested."""
    (experiments / "settings.yaml").write_text(json.dumps(SETTINGS | {"experiments": ["one", "two"]}))
    (experiments / "two").mkdir()
    (experiments / "two" / "experiment.yaml").write_text(
        "uses: [one/score-*]\njobs:\n- {name: own, command: info runs/1 --json}\n"
    )
    work = space(experiments)
    work.keep(next(job for job in work.plan.jobs if job.title == "one/score-1"), (0, "3", 1.0))
    assert dict(document.Results(work.plan, "two")) == {"score-1": 3}
    assert document.Results(work.plan, "two").missing() == ["score-2", "own"]
    run(["two"], str(experiments), str(work.folder), corpora="/corpora", list=True)
    listed = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["data", "run-2", "one/score-2", "run-1", "two/own"]


def test_duplicate_result_names_are_refused(experiments: Path) -> None:
    (experiments / "settings.yaml").write_text(json.dumps(SETTINGS | {"experiments": ["one", "two"]}))
    (experiments / "two").mkdir()
    (experiments / "two" / "experiment.yaml").write_text("uses: [one/time]\njobs: [{name: time, command: x}]\n")
    with pytest.raises(ValueError, match=r"two/experiment.yaml .* time"):
        spec.read(experiments)


def test_output_of_another_command_is_refused(experiments: Path) -> None:
    work = space(experiments)
    job = work.plan.jobs[3]
    work.keep(job, (0, "{}", 1.0))
    path = experiments / "one" / "experiment.yaml"
    path.write_text(path.read_text().replace("score runs", "score --seed 1 runs"))
    with pytest.raises(ValueError, match=r"`esolm score runs/1 .*`esolm score --seed 1 runs/1"):
        space(experiments).missing(["one"])


def test_results_contain_no_local_paths(experiments: Path) -> None:
    work = space(experiments)
    job = next(job for job in work.plan.jobs if job.title == "one/score-1")
    work.keep(job, (0, '{"corpus": "/corpora/x"}', 1.25))
    record = json.loads((experiments / "one" / "results" / "score-1.json").read_text())
    assert record == {"command": f"esolm {job.command}", "seconds": 1.2, "result": {"corpus": "$CORPORA/x"}}
    with pytest.raises(ValueError, match="JSON"):
        work.keep(job, (0, "no", 1.0))


def test_missing_corpora_are_reported_before_any_job_runs(experiments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESOLM_CORPORA", raising=False)
    with pytest.raises(ValueError, match=r"--corpora .*ESOLM_CORPORA"):
        run(experiments=str(experiments), workspace=str(experiments.parent / "work"))
    assert not (experiments.parent / "work").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("one/experiment.yaml", "jobs: [{name: a, command: x, quick: 1}]", "'quick'"),
        (
            "one/experiment.yaml",
            "jobs: [{name: a, command: 'x {nothing}'}]",
            r"\{nothing\}.*sizes, steps",
        ),
        ("one/experiment.yaml", "jobs: [{name: a, command: x}, {name: a, command: y}]", "one/a"),
        ("one/experiment.yaml", "jobs: [", "YAML"),
        ("one/experiment.yaml", "uses: [two/score]", "two/score"),
    ],
)
def test_mistakes_in_a_file_are_reported(experiments: Path, file: str, text: str, message: str) -> None:
    (experiments / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        spec.read(experiments)


def test_command_line(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--experiments={experiments}", f"--workspace={experiments.parent / 'work'}", "--list=true"]
    assert main(["one/score-1", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "one/score-1: esolm score runs/1 data/x --json"
    assert main(["speling", *options]) == 2
    assert "'speling'" in capsys.readouterr().err


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--experiments"):
        spec.read(tmp_path)
    with pytest.raises(ValueError, match=r"'speling'.*perplexity"):
        run(["speling"], experiments=str(ROOT / "experiments"), list=True)
    with pytest.raises(ValueError, match="workers is 0"):
        run(workers=0, experiments=str(ROOT / "experiments"), list=True)


def test_document_matches_the_results(tmp_path: Path) -> None:
    """docs/results.md equals the document rebuilt from the committed result files."""
    plan = spec.read(ROOT / "experiments")
    path = document.build(plan, tmp_path, figures=False)
    assert path.read_text("utf-8") == (ROOT / "docs" / "results.md").read_text("utf-8")


def test_readme_shows_the_table_of_the_results() -> None:
    """The rows of its table are some of those of docs/results.md, and its figures exist."""
    readme, results = ((ROOT / name).read_text("utf-8").splitlines() for name in ("README.md", "docs/results.md"))
    start = results.index(next(line for line in results if line.startswith("| system | exact | change from K")))
    first = readme.index(results[start])
    rows = readme[first : readme.index("", first)]
    table = results[start : results.index("", start)]
    assert rows == [line for line in table if line in rows]
    assert len(rows) > 7
    figures = re.findall(r"\]\((docs/\S+\.(?:svg|gif))\)", "\n".join(readme))
    assert len(figures) >= 3
    for figure in figures:
        assert (ROOT / figure).is_file()


def test_only_exact_values_are_called_exact() -> None:
    """Eso-LM with alpha_0 > 0 has a jackknife estimate, in a column that names its orders and sequences."""
    lines = (ROOT / "docs" / "results.md").read_text("utf-8").splitlines()
    start = lines.index(next(line for line in lines if line.startswith("| system | exact, nats")))
    end = lines.index("", start)
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start:end])
    record = json.loads((ROOT / "experiments" / "perplexity" / "results" / "exact-esolm-1.json").read_text())
    measured = record["result"][0]
    assert header[2] == f"jackknife ({measured['num_orders']} orders, {measured['sequences']} sequences)"
    assert [row[0] for row in rows if row[1]] == ["AR", "AR with AdaLN", "Eso-LM, 0"]
    assert [row[0].split(", ")[1] for row in rows if row[2]] == ["alpha_0 = 1", "0.5", "0.25", "0.125"]
    assert lines[end + 1].startswith("The jackknife is an estimate")


def test_every_result_file_belongs_to_a_job_and_names_its_command() -> None:
    plan = spec.read(ROOT / "experiments")
    expected = {job.result(plan.folder): f"esolm {job.command}" for job in plan.results(plan.experiments)}
    found = {path: json.loads(path.read_text("utf-8")) for path in (ROOT / "experiments").glob("*/results/*.json")}
    assert {path: record["command"] for path, record in found.items()} == {path: expected[path] for path in found}


def test_figures_depend_only_on_the_results(experiments: Path) -> None:
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


def scored(nats: float, stderr: float, jackknife: float | None = None) -> list[dict[str, object]]:
    curve = [{"num_orders": n, "jackknife": jackknife} for n in (32, 64)] if jackknife is not None else None
    return [{"nats": nats, "stderr": stderr, "curve": curve}]


def test_gains_are_paired_by_seed() -> None:
    """The spread is that of the differences; the draws of a bound add their error once, whatever n."""
    results = {
        **{f"bound-ar-{seed}": scored(2.0, 0.3) for seed in gains.SEEDS},
        **{f"bound-esolm-1-{seed}": scored(nats, 0.5) for seed, nats in enumerate((3.0, 4.0, 5.0))},
        **{f"bound-any-1-{seed}": scored(nats, 0.3) for seed, nats in enumerate((2.9, 3.9, 4.7))},
        "bound-mdlm-0": scored(3.5, 0.5),
    }
    assert gains.differences(results, "any-1", "esolm-1") == pytest.approx([0.1, 0.1, 0.3])
    noise, freedom = gains.spread(results)
    assert (noise, freedom) == (pytest.approx(statistics.stdev([0.1, 0.1, 0.3])), 2)
    found = gains.gain(results, "any-1", "esolm-1")
    assert found is not None
    assert found.nats == pytest.approx(0.5 / 3)
    assert found.error == pytest.approx(math.hypot(noise / 3**0.5, 0.4))
    one = gains.gain(results, "mdlm", "esolm-1")
    assert one is not None
    assert (one.seeds, one.error) == (1, pytest.approx(math.hypot(noise, 0.4, 0.4)))
    assert gains.gain(results, "mdlm-unit", "mdlm") is None


def test_the_jackknife_decides_where_both_have_it_for_two_seeds() -> None:
    results = {f"bound-ar-{seed}": scored(2.0, 0.3) for seed in gains.SEEDS}
    for model, values in {"esolm-1": (3.0, 4.0), "any-1": (2.5, 3.52)}.items():
        for seed, nats in enumerate(values):
            results[f"bound-{model}-{seed}"] = scored(nats + 0.1, 0.5)
            results[f"exact-{model}-{seed}"] = scored(nats, 0.2, nats)
    found = gains.decisive(results, "any-1", "esolm-1")
    assert found is not None
    noise = statistics.stdev([0.5, 0.48])
    assert (found.nats, found.error) == (pytest.approx(0.49), pytest.approx(noise / 2**0.5))
    assert gains.spread(results, gains.JACKKNIFE) == (pytest.approx(noise), 1)
    del results["exact-any-1-1"]
    assert gains.decisive(results, "any-1", "esolm-1") == gains.gain(results, "any-1", "esolm-1")


@pytest.mark.parametrize(
    ("nats", "freedom", "verdict"),
    [
        (0.35, 8, "confirmed"),
        (0.33, 8, "not distinguishable"),
        (-0.35, 8, "contradicted"),
        (0.6, 2, "not distinguishable"),
        (9.0, 0, "one run, no verdict"),
    ],
)
def test_verdicts_follow_students_t(nats: float, freedom: int, verdict: str) -> None:
    assert gains.Gain(nats, 0.1, 3, freedom).verdict == verdict


def sampled(
    name: str, nats: float, entropy: float, seconds: float | None
) -> tuple[str, dict[str, object], list[object]]:
    judged = {"samples": 9, "nats": nats, "stderr": 0.05, "entropy": entropy}
    point = {"point": f"{frontier.SETTINGS[name][2]} top_p=0.9", "passes": 32}
    timed = [point | {"seconds_per_sample": seconds, "quartiles": [0.9 * seconds, 1.1 * seconds]}] if seconds else []
    return name, judged, timed


def test_frontier_leaves_out_degenerate_settings_and_differences_within_the_error() -> None:
    measured = (
        sampled("mdlm-32", 5.5, 4.2, 0.04),
        sampled("mdlm-128", 5.4, 4.2, 0.08),  # better by less than two standard errors
        sampled("mdlm-confidence-32", 4.0, 3.8, 0.03),  # low entropy
        sampled("esolm-32", 5.0, 4.1, 0.05),
        sampled("bd3lm-32", 4.0, 4.1, None),
        sampled("ar", 3.5, 4.1, 0.06),
    )
    results: dict[str, object] = {f"judge-{name}": judged for name, judged, _ in measured}
    results["time-16"] = results["time-1"] = {"points": [point for *_, timed in measured for point in timed]}
    found = frontier.points(results)
    assert [p["name"] for p in found if p["degenerate"]] == ["mdlm-confidence-32"]
    assert [p["name"] for p in frontier.frontier(found)] == ["mdlm-32", "esolm-32", "ar"]
    *_, here, verdict = frontier.findings(results)[0]
    assert here == "1 of 2 settings on the frontier of time and judge"
    assert verdict == "open (no times of BD3-LM 4, no MAUVE)"
    results |= {
        f"mauve-{name}": {"mauve": 0.9 if "esolm" in name else 0.1, "mauve_stderr": 0.01} for name, *_ in measured
    }
    del results["judge-bd3lm-32"]
    *_, here, verdict = frontier.findings(results)[0]
    assert here.endswith("1 of 2 settings on the frontier of time and MAUVE")
    assert verdict == "partly"


def test_conclusions_are_listed_below_the_findings(experiments: Path) -> None:
    (experiments / "one" / "report.py").write_text(
        "def report(results): return 'section'\n"
        "def findings(results): return [['claim', '1', '2', 'confirmed']]\n"
        "def conclusions(results): return ['first', 'second']\n"
    )
    (experiments / "conclusion.md").write_text("What we conclude.\n")
    work = space(experiments)
    work.keep(work.plan.jobs[3], (0, "3", 1.0))
    text = document.build(work.plan, experiments.parent / "docs", figures=False).read_text()
    assert "| confirmed |\n\nWhat we conclude.\n\n- first\n- second\n\nsection" in text
