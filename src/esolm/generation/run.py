"""Runs the sampling loop of a system and reports each step.

Shapes: B batch, L length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from ..core.draw import BadLogits
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..net.protocol import Network
from ..sampling.events import Event
from ..sampling.request import Request, Step
from ..systems import System


def run(net: Network, system: System, batches: Iterable[tuple[Request, Schedule, Randomness]]) -> Iterator[Event]:
    """Carry out planned requests one after another, and yield an event after each step."""
    for request, schedule, rng in batches:
        begin, first = time.perf_counter(), rng.first
        tokens = torch.where(request.given, request.x.cpu(), system.mask_id)
        if not schedule.nfe.any():  # all of this batch is given: one event that commits nothing
            none = torch.zeros(len(tokens), 0, dtype=torch.long)
            yield Event(0, schedule.sizes.shape[1], Step(none, none, none.bool()), tokens, schedule, first)
            continue
        iterator = system.sample(net, request, schedule, rng)
        for k in range(1 << 62):
            try:
                with torch.inference_mode():  # not held while the caller looks at an event
                    step = next(iterator, None)
            except BadLogits as error:
                raise ValueError(f"sampling failed at step {k} of samples from {first} on: {error}") from error
            if step is None:
                break
            log_q = None if request.limits is None else request.limits.log_q(request.options.given_order)
            row, column = step.drawn.nonzero(as_tuple=True)
            tokens[row, step.position[row, column]] = step.token.cpu()[row, column]
            seconds = time.perf_counter() - begin
            yield Event(k, schedule.sizes.shape[1], step, tokens, schedule, first, seconds, log_q)
            begin = time.perf_counter()
        if request.limits is not None:
            request.limits.check(system.name)
