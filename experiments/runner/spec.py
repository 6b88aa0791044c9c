"""The experiments as data: the commands, their outputs, and the results that each report needs.

`experiments/NAME/experiment.yaml` lists the jobs of an experiment, `experiments/shared.yaml` those that several
experiments need (prepared data, trained models). A job is one `esolm` command. With `makes` it writes a file or folder
in the workspace; without, the JSON it prints is a result. A job depends on the jobs whose outputs its command names. A
report has access to the results of its own experiment and to those of others listed under `uses`.

    uses: [perplexity/exact-*]
    jobs:
    - name: nelbo-{run}
      for: {run: [ar, mdlm]}
      command: score runs/{run} data/books --json
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

FIELDS = {"name", "for", "command", "makes", "alone"}
PLACES = ("CORPORA", "JUDGE", "EMBEDDER", "MODELS")
"""Variables ($CORPORA and so on) that a command may contain; the user sets their values."""


@dataclass(frozen=True)
class Job:
    """One `esolm` command."""

    experiment: str | None  # None if shared
    name: str
    command: str  # the arguments of `esolm`, with $CORPORA and the like
    makes: str | None = None  # output path in the workspace; None if it prints a result
    alone: bool = False  # measures time, so no other job may run

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def title(self) -> str:
        return f"{self.experiment}/{self.name}" if self.experiment else self.name

    def result(self, experiments: Path) -> Path:
        """Return the path of its result file."""
        return experiments / str(self.experiment) / "results" / f"{self.name}.json"


@dataclass(frozen=True)
class Plan:
    """All jobs of all experiments, in the order in which they may run."""

    folder: Path
    experiments: tuple[str, ...]  # in the order of the document
    jobs: tuple[Job, ...]
    uses: Mapping[str, tuple[str, ...]]  # results of other experiments that a report uses
    appendix: tuple[str, ...] = ()  # the last of the experiments, whose sections are an appendix

    def results(self, names: Iterable[str]) -> list[Job]:
        """Return the jobs of the named results: an experiment, or `EXPERIMENT/RESULT` with * as a wildcard."""
        found = [job for job in self.jobs if job.experiment and job.makes is None]
        wanted = [*names]
        return [job for job in found if job.experiment in wanted or any(fnmatchcase(job.title, n) for n in wanted)]

    def needs(self, job: Job) -> list[Job]:
        """Return the jobs whose outputs the command of this job names."""
        made = {other.makes: other for other in self.jobs if other.makes and other is not job}
        return [made[word] for word in dict.fromkeys(_paths(job.words)) if word in made]


def _paths(words: Iterable[str]) -> Iterator[str]:
    """Yield the words, splitting lists into their items."""
    for word in words:
        yield from re.split(r"[\[\],\s]+", word.replace("'", "").replace('"', ""))


def read(folder: Path, smoke: bool = False) -> Plan:
    """Read the plan of an experiments folder; `smoke` uses the small values.

    Raises ValueError with the file and the mistake in it.
    """
    if not (folder / "settings.yaml").is_file():
        raise ValueError(
            f"no {folder / 'settings.yaml'}: run `python -m experiments` in the root of a clone, "
            "or give --experiments FOLDER"
        )
    settings = _load(folder / "settings.yaml")
    values = dict(settings["values"]) | (dict(settings["smoke"]) if smoke else {})
    appendix = tuple(settings.get("appendix", ()))
    names = (*settings["experiments"], *appendix)
    paths = {name: folder / name / "experiment.yaml" for name in names}
    found = {name: _load(path) or {} for name, path in paths.items()}
    jobs = list(_jobs(_load(folder / "shared.yaml") or {}, folder / "shared.yaml", None, values))
    for name in names:
        jobs += _jobs(found[name], paths[name], name, values)
    for key, what in ((lambda job: job.title, "name"), (lambda job: job.makes or job.title, "output")):
        seen: set[str] = set()
        for job in jobs:
            if key(job) in seen:
                raise ValueError(f"two jobs in {folder} have the same {what}, {key(job)}: rename one")
            seen.add(key(job))
    plan = Plan(folder, names, tuple(jobs), {name: tuple(found[name].get("uses", ())) for name in names}, appendix)
    for name, others in plan.uses.items():
        if not smoke and (unknown := [other for other in others if not plan.results([other])]):
            raise ValueError(f"{paths[name]} uses {unknown[0]}, which is not the result of any job")
        seen_here = [job.name for job in plan.results([name, *others])]
        if twice := sorted({job for job in seen_here if seen_here.count(job) > 1}):
            raise ValueError(f"{paths[name]} has two results named {twice[0]}: rename one")
    return plan


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} could not be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _jobs(found: Mapping[str, Any], path: Path, experiment: str | None, values: Mapping[str, Any]) -> Iterator[Job]:
    for entry in found.get("jobs") or []:
        if unknown := entry.keys() - FIELDS:
            raise ValueError(
                f"{path} has the unknown field {sorted(unknown)[0]!r} in a job; allowed are {sorted(FIELDS)}"
            )
        for chosen in _choices(entry.get("for", {}), values):
            expand = _Template(path, {**values, **chosen})
            makes = entry.get("makes")
            command = " ".join(expand(entry["command"]).split())
            name = expand(entry["name"])
            yield Job(experiment, name, command, expand(makes) if makes else None, bool(entry.get("alone", False)))


def _choices(loops: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the loop variables; a string refers to a list in the values."""
    lists = [values[items] if isinstance(items, str) else items for items in loops.values()]
    for chosen in itertools.product(*lists):
        one: dict[str, Any] = {}
        for name, item in zip(loops, chosen, strict=True):
            one |= item if isinstance(item, dict) else {name: item}
        yield one


class _Template:
    """Replaces {names} by their values."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def __call__(self, text: str) -> str:
        return re.sub(r"\{([a-z_0-9]+)\}", self._value, text)

    def _value(self, found: re.Match[str]) -> str:
        if found[1] not in self.values:
            raise ValueError(
                f"{self.path} has the unknown name {{{found[1]}}}; known are {', '.join(sorted(self.values))}"
            )
        value = self.values[found[1]]
        return f"{value:g}" if isinstance(value, float) else str(value)
