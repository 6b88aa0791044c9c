"""The experiments as data: which commands make what, and which results a document needs.

`experiments/NAME/experiment.yaml` lists jobs, `experiments/shared.yaml` those that several experiments need (prepared
data, trained models). A job is one command of `esolm`. With `makes` it leaves a file or folder in the workspace;
without, what it prints as JSON is a result. A command that names what another job makes needs that job. A report sees
the results of its own experiment, and those of others that `uses` names.

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
PLACES = ("CORPORA", "JUDGE", "EMBEDDER")
"""What a command may name as $CORPORA and so on; where these are is for the user to say."""


@dataclass(frozen=True)
class Job:
    """One command."""

    experiment: str | None  # whose result it is; None if shared
    name: str
    command: str  # the words after `esolm`, with $CORPORA and the like
    makes: str | None = None  # relative to the workspace; a result without it
    alone: bool = False  # times something: nothing else may run

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def title(self) -> str:
        return f"{self.experiment}/{self.name}" if self.experiment else self.name

    def result(self, experiments: Path) -> Path:
        """The file of its result."""
        return experiments / str(self.experiment) / "results" / f"{self.name}.json"


@dataclass(frozen=True)
class Plan:
    """All jobs of all experiments, in the order in which they may run."""

    folder: Path
    experiments: tuple[str, ...]  # in the order of the document
    jobs: tuple[Job, ...]
    uses: Mapping[str, tuple[str, ...]]  # results of others that an experiment reports too

    def results(self, names: Iterable[str]) -> list[Job]:
        """The jobs whose results are named, by experiment or as `EXPERIMENT/RESULT`, where * stands for anything."""
        found = [job for job in self.jobs if job.experiment and job.makes is None]
        wanted = [*names]
        return [job for job in found if job.experiment in wanted or any(fnmatchcase(job.title, n) for n in wanted)]

    def needs(self, job: Job) -> list[Job]:
        """Those that make what its command names."""
        made = {other.makes: other for other in self.jobs if other.makes and other is not job}
        return [made[word] for word in dict.fromkeys(_paths(job.words)) if word in made]


def _paths(words: Iterable[str]) -> Iterator[str]:
    """The words, and the items of those that are lists."""
    for word in words:
        yield from re.split(r"[\[\],\s]+", word.replace("'", "").replace('"', ""))


def read(folder: Path, smoke: bool = False) -> Plan:
    """The plan of an experiments folder; smoke takes the small values.

    Raises ValueError that names the file and what is wrong in it.
    """
    if not (folder / "settings.yaml").is_file():
        raise ValueError(
            f"no {folder / 'settings.yaml'}: run `esolm reproduce` in a clone, or give --experiments FOLDER"
        )
    settings = _load(folder / "settings.yaml")
    values = dict(settings["values"]) | (dict(settings["smoke"]) if smoke else {})
    names = tuple(settings["experiments"])
    paths = {name: folder / name / "experiment.yaml" for name in names}
    found = {name: _load(path) or {} for name, path in paths.items()}
    jobs = list(_jobs(_load(folder / "shared.yaml") or {}, folder / "shared.yaml", None, values))
    for name in names:
        jobs += _jobs(found[name], paths[name], name, values)
    for key, what in ((lambda job: job.title, "name"), (lambda job: job.makes or job.title, "product")):
        seen: set[str] = set()
        for job in jobs:
            if key(job) in seen:
                raise ValueError(f"two jobs in {folder} have the {what} {key(job)}: rename one")
            seen.add(key(job))
    plan = Plan(folder, names, tuple(jobs), {name: tuple(found[name].get("uses", ())) for name in names})
    for name, others in plan.uses.items():
        if not smoke and (unknown := [other for other in others if not plan.results([other])]):
            raise ValueError(f"{paths[name]} uses {unknown[0]}, and no job makes such a result")
        seen_here = [job.name for job in plan.results([name, *others])]
        if twice := sorted({job for job in seen_here if seen_here.count(job) > 1}):
            raise ValueError(f"{paths[name]} sees two results named {twice[0]}: rename one")
    return plan


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _jobs(found: Mapping[str, Any], path: Path, experiment: str | None, values: Mapping[str, Any]) -> Iterator[Job]:
    for entry in found.get("jobs") or []:
        if unknown := entry.keys() - FIELDS:
            raise ValueError(f"{path} has the field {sorted(unknown)[0]!r} in a job; allowed are {sorted(FIELDS)}")
        for chosen in _choices(entry.get("for", {}), values):
            fill = _Filler(path, {**values, **chosen})
            makes = entry.get("makes")
            command = " ".join(fill(entry["command"]).split())
            name = fill(entry["name"])
            yield Job(experiment, name, command, fill(makes) if makes else None, bool(entry.get("alone", False)))


def _choices(loops: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the loop variables; a string names a list among the values."""
    lists = [values[items] if isinstance(items, str) else items for items in loops.values()]
    for chosen in itertools.product(*lists):
        one: dict[str, Any] = {}
        for name, item in zip(loops, chosen, strict=True):
            one |= item if isinstance(item, dict) else {name: item}
        yield one


class _Filler:
    """Puts values in for {names}."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def __call__(self, text: str) -> str:
        return re.sub(r"\{([a-z_0-9]+)\}", self._value, text)

    def _value(self, found: re.Match[str]) -> str:
        if found[1] not in self.values:
            raise ValueError(f"{self.path} names {{{found[1]}}}; known are {', '.join(sorted(self.values))}")
        value = self.values[found[1]]
        return f"{value:g}" if isinstance(value, float) else str(value)
