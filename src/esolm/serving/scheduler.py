"""Who runs: first come, first served, and everyone who runs takes part in every pass, so nobody starves."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from .request import CANCELLED, FAILED, Generation

TIMED_OUT = "the time limit of the request is over"


class QueueFull(Exception):
    """There are too many requests; try again later."""


class Stopping(Exception):
    """The engine accepts no more requests."""


class Scheduler:
    """The queue and the requests that run. `add` and `cancel` may be called from any thread."""

    def __init__(self, max_batch: int, max_queue: int) -> None:
        self.max_batch, self.max_queue = max_batch, max_queue
        self.queue: deque[Generation] = deque()
        self.errands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.live: list[Generation] = []
        self.changed = threading.Condition()
        self.closed = False
        self._cancelled: set[Generation] = set()

    def add(self, some: Sequence[Generation]) -> None:
        """Queue requests, all or none. Raises QueueFull or Stopping."""
        with self.changed:
            if self.closed:
                raise Stopping("the server is stopping")
            if len(self.queue) + len(some) > self.max_queue:
                raise QueueFull(f"{len(self.queue)} requests wait and at most {self.max_queue} may: try again later")
            self.queue.extend(some)
            self.changed.notify_all()

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

    def wait(self, seconds: float) -> None:
        """Sleep until there is something to do."""
        with self.changed:
            if not (self.queue or self.errands or self._cancelled or self.closed):
                self.changed.wait(seconds)
