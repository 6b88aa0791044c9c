"""Progress reporting: the terminal, TensorBoard, Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..runtime.dotted import flat
from . import runs
from .config import RunConfig

LINE_SECONDS = 5.0
"""Least time between two lines of a log that is not a terminal."""
MANY_EPOCHS = 20
"""Passes over the training split beyond which small models mostly learn it by heart."""
Sink = Callable[[Mapping[str, Any]], None]


class Live:
    """Progress of training: a bar on a terminal, plain lines elsewhere, and each record to the sinks."""

    def __init__(self, start: int, steps: int, sinks: Sequence[Sink] = (), console: Console | None = None) -> None:
        self.steps, self.sinks = steps, sinks
        self.printed, self.warned = -math.inf, False
        self.console = console or Console(highlight=False)
        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, completed=start)

    def step(self, record: Mapping[str, Any]) -> None:
        """Update the bar, or where there is none, print a line every few seconds."""
        self.bar.update(self.task, completed=record["step"], description=_summary(record))
        if not self.console.is_terminal and time.monotonic() - self.printed > LINE_SECONDS:
            self.printed = time.monotonic()
            left = (self.steps - record["step"]) * record["time"]["seconds"] / record["step"]
            self.console.print(f"step {record['step']}/{self.steps}: {_summary(record)} · {left:.0f} s left")

    def record(self, record: Mapping[str, Any]) -> None:
        """Report a record of metrics.jsonl."""
        for sink in self.sinks:
            sink(record)
        if "validation" in record:
            found = record["validation"]
            if "perplexity" in found:
                bound = f"{found['loss']:.4f} nats/token, perplexity {found['perplexity']:.2f}"
            else:  # of `esolm tune`
                bound = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float))
            others = "".join(f"; alpha_0 = {key}: {nats:.4f}" for key, nats in found.get("alpha_0", {}).items())
            others += "".join(f"; {key} = {value:g}" for key, value in found.get("chosen", {}).items())
            self.console.print(f"step {record['step']}: validation {bound}{others}")
            return
        if (record.get("reward") or {}).get("failed"):
            errors = "; ".join(f"{error} ({number})" for error, number in record["errors"].items())
            self.console.print(f"step {record['step']}: {record['reward']['failed']} rewards failed: {errors}")
        elif (record.get("reward") or {}).get("std") == 0 and not self.warned:
            self.warned = True
            self.console.print(
                f"step {record['step']}: all rewards are {record['reward']['mean']:g}, and nothing can be learned from "
                "equal ones: choose a reward that some samples get and others do not"
            )

    def __enter__(self) -> Live:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


def opening(config: RunConfig, parameters: int, sequences: int | None = None) -> str:
    """The size of a new run, and what in its options looks like a mistake.

    sequences: those of the training split.
    """
    steps, warmup, curriculum = config.steps, config.optim.warmup, config.system.get("curriculum") or 0
    if type(config) is not RunConfig:  # one of `esolm tune`, which does not follow the curriculum of the model's system
        curriculum = 0
    text = f"{parameters:,} parameters, {config.batch.size} x {config.net['length']} tokens a step, {steps:,} steps"
    if sequences is not None and (epochs := steps * config.batch.size / sequences) > MANY_EPOCHS:
        text += (
            f"\nthe training split has {sequences:,} sequences, so each is seen {epochs:,.0f} times, and the model "
            f"will learn them by heart: prepare more text, or give --steps "
            f"{max(1, MANY_EPOCHS * sequences // config.batch.size)}"
        )
    if curriculum > steps:
        text += (
            f"\nsystem.curriculum is {curriculum} and steps is {steps}, so alpha_0 will not rise above "
            f"{steps / curriculum:.2g} of its value: add --system.curriculum {max(1, steps // 4)}"
        )
    if warmup >= steps > 1:
        text += (
            f"\noptim.warmup is {warmup} and steps is {steps}, so the learning rate will not reach {config.optim.lr:g}"
        )
    return text


def advice(config: RunConfig, run: Path, step: int) -> str:
    """For a run that has nothing left to do: how to train longer."""
    more = "To train longer, raise --steps"
    if not runs.same_rates(config.tree(), {**config.tree(), "steps": 2 * step}, step):
        more = (
            f"Its learning rate has fallen by the number of steps, so --steps cannot be raised. To train on from its "
            f"weights, start a new run with --init {run} --run FOLDER"
        )
    return f"{run} is finished: {step} of {config.steps} steps. {more}"


def _summary(record: Mapping[str, Any]) -> str:
    terms = " ".join(f"{name} {nats:.3f}" for name, nats in record["terms"].items())
    if "reward" in record:
        terms = f"reward {record['reward']['mean']:.3f} {terms}"
    return f"{terms} · {record['time']['tokens_per_second']:,.0f} tok/s"


def loggers(names: Sequence[str]) -> list[Callable[[Path], Sink]]:
    """A function that opens each of the named loggers for a run; raises ValueError if one is not installed."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    for name in names:
        if name not in makers:
            raise ValueError(f"no logger {name!r}: choose from {', '.join(makers)}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"log {name} needs an extra package: pip install 'esolm[{name}]'")
    return [makers[name] for name in names]


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    values = {key: value for key, value in record.items() if key not in ("step", "errors")}
    return {key.replace(".", "/"): value for key, value in flat(values).items()}


def _tensorboard(run: Path) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def write(record: Mapping[str, Any]) -> None:
        for key, value in _numbers(record).items():
            writer.add_scalar(key, value, record["step"])
        writer.flush()

    return write


def _wandb(run: Path) -> Sink:
    import wandb

    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]  # a resumed run has the same id
    session = wandb.init(project="esolm", name=run.name, id=name, dir=str(run), resume="allow")
    return lambda record: session.log(_numbers(record), step=record["step"])
