"""Who runs: first come, first served, and everyone who runs takes part in every pass, so nobody starves."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .request import CANCELLED, FAILED, Generation

TIMED_OUT = "the time limit of the request is over"


class QueueFull(Exception):
    """There are too many requests; try again later."""


class Stopping(Exception):
    """The engine accepts no more requests."""


Between = Callable[[], None]
"""Called by an errand between two parts of its work: the engine makes a pass. Raises if the errand is to end."""


@dataclass(eq=False)
class Errand:
    """Work other than sampling for the engine's thread."""

    function: Callable[[Between], Any]
    deadline: float | None
    found: Future[Any] = field(default_factory=Future)
    cancelled: bool = False

    def check(self) -> None:
        """Raise TimeoutError or Stopping if it is to end."""
        if self.cancelled:
            raise Stopping("the server is stopping, or the client went away")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError(TIMED_OUT)


class Scheduler:
    """The queue and the requests that run. `add` and `cancel` may be called from any thread."""

    def __init__(self, max_batch: int, max_queue: int) -> None:
        self.max_batch, self.max_queue = max_batch, max_queue
        self.queue: deque[Generation] = deque()
        self.errands: deque[Errand] = deque()
        self.live: list[Generation] = []
        self.changed = threading.Condition()
        self.closed = False
        self._cancelled: set[Generation] = set()

    def add(self, some: Sequence[Generation]) -> None:
        """Queue requests, all or none. Raises QueueFull or Stopping."""
        with self.changed:
            self._check_room(len(self.queue), len(some))
            self.queue.extend(some)
            self.changed.notify_all()

    def add_errand(self, errand: Errand) -> None:
        """Queue an errand, of which as many may wait as samples. Raises QueueFull or Stopping."""
        with self.changed:
            self._check_room(len(self.errands), 1)
            self.errands.append(errand)
            self.changed.notify_all()

    def _check_room(self, waiting: int, new: int) -> None:
        if self.closed:
            raise Stopping("the server is stopping")
        if waiting + new > self.max_queue:
            raise QueueFull(f"{waiting} requests wait and at most {self.max_queue} may: try again later")

    def cancel(self, some: Sequence[Generation]) -> None:
        """End requests before the next pass."""
        with self.changed:
            self._cancelled.update(each for each in some if not each.ended)
            self.changed.notify_all()

    def close(self) -> None:
        """Accept nothing more; what was accepted goes on."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def sweep(self) -> None:
        """End what was cancelled or is late; drop from the queue what has ended."""
        with self.changed:
            cancelled, self._cancelled = self._cancelled, set()
            everyone = [*self.queue, *self.live]
        now = time.monotonic()
        for each in everyone:
            if each in cancelled:
                each.end(CANCELLED)
            elif each.deadline is not None and now > each.deadline:
                each.end(FAILED, TIMED_OUT)
        with self.changed:
            if any(each.ended for each in self.queue):
                self.queue = deque(each for each in self.queue if not each.ended)

    def retired(self) -> list[Generation]:
        """Take those that have ended off the live ones."""
        ended = [each for each in self.live if each.ended]
        self.live = [each for each in self.live if not each.ended]
        return ended

    def admitted(self) -> Iterator[Generation]:
        """Move requests from the queue to the live ones while there is room."""
        while True:
            with self.changed:
                if not self.queue or len(self.live) >= self.max_batch:
                    return
                found = self.queue.popleft()
                self.live.append(found)
            yield found

    def wait(self, seconds: float) -> bool:
        """Sleep until there is something to do; returns False if there will be nothing any more."""
        with self.changed:
            if not (self.queue or self.errands or self._cancelled):
                if self.closed:
                    return False
                self.changed.wait(seconds)
        return True
