"""A progress bar that stays away from short work and from logs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_PATIENCE = 2.0  # seconds
T = TypeVar("T")


def progress(items: Iterable[tuple[T, int]], what: str, total: int | None) -> Iterator[T]:
    """Pass items on, counting their bytes; on a terminal, after two seconds, show speed and time left."""
    return shown(items, what, total, DownloadColumn(), TransferSpeedColumn())


def shown(items: Iterable[tuple[T, int]], what: str, total: int | None, *columns: ProgressColumn) -> Iterator[T]:
    """Pass items on, counting their sizes; on a terminal, after two seconds, a bar on standard error."""
    console = Console(stderr=True)
    around = TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(compact=True)
    bar = Progress(*around, console=console, transient=True)
    task = bar.add_task(what, total=total)
    start, showing = time.monotonic(), False
    try:
        for item, size in items:
            yield item
            bar.advance(task, size)
            if not showing and console.is_terminal and time.monotonic() - start > _PATIENCE:
                bar.start()
                showing = True
    finally:
        if showing:
            bar.stop()
