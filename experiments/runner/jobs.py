"""Runs the missing jobs: each in its own process, several at a time; jobs that measure time run alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from esolm.bench.report import save
from experiments.runner.spec import PLACES, Job, Plan

Command = Callable[[Sequence[str]], int]
Outcome = tuple[int, str, float]
"""Exit code, standard output, seconds."""


@dataclass
class Workspace:
    """The folder of data, models and samples; `places` are the values of $CORPORA, $JUDGE, $EMBEDDER and $MODELS."""

    folder: Path
    plan: Plan
    places: Mapping[str, str] = field(default_factory=dict)

    def done(self, job: Job) -> bool:
        """Whether the output of the job exists.

        Raises ValueError if it was written by a different command.
        """
        path = self.marker(job)
        if not path.is_file():
            return False
        command = json.loads(path.read_text("utf-8"))["command"]
        if command != f"esolm {job.command}":
            raise ValueError(
                f"{path} was written by `{command}`, but the command is now `esolm {job.command}`: "
                f"delete it and its output to run the job again"
            )
        return job.makes is None or (self.folder / job.makes).exists()

    def marker(self, job: Job) -> Path:
        """Return the result file, or the file next to the output that records its command."""
        return job.result(self.plan.folder) if job.makes is None else self.folder / f"{job.makes}.made.json"

    def missing(self, names: list[str]) -> list[Job]:
        """Return the missing jobs of the named experiments, each right after the jobs it needs.

        A model whose results all exist is not trained.
        """
        seen: set[str] = set()
        found: list[Job] = []

        def want(job: Job) -> None:
            if job.title not in seen and not self.done(job):
                for other in self.plan.needs(job):
                    want(other)
                found.append(job)
            seen.add(job.title)

        for job in self.plan.results(names):
            want(job)
        return found

    def words(self, job: Job) -> list[str]:
        """Return the arguments of the command with $CORPORA and the like replaced.

        Raises ValueError if a place is unknown.
        """
        return [self._expand(word, job) for word in job.words]

    def _expand(self, word: str, job: Job) -> str:
        for name in PLACES:
            if f"${name}" in word and name not in self.places:
                raise ValueError(f"{job.title} needs --{name.lower()} (or ESOLM_{name}): `esolm {job.command}`")
            word = word.replace(f"${name}", self.places.get(name, ""))
        return word

    def make_parent(self, job: Job) -> None:
        """Create the parent folder of the job's output."""
        (self.folder / (job.makes or ".")).parent.mkdir(parents=True, exist_ok=True)

    def keep(self, job: Job, outcome: Outcome) -> None:
        """Write the result, or the file that records the command."""
        _, printed, seconds = outcome
        record: dict[str, Any] = {"command": f"esolm {job.command}", "seconds": round(seconds, 1)}
        if job.makes is None:
            for name, place in self.places.items():
                printed = printed.replace(place, f"${name}")
            try:
                record["result"] = json.loads(printed)
            except json.JSONDecodeError as error:
                raise ValueError(f"`esolm {job.command}` printed no JSON: {printed[:200]!r}") from error
        save(str(self.marker(job)), record)

    def estimate(self, jobs: list[Job]) -> float | None:
        """Estimate the seconds of the jobs from finished jobs of the same command; None if there are none."""
        known: dict[str, list[float]] = {}
        for job in self.plan.jobs:
            if (path := self.marker(job)).is_file():
                known.setdefault(job.words[0], []).append(json.loads(path.read_text("utf-8"))["seconds"])
        means = {word: sum(times) / len(times) for word, times in known.items()}
        if not means:
            return None
        return sum(means.get(job.words[0], sum(means.values()) / len(means)) for job in jobs)


def here(workspace: Workspace, job: Job, command: Command) -> Outcome:
    """Run a job in this process, which saves the start-up time of small jobs."""
    printed, before, start = io.StringIO(), Path.cwd(), time.perf_counter()
    words = workspace.words(job)
    workspace.make_parent(job)
    try:
        os.chdir(workspace.folder)
        with contextlib.redirect_stdout(printed):
            code = command(words)
    finally:
        os.chdir(before)
    return code, printed.getvalue(), time.perf_counter() - start


class Child:
    """A job in its own process, with standard error in a log file."""

    def __init__(self, workspace: Workspace, job: Job, threads: int | None) -> None:
        self.job, self.start = job, time.perf_counter()
        workspace.make_parent(job)
        logs = workspace.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log, self.out = (logs / f"{job.title.replace('/', '.')}.{kind}" for kind in ("log", "out"))
        environment = dict(os.environ)
        if threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        with self.log.open("ab") as errors, self.out.open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "esolm", *workspace.words(job)],
                cwd=workspace.folder, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=errors,
            )  # fmt: skip

    def outcome(self) -> Outcome | None:
        """Return the outcome, or None while the job runs."""
        code = self.process.poll()
        if code is None:
            return None
        return code, self.out.read_text("utf-8"), time.perf_counter() - self.start

    def stop(self) -> None:
        """Terminate the process and wait until it has saved its state."""
        self.process.terminate()
        self.process.wait()

    def last_line(self) -> str:
        """Return the last line of the log or, if it is empty, of the output."""
        texts = (path.read_text("utf-8", errors="replace") for path in (self.log, self.out))
        lines = (line for text in texts for line in reversed(text.splitlines()) if line.strip())
        return next(lines, "no output")


def run_here(workspace: Workspace, jobs: list[Job], command: Command, say: Callable[[str], None]) -> None:
    """Run all jobs one after another in this process."""
    for job in jobs:
        outcome = here(workspace, job, command)
        if outcome[0] != 0:
            raise ValueError(f"`esolm {job.command}` exited with {outcome[0]}: {outcome[1][-500:]}")
        workspace.keep(job, outcome)
        say(f"{job.title}: {outcome[2]:.1f} s")


def run_all(workspace: Workspace, jobs: list[Job], workers: int, console: Console) -> list[str]:
    """Run all jobs, `workers` at a time; return the names of failed jobs and of jobs that needed them."""
    waiting, running, failed = list(jobs), list[Child](), dict[str, str]()
    threads = max(1, (os.cpu_count() or 1) // workers)
    # SIGTERM acts like Ctrl-C, which shells ignore for background processes.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            for child in [child for child in running if child.outcome() is not None]:
                running.remove(child)
                outcome = child.outcome()
                assert outcome is not None
                wrong = _kept(workspace, child.job, outcome) if outcome[0] == 0 else child.last_line()
                if wrong is None:
                    left = workspace.estimate([*waiting, *(other.job for other in running)])
                    share = 1 if any(job.alone for job in waiting) else workers
                    ahead = "" if left is None else f"; about {left / share / 60:.0f} min to go"
                    console.print(f"{child.job.title}: {outcome[2]:.0f} s, {len(waiting)} waiting{ahead}")
                else:
                    failed[child.job.title] = wrong
                    console.print(f"[red]{child.job.title} failed[/red]: {escape(f'{wrong} (log: {child.log})')}")
            if (job := _next(workspace, waiting, running, workers, failed)) is not None:
                waiting.remove(job)
                running.append(Child(workspace, job, None if job.alone else threads))
                console.print(f"{job.title}: esolm {shlex.join(job.words)}", style="dim", markup=False)
            else:
                waiting = [job for job in waiting if not _lost(workspace, job, failed)]
                time.sleep(0.2)
    except BaseException:
        console.print("stopping: running jobs save their state; run the same command again to resume")
        for child in running:
            child.stop()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return list(failed)


def _kept(workspace: Workspace, job: Job, outcome: Outcome) -> str | None:
    """Record the outcome of a job; return what is wrong with it, or None."""
    try:
        workspace.keep(job, outcome)
    except ValueError as error:
        return str(error)
    return None


def _lost(workspace: Workspace, job: Job, failed: dict[str, str]) -> bool:
    if any(other.title in failed for other in workspace.plan.needs(job)):
        failed[job.title] = "a job that it needs failed"
    return job.title in failed


def _next(
    workspace: Workspace, waiting: list[Job], running: list[Child], workers: int, failed: dict[str, str]
) -> Job | None:
    """Return the first job that may start now; jobs that run alone start when no other job is ready."""
    if len(running) >= workers or any(child.job.alone for child in running):
        return None
    unfinished = {job.title for job in waiting} | {child.job.title for child in running} | failed.keys()
    ready = [job for job in waiting if not any(need.title in unfinished for need in workspace.plan.needs(job))]
    for job in ready:
        if not job.alone:
            return job
    return ready[0] if ready and not running else None
