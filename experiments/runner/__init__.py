"""`esolm reproduce`: the paper's findings at laptop scale, from corpora to docs/results.md."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from esolm import cli
from esolm.cli.parsing import parse, parser
from experiments.runner import document, jobs, spec


def reproduce(
    names: list[str] | None = None,
    experiments: str = "experiments",
    workspace: str = "workspace",
    docs: str = "docs",
    corpora: str | None = None,
    judge: str | None = None,
    embedder: str | None = None,
    workers: int = 2,
    list: bool = False,
    only_report: bool = False,
    smoke: bool = False,
    command: jobs.Command | None = None,
) -> int:
    """Run what is missing of the experiments, and write docs/results.md from their results.

    The same command again goes on where it stopped; results that are there are not made again, nor the models that
    only they needed.

    Args:
        names: experiments to run, or results of one, such as 'quality/time-*'; all by default.
        experiments: the folder of the experiments.
        workspace: where data, models and samples are kept; large, and not for a commit.
        docs: where results.md and its figures are written.
        corpora: the folder of the corpora that docs/results.md names; or the variable ESOLM_CORPORA.
        judge: a causal language model for transformers, which judges samples; or ESOLM_JUDGE.
        embedder: a sentence embedder for transformers, for MAUVE; or ESOLM_EMBEDDER.
        workers: jobs at a time, each with its share of the cores; those that time something run alone.
        list: print what is missing, and do nothing.
        only_report: write the document from the results that are there.
        smoke: everything at tiny sizes, in a temporary folder, on made-up corpora.
        command: what `esolm` does with words, for the jobs of the smoke run, which start no process.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    if smoke:
        from experiments.runner.smoke import run

        assert command is not None
        return run(Path(experiments), names, command, console)
    plan = spec.read(Path(experiments))
    chosen = _choose(plan, names)
    given = {"CORPORA": corpora, "JUDGE": judge, "EMBEDDER": embedder}
    places = {name: value or os.environ.get(f"ESOLM_{name}") for name, value in given.items()}
    found = {name: str(Path(value).resolve()) for name, value in places.items() if value}
    space = jobs.Workspace(Path(workspace).resolve(), plan, found)
    missing = [] if only_report else space.missing(chosen)
    if list:
        for job in missing:
            print(f"{job.title}: esolm {job.command}")
        return 0
    for job in missing:
        space.words(job)  # says now what a later job will lack
    failed = []
    if missing:
        left = space.estimate(missing)
        ahead = "" if left is None else f", about {left / workers / 60:.0f} min"
        console.print(f"{len(missing)} jobs are missing{ahead}; logs are in {space.folder / 'logs'}")
        space.folder.mkdir(parents=True, exist_ok=True)
        failed = jobs.run_all(space, missing, workers, console)
    console.print(f"wrote {document.build(plan, Path(docs))}")
    if failed:
        raise ValueError(f"{len(failed)} jobs failed: {', '.join(failed[:8])}; their logs say why")
    return 0


def _choose(plan: spec.Plan, names: list[str] | None) -> list[str]:
    if unknown := [name for name in names or [] if name not in plan.experiments and not plan.results([name])]:
        known = ", ".join(plan.experiments)
        raise ValueError(f"no experiment {unknown[0]!r}: choose from {known}, or a result as EXPERIMENT/RESULT")
    chosen = names or plan.experiments
    return [*dict.fromkeys(n for name in chosen for n in (name, *plan.uses.get(name, ())))]


def main(argv: Sequence[str]) -> int:
    """Run the command; user errors print one line and exit with 2."""
    made = parser("experiments [NAME ...]", str(reproduce.__doc__).split("\n", 1)[0])
    made.add_argument("names", type=str, nargs="*", help="Experiments to run (default: all).")
    made.add_function_arguments(reproduce, skip={"names", "command"})
    try:
        return reproduce(**parse(made, argv), command=cli.main)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
