"""The engine: rows join and leave between passes, and each pass serves rows in any step, phase and sampler.

`step` reads: sweep, admit, run, resume, retire. A request's result is that of `lm.sample` alone, because it runs the
same loop with the same random numbers; only its network calls are shared with others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..model import LanguageModel, Row
from ..net.cache import KVCache
from ..sampling.options import SamplingOptions
from ..sampling.passes import Deferred, Pass
from .options import EngineOptions
from .pool import KVPool, Lease
from .request import DONE, FAILED, Generation
from .runner import Pending, Runner
from .scheduler import Between, Errand, Scheduler

SLACK = 32
"""Slots of a row beyond the length: the start token, and masks in the place of drafts."""


class Engine:
    """Samples many requests together. `start` runs it on a thread; without, call `step` or `finish`."""

    def __init__(self, lm: LanguageModel, options: EngineOptions | None = None) -> None:
        self.lm, self.options = lm, options or EngineOptions()
        config = lm.net.config
        if lm.system.latent_width is not None:
            raise ValueError(
                f"{lm.system.name} cannot be served, because a pass that is fed embeddings serves one request only: "
                "use `esolm sample` or `esolm infill`"
            )
        self.max_length = self.options.max_length or config.length
        if config.positions == "learned" and self.max_length > config.length:
            raise ValueError(f"max_length is {self.max_length}; this model has {config.length} learned positions")
        capacity = self.max_length + SLACK
        row_bytes = (
            2 * config.layers * config.sizes.kv_heads * config.sizes.head_width * capacity * lm.net.dtype.itemsize
        )
        rows = self.options.max_batch
        if self.options.kv_memory is not None:
            rows = min(rows, self.options.kv_memory // row_bytes)
            if rows < 1:
                raise ValueError(f"kv_memory is {self.options.kv_memory} bytes; one row needs {row_bytes}")
        self.pool = KVPool(lm.net.new_cache, rows, capacity)
        self.runner = Runner(lm.net, self.pool, self.options.chunk)
        self.scheduler = Scheduler(rows, self.options.max_queue)
        self.passes = self.committed = 0
        self._pending: dict[Generation, Pending] = {}
        self._leases: dict[Generation, Lease] = {}
        self._thread: threading.Thread | None = None
        self._errand: Errand | None = None  # the one that runs

    def generation(self, row: Row, options: SamplingOptions, *index: int, **more: Any) -> Generation:
        """A request that this engine can run; raises ValueError for one that it cannot."""
        if len(row) > self.max_length:
            raise ValueError(f"{len(row)} tokens with what is to be generated; at most {self.max_length} are allowed")
        if options.sampler == "speculative" and options.window is not None and options.window >= SLACK:
            raise ValueError(f"window is {options.window}; it must be below {SLACK}")
        if options.cache not in (None, "none"):
            raise ValueError(f"cache {options.cache} cannot be served, because requests share a KV pool: leave it out")
        return Generation(self.lm, row, options, *index, **more)

    def submit(self, *some: Generation) -> None:
        """Queue requests, all or none, from any thread. Raises QueueFull or Stopping."""
        self.scheduler.add(some)

    def cancel(self, *some: Generation) -> None:
        """End requests, from any thread; their rows are free at the next pass."""
        self.scheduler.cancel(some)

    def errand(self, function: Callable[[Between], Any], seconds: float | None = None) -> Errand:
        """Run a function on the engine's thread: networks are not called from two threads. Its argument lets the engine
        make a pass, so that requests go on. seconds: a time limit. Raises QueueFull or Stopping."""
        made = Errand(function, None if seconds is None else time.monotonic() + seconds)
        self.scheduler.add_errand(made)
        return made

    def step(self) -> bool:
        """One errand, if any waits, and one pass; returns whether there was anything to do."""
        worked = self._run_errand()
        return self.make_pass() or worked

    @torch.inference_mode()
    def make_pass(self) -> bool:
        """One pass; returns whether there was anything to do."""
        self.scheduler.sweep()
        self._retire()
        for generation in self.scheduler.admitted():
            self._wait_for(generation, generation.start(self._network(generation)))
        self._retire()
        pending = [self._pending[each] for each in self.scheduler.live]
        if not pending:
            return False
        self.runner.run(pending)
        self.passes += 1
        for generation, each in zip(list(self.scheduler.live), pending, strict=True):
            if each.error is not None:
                generation.end(FAILED, each.error)
            elif each.finished:
                before = len(generation.chosen)
                self._wait_for(generation, generation.resume(each.logits, each.tokens))
                self.committed += len(generation.chosen) - before
        self._retire()
        return True

    def finish(self) -> None:
        """Run until nothing is left to do."""
        while self.step():
            pass

    def start(self) -> None:
        """Run on a thread of its own until `stop`, once."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before: make a new one")
        self._thread = threading.Thread(target=self._loop, name="esolm-engine", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> bool:
        """Accept nothing more, finish what was accepted within `seconds`, and end the rest. Returns whether all was."""
        self.scheduler.close()
        if self._thread is not None:
            self._thread.join(seconds)
        unfinished = self.end_all()
        if self._thread is not None:
            self._thread.join()
        return not unfinished

    def end_all(self) -> int:
        """End all requests and errands, from any thread; returns their number."""
        with self.scheduler.changed:
            rest, errands = [*self.scheduler.queue, *self.scheduler.live], [*self.scheduler.errands]
            if (running := self._errand) is not None:
                errands.append(running)
        self.cancel(*rest)
        for errand in errands:
            errand.cancelled = True
        return len(rest) + len(errands)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            worked = self._run_errand()
            if not (self._safe_pass() or worked) and not self.scheduler.wait(1.0):
                return

    def _safe_pass(self) -> bool:
        """A pass; if the engine itself fails in it, the requests that run end, and the next ones are served."""
        try:
            return self.make_pass()
        except Exception:
            logging.getLogger("esolm").exception("the engine failed in a pass; all its requests end")
            for each in self.scheduler.live:
                each.end(FAILED, "the engine failed")
            return True

    def _run_errand(self) -> bool:
        with self.scheduler.changed:
            if not self.scheduler.errands:
                return False
            self._errand = errand = self.scheduler.errands.popleft()

        def between() -> None:
            errand.check()
            self._safe_pass()

        if errand.found.set_running_or_notify_cancel():
            try:
                errand.check()
                errand.found.set_result(errand.function(between))
            except Exception as error:
                errand.found.set_exception(error)
        self._errand = None
        return True

    def _network(self, generation: Generation) -> Deferred:
        """The network as a request sees it: its cache is a row of the pool."""

        def new_cache(batch: int, capacity: int) -> KVCache:
            assert batch == 1, "a request is one row"
            if generation not in self._leases:
                self._leases[generation] = self.pool.lease()
            return self._leases[generation].cache

        return Deferred(self.lm.net, new_cache)

    def _wait_for(self, generation: Generation, wanted: Pass | None) -> None:
        if wanted is None:
            self._pending.pop(generation, None)
        else:
            lease = self._leases[generation] if wanted.cache is not None else None
            self._pending[generation] = pending = Pending(wanted, lease)
            self.runner.follow(pending)

    def _retire(self) -> None:
        for generation in self.scheduler.retired():
            self._pending.pop(generation, None)
            if lease := self._leases.pop(generation, None):
                self.runner.forget(lease)
                self.pool.release(lease, scrub=generation.state != DONE)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
