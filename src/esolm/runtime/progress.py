"""One progress bar for all long work: on standard error, on a terminal only, and only after two seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_PATIENCE = 2.0  # seconds
T = TypeVar("T")


class ProgressBar:
    """A bar with the description, the given columns (by default the percentage) and the time left.

    `with ProgressBar("scoring", total) as bar: bar.advance(3)`; quiet: never show it, as on ranks above 0.
    """

    def __init__(self, description: str, total: float | None, *columns: ProgressColumn, quiet: bool = False) -> None:
        self.console, self.quiet = Console(stderr=True), quiet
        columns = TextColumn("{task.description}"), BarColumn(), *(columns or (TaskProgressColumn(),))
        self.bar = Progress(*columns, TimeRemainingColumn(compact=True), console=self.console, transient=True)
        self.task = self.bar.add_task(description, total=total)
        self.started, self.shown = time.monotonic(), False

    def advance(self, amount: float = 1) -> None:
        """Count further work as done."""
        self.bar.advance(self.task, amount)
        self._show()

    def update(self, completed: float, description: str | None = None) -> None:
        """Set the work done so far and, if given, the description."""
        self.bar.update(self.task, completed=completed, description=description)
        self._show()

    def _show(self) -> None:
        late = time.monotonic() - self.started > _PATIENCE
        if late and not self.shown and not self.quiet and self.console.is_terminal:
            self.bar.start()
            self.shown = True

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            self.bar.stop()


def track(items: Sequence[T], description: str) -> Iterator[T]:
    """Yield the items, with a bar that counts them."""
    with ProgressBar(description, len(items)) as bar:
        for item in items:
            yield item
            bar.advance()


def progress(items: Iterable[tuple[T, int]], description: str, total: int | None) -> Iterator[T]:
    """Yield the items without their sizes in bytes, with a bar that shows bytes and speed."""
    with ProgressBar(description, total, DownloadColumn(), TransferSpeedColumn()) as bar:
        for item, size in items:
            yield item
            bar.advance(size)
