"""Interleaved timing: every case runs once per round, so that changes in machine load affect all cases equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Timing(NamedTuple):
    """Median and quartiles, in seconds or as ratios."""

    median: float
    low: float  # first and third quartile
    high: float

    def record(self, name: str, digits: int, quartiles: str = "quartiles") -> dict[str, Any]:
        """The median as `name`, and the quartiles, rounded."""
        return {name: round(self.median, digits), quartiles: [round(self.low, digits), round(self.high, digits)]}


def interleaved(
    cases: Mapping[str, Callable[[int], object]],
    rounds: int,
    warmup: int = 1,
    before: Mapping[str, Callable[[int], object]] | None = None,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Return the seconds of each case in each round, without warm-up rounds and without `before`.

    A case is called as case(number), `calls` times per round, so that calls of microseconds can be timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=(rounds + warmup) * len(cases))
        for i in range(rounds + warmup):
            for name, case in cases.items():
                bar.update(task, description=name)
                if before and name in before:
                    before[name](i)
                synchronize()
                start = time.perf_counter()
                for j in range(calls):
                    case(calls * i + j)
                synchronize()
                if i >= warmup:
                    seconds[name].append((time.perf_counter() - start) / calls)
                bar.advance(task)
    return seconds


def summary(seconds: list[float]) -> Timing:
    """Return median and quartiles."""
    if len(seconds) < 2:
        return Timing(seconds[0], seconds[0], seconds[0])
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high)


def ratio(above: list[float], below: list[float]) -> Timing:
    """Return median and quartiles of the ratios within each round."""
    return summary([a / b for a, b in zip(above, below, strict=True)])


def synchronize() -> None:
    """Wait for the GPU, if any."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
