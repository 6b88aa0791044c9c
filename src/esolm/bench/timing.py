"""Interleaved timing: every case once a round, so that a slow minute of the machine hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Timing(NamedTuple):
    """Seconds of one case."""

    median: float
    low: float  # first and third quartile
    high: float


def interleaved(
    cases: Mapping[str, Callable[[int], object]],
    rounds: int,
    warmup: int = 1,
    before: Mapping[str, Callable[[int], object]] | None = None,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each call case(number), round by round; the warm-up rounds are not counted, and neither is what has to
    be done before a case. What takes microseconds is called several times in a round."""
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
    """Median and quartiles."""
    if len(seconds) < 2:
        return Timing(seconds[0], seconds[0], seconds[0])
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high)


def ratio(above: list[float], below: list[float]) -> Timing:
    """Median and quartiles of the ratios within each round."""
    return summary([a / b for a, b in zip(above, below, strict=True)])


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
