"""Rewards in processes of their own, so that one that raises, hangs or dies costs one reward and not the run."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

from .options import Reward

Function = Callable[[list[str], list[dict[str, Any]]], Sequence[float | Mapping[str, float]]]


class Scored(NamedTuple):
    """The reward of one text, NaN if it failed, its parts, and what went wrong."""

    reward: float
    parts: dict[str, float]
    error: str | None = None


def find_reward(name: str, keywords: Mapping[str, Any]) -> Function:
    """The reward of this name, with its keyword arguments; raises ValueError if there is none."""
    from . import rewards

    if name in rewards.BUILT_IN:
        found: Any = rewards.BUILT_IN[name]
    else:
        module, colon, attribute = name.partition(":")
        if not (module and colon and attribute):
            known = ", ".join(rewards.BUILT_IN)
            raise ValueError(f"no reward {name!r}: choose one of {known}, or give package.module:function")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"no reward {name!r}: {error}") from error
    try:
        inspect.signature(found).bind(*(() if isinstance(found, type) else ([], [])), **keywords)
    except TypeError as error:
        raise ValueError(f"reward {name} does not take reward.options {json.dumps(dict(keywords))}: {error}") from error
    return found(**keywords) if isinstance(found, type) else partial(found, **keywords)


def checked(value: float | Mapping[str, float]) -> Scored:
    """A reward as a function returned it: a number, or parts of which one is the `reward`."""
    parts = {name: float(part) for name, part in value.items()} if isinstance(value, Mapping) else {}
    if parts and "reward" not in parts:
        return Scored(math.nan, {}, f"returned the parts {', '.join(parts)} without a reward")
    reward = parts.pop("reward") if isinstance(value, Mapping) else float(value)
    if not all(map(math.isfinite, (reward, *parts.values()))):
        return Scored(math.nan, {}, f"returned {value}")
    return Scored(reward, parts)


def _serve(pipe: Connection, name: str, keywords: dict[str, Any]) -> None:
    """The process of a worker: answer calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    try:
        function = find_reward(name, keywords)
    except Exception as error:
        pipe.send(f"{error}" if isinstance(error, ValueError) else f"reward {name} cannot be loaded: {error!r}")
        return
    pipe.send(None)
    while True:
        try:
            texts, rows = pipe.recv()
        except EOFError:
            return
        try:
            values = list(function(texts, rows))
            if len(values) != len(texts):
                raise ValueError(f"{len(values)} rewards for {len(texts)} texts")
            pipe.send([checked(value) for value in values])
        except Exception as error:
            pipe.send(f"raised {error!r}")


class Worker:
    """One process, and the texts that it has been given."""

    def __init__(self, reward: Reward) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, reward.name, reward.keywords()), daemon=True)
        self.process.start()
        theirs.close()
        self.ready, self.deadline = False, time.monotonic() + reward.loading
        self.texts: list[int] = []

    @property
    def idle(self) -> bool:
        """Whether the process is ready and has nothing to do."""
        return self.ready and not self.texts

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Worker processes of one reward; raises ValueError if it cannot be loaded."""

    def __init__(self, reward: Reward) -> None:
        if not reward.name:
            raise ValueError("give a reward: --reward molecules, or package.module:function")
        self.reward = reward
        self.workers = [Worker(reward) for _ in range(reward.workers)]
        try:
            while not all(worker.ready for worker in self.workers):
                self._listen({}, [])
        except BaseException:
            self.close()
            raise

    def __call__(self, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[Scored]:
        """The reward of each text, with its row of data."""
        found: dict[int, Scored] = {}
        chunk = self.reward.chunk
        waiting = deque(list(range(len(texts)))[first : first + chunk] for first in range(0, len(texts), chunk))
        while len(found) < len(texts):
            for worker in self.workers:
                if waiting and worker.idle:
                    worker.texts = waiting.popleft()
                    worker.deadline = time.monotonic() + self.reward.timeout
                    worker.pipe.send(([texts[i] for i in worker.texts], [rows[i] for i in worker.texts]))
            for index, error in self._listen(found, waiting):
                found[index] = Scored(math.nan, {}, error)
        return [found[i] for i in range(len(texts))]

    def _listen(self, found: dict[int, Scored], waiting: Any) -> list[tuple[int, str]]:
        """Wait for an answer or a deadline; returns the texts that failed, alone, and why."""
        soonest = min(worker.deadline for worker in self.workers)
        limit = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
        answered = wait([worker.pipe for worker in self.workers], limit)
        failed: list[tuple[int, str]] = []
        for number, worker in enumerate(self.workers):
            if worker.pipe in answered:
                error = self._answer(worker, found)
            elif time.monotonic() >= worker.deadline and not worker.ready:
                raise ValueError(
                    f"reward {self.reward.name} was not ready after {self.reward.loading:g} s: raise reward.loading, "
                    "or see what it waits for"
                )
            elif time.monotonic() >= worker.deadline:
                error = f"took more than {self.reward.timeout:g} s"
            else:
                continue
            if error is not None:
                failed += [(worker.texts[0], error)] if len(worker.texts) == 1 else []
                waiting.extend([index] for index in worker.texts if len(worker.texts) > 1)
            texts, worker.texts = worker.texts, []
            if error is not None and (time.monotonic() >= worker.deadline or not worker.process.is_alive()):
                worker.close()
                self.workers[number] = Worker(self.reward)
            elif texts:
                worker.deadline = math.inf
        return failed

    def _answer(self, worker: Worker, found: dict[int, Scored]) -> str | None:
        """Take the answer of a worker; returns what went wrong with its call."""
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            if not worker.ready:
                raise ValueError(f"the process of reward {self.reward.name} ended before it was ready") from None
            return f"ended its process with code {worker.process.exitcode}"
        if not worker.ready:
            if answer is not None:
                raise ValueError(answer)
            worker.ready, worker.deadline = True, math.inf
            return None
        if isinstance(answer, str):
            return answer
        found.update(zip(worker.texts, answer, strict=True))
        return None

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
