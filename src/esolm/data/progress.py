"""A progress bar that stays away from short work and from logs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_PATIENCE = 2.0  # seconds
T = TypeVar("T")


def progress(items: Iterable[tuple[T, int]], what: str, total: int | None) -> Iterator[T]:
    """Pass items on, counting their bytes; on a terminal, after two seconds, show speed and time left."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(what, total=total)
    start, shown = time.monotonic(), False
    try:
        for item, size in items:
            yield item
            bar.advance(task, size)
            if not shown and console.is_terminal and time.monotonic() - start > _PATIENCE:
                bar.start()
                shown = True
    finally:
        if shown:
            bar.stop()
