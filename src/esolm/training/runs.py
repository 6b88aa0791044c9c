"""A run folder: config.yaml, metrics.jsonl, checkpoints/, and the tokenizer and manifest of its data.

The folder is created atomically. On resuming, `metrics.jsonl` is cut to the step of the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from ..net.config import with_defaults
from ..runtime import files
from ..runtime.dotted import differing
from ..storage import checkpoint
from .learner import learning_rate
from .options import Optim

FREE = (
    *("data", "run", "init", "adapter", "log", "saving.every", "saving.keep", "compute.device", "compute.threads"),
    *("compute.parallel", "compute.offload", "compute.timeout", "compute.checkpoint_blocks"),
    *("reward.workers", "reward.timeout", "reward.chunk", "rollout.keep"),
)
"""Options that do not affect the weights, which a resumed run may change."""
RATES = ("steps", "optim.schedule", "optim.decay")
"""Options that a resumed run may change if that leaves the learning rates of the steps already taken as they were."""


def is_run(run: Path) -> bool:
    """Whether the folder holds a training run."""
    return (run / "config.yaml").is_file()


def read_config(run: Path) -> dict[str, Any]:
    """The complete configuration of the run, as a nested dict."""
    return yaml.safe_load((run / "config.yaml").read_text())


def create(run: Path, config: Mapping[str, Any], copies: Iterable[Path]) -> None:
    """Create a run folder with its configuration and copies of the files that describe its data."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ValueError(f"{run} is not empty and is not a run of esolm: give another --run")
    with files.new_folder(run) as partial:
        for path in copies:
            shutil.copy2(path, partial / path.name)
        files.write(partial / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))


def check_config(run: Path, config: Mapping[str, Any]) -> list[str]:
    """The options that have changed, one sentence each; raises ValueError if the run cannot resume with them."""
    from ..systems import completed
    from .config import RunConfig

    notes, wrong, stored = [], [], read_config(run)
    if "net" in stored:
        stored["net"] = with_defaults(stored["net"])
    defaults = RunConfig().tree()
    for group in RunConfig.groups():  # some options did not exist when the run was started
        stored[group] = {**defaults[group], **stored.get(group, {})}
    same = same_rates(stored, config, max(checkpoint.list_steps(run / "checkpoints"), default=0))
    for key, (old, new) in differing(completed(stored, config), config).items():
        if key in FREE or key.startswith("corpus.") or (key in RATES and same):
            notes.append(f"{key} changed from {old} to {new}")
        else:
            wrong.append(f"{key} was {old!r} and is now {new!r}")
    if wrong:
        again = f"start a new run from its weights with --init {run} --run FOLDER"
        if not any((run / "checkpoints").glob("step-*")):
            raise ValueError(
                f"{run} was started with another configuration: {'; '.join(wrong)}. No step was saved in it: "
                "delete the folder, or give another --run"
            )
        if all(change.startswith(RATES) for change in wrong):
            raise ValueError(
                f"{run} cannot resume: {'; '.join(wrong)}, which would change the learning rates or the number of "
                f"steps that it has taken. Nothing was changed. Give the old values to resume, or {again}"
            )
        raise ValueError(
            f"{run} was started with another configuration: {'; '.join(wrong)}. Nothing was changed. Give the old "
            f"values to resume, or {again}"
        )
    return notes


def same_rates(old: Mapping[str, Any], new: Mapping[str, Any], done: int) -> bool:
    """Whether the first `done` steps have the same learning rates under both configurations, and are in both."""
    one, other = Optim(**old["optim"]), Optim(**new["optim"])
    return new["steps"] >= done and all(
        learning_rate(step, old["steps"], one) == learning_rate(step, new["steps"], other) for step in range(done)
    )


def update_config(run: Path, config: Mapping[str, Any]) -> None:
    """Replace the configuration of a run, which `check_config` has checked."""
    files.write(run / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))


class Metrics:
    """metrics.jsonl, opened and locked by one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.making(path):
            self.file = path.open("ab")
        try:
            self._lock()
        except BaseException:
            self.file.close()
            raise

    def cut(self, length: int) -> None:
        """Drop everything after the first `length` bytes: records of steps after the checkpoint."""
        if (size := self.path.stat().st_size) < length:
            raise ValueError(f"{self.path} has {size} bytes, the checkpoint recorded {length}: restore the old file")
        self.file.truncate(length)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: nothing prevents two processes from training in one folder
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is training in {self.path.parent}: wait for it or stop it") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        self.file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self.file.flush()

    def sync(self) -> int:
        """Flush the file to disk and return its length."""
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()


class NoMetrics(Metrics):
    """No-op writer for ranks > 0."""

    def __init__(self) -> None:
        pass

    def cut(self, length: int) -> None:
        pass

    def write(self, record: Mapping[str, Any]) -> None:
        pass

    def sync(self) -> int:
        return 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; an incomplete last line is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
