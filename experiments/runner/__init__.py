"""Runs the experiments: the paper's findings at laptop scale, from corpora to docs/results.md."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from esolm import cli
from esolm.cli.parsing import parse, parser
from experiments.runner import document, jobs, spec
from experiments.runner.smoke import run as run_smoke


def run(
    names: list[str] | None = None,
    experiments: str = "experiments",
    workspace: str = "workspace",
    docs: str = "docs",
    corpora: str | None = None,
    judge: str | None = None,
    embedder: str | None = None,
    models: str | None = None,
    workers: int = 2,
    list: bool = False,
    only_report: bool = False,
    smoke: bool = False,
) -> int:
    """Run the missing jobs of the experiments and write docs/results.md from their results.

    After an interruption, the same command resumes. Existing results are kept, and models are trained only if a missing
    result needs them.

    Args:
        names: experiments to run, or single results such as 'quality/time-*'; all by default.
        experiments: folder of the experiments.
        workspace: folder for data, models and samples, which is large and should not be committed.
        docs: folder for results.md and its figures.
        corpora: folder of the corpora that docs/results.md names; default: ESOLM_CORPORA.
        judge: causal language model for transformers that judges samples; default: ESOLM_JUDGE.
        embedder: sentence embedder for transformers, for MAUVE; default: ESOLM_EMBEDDER.
        models: folder of the left-to-right models stories260K and stories15M, as transformers saves them; default:
            ESOLM_MODELS.
        workers: number of parallel jobs, which share the cores; jobs that measure time run alone.
        list: print the missing jobs and exit.
        only_report: write the document from the existing results.
        smoke: run everything at tiny sizes on generated corpora, in a temporary folder.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    if smoke:
        return run_smoke(Path(experiments), names, cli.main, console)
    plan = spec.read(Path(experiments))
    chosen = _choose(plan, names)
    given = {"CORPORA": corpora, "JUDGE": judge, "EMBEDDER": embedder, "MODELS": models}
    places = {name: value or os.environ.get(f"ESOLM_{name}") for name, value in given.items()}
    found = {name: str(Path(value).resolve()) for name, value in places.items() if value}
    space = jobs.Workspace(Path(workspace).resolve(), plan, found)
    missing = [] if only_report else space.missing(chosen)
    if list:
        for job in missing:
            print(f"{job.title}: esolm {job.command}")
        return 0
    for job in missing:
        space.words(job)  # raises if a place is unknown, before any job starts
    failed = []
    if missing:
        left = space.estimate(missing)
        ahead = "" if left is None else f", about {left / workers / 60:.0f} min"
        console.print(f"{len(missing)} jobs to run{ahead}; logs: {space.folder / 'logs'}")
        space.folder.mkdir(parents=True, exist_ok=True)
        failed = jobs.run_all(space, missing, workers, console)
    console.print(f"wrote {document.build(plan, Path(docs))}")
    if failed:
        raise ValueError(f"{len(failed)} jobs failed: {', '.join(failed[:8])}; see the logs in {space.folder / 'logs'}")
    return 0


def _choose(plan: spec.Plan, names: list[str] | None) -> list[str]:
    """Return the experiments and results to run, including those that others use."""
    if unknown := [name for name in names or [] if name not in plan.experiments and not plan.results([name])]:
        known = ", ".join(plan.experiments)
        raise ValueError(f"no experiment {unknown[0]!r}: choose from {known}, or a result as EXPERIMENT/RESULT")
    chosen = names or plan.experiments
    return [*dict.fromkeys(n for name in chosen for n in (name, *plan.uses.get(name, ())))]


def main(argv: Sequence[str]) -> int:
    """Run the command; user errors print one line and exit with 2."""
    made = parser("experiments", str(run.__doc__).split("\n", 1)[0])
    made.prog, made.usage = "python -m experiments", "python -m experiments [NAME ...] [--option VALUE ...]"
    made.add_argument("names", type=str, nargs="*", default=[], help="Experiments to run (default: all).")
    made.add_function_arguments(run, skip={"names"})
    try:
        return run(**parse(made, argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
