"""Several processes as one: who is there, what they must agree on, and where their gradients meet.

torchrun starts the processes and sets RANK, WORLD_SIZE and LOCAL_RANK; without them a process is alone and every
function here does nothing. The mathematics belongs to the global batch: a process takes its rows of it and every sum
goes over all processes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .. import __version__
from . import machine
from .nested import differing

T = TypeVar("T")
PATIENCE = 3600.0
"""Seconds that a process waits for the others where work is split once, as in scoring and sampling."""
LINGER = 10.0
"""Seconds that a survivor waits before it ends, so that the launcher sees first, and names, the process that died."""


class Shared(ValueError):
    """An error that every process has: the first says it, the others end without a word."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process among `world` processes."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    second: dist.ProcessGroup | None = None

    def aside(self) -> Ranks:
        """The same processes over a connection of its own, for what goes on beside the training."""
        return replace(self, device=torch.device("cpu"), group=self.second)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each over all processes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return list(values)
        device = self.device if self.device.type == "cuda" else "cpu"  # gloo reduces on the CPU
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor.tolist()

    def everywhere(self, function: Callable[[], T]) -> T:
        """The result here if every process had one; otherwise an error that names the first process that failed."""
        if self.world == 1:
            return function()
        try:
            found, error = function(), None
        except (ValueError, OSError) as problem:
            found, error = None, str(problem)
        for rank, other in enumerate(self.gathered(error)):
            if other is not None:
                raise Shared(f"rank {rank} of {self.world}: {other}")
        return cast(T, found)

    def once(self, function: Callable[[], T]) -> T:
        """What rank 0 finds, on every process."""
        if self.world == 1:
            return function()
        found = self.everywhere(lambda: function() if self.rank == 0 else None)
        box = [found]
        dist.broadcast_object_list(box, group=self.group)
        return cast(T, box[0])

    def share(self, total: int) -> range:
        """Which of so many things are of this process."""
        return range(total * self.rank // self.world, total * (self.rank + 1) // self.world)

    def gathered(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise an error that names the process and what differs, unless all processes hold the same facts."""
        first, *others = self.gathered(dict(facts))
        for rank, other in enumerate(others, 1):
            wrong = [f"{key} is {there!r} there and {here!r} on rank 0" for key, (there, here) in _both(other, first)]
            if wrong:
                raise Shared(f"rank {rank} of {self.world} is of another run: {'; '.join(wrong)}. Nothing was changed")


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
    return list(differing(one, other).items())


ALONE = Ranks()


def launched() -> int:
    """The number of processes that the launcher has started."""
    try:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            int(os.environ["RANK"])
        return world
    except (ValueError, KeyError) as error:
        raise ValueError(f"WORLD_SIZE or RANK is not set as torchrun sets it ({error}): start with torchrun") from error


@contextmanager
def join(name: str, seconds: float) -> Iterator[Ranks]:
    """This process among all that the launcher started; a collective that takes longer than `seconds` ends the job.

    name: the device, as `machine.pick_device` takes it. Gloo connects CPUs and NCCL GPUs; on a GPU node each process
    takes the GPU of its LOCAL_RANK. A group that is there already is used and left.
    """
    if not dist.is_initialized() and launched() == 1:
        yield ALONE
        return
    device = own_device(name)
    ours = not dist.is_initialized()
    limit = timedelta(seconds=seconds)
    try:
        if ours:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store, rank, world = next(dist.rendezvous("env://", timeout=limit))
            # torchrun keeps one store over its restarts, with the addresses of processes that are dead
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        second = dist.new_group(backend="gloo", timeout=limit)
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, second=second)
    except Shared:
        if _me() == "0":
            raise
        raise SystemExit(2) from None
    except (ValueError, OSError) as error:
        raise ValueError(f"rank {_me()}: {error}") from error
    except RuntimeError as error:
        if not lost(error):
            raise
        time.sleep(LINGER if ours else 0)
        raise ValueError(
            f"rank {_me()}: another process died, or did not answer within the {seconds:g} s of "
            f"compute.timeout ({str(error).splitlines()[0]}). The same command goes on from the last checkpoint"
        ) from error
    if ours:
        dist.destroy_process_group()


def own_device(name: str) -> torch.device:
    """The device of this process among those of its machine."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name.startswith(("auto", "cuda")) and torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(f"rank {_me()}: no GPU for LOCAL_RANK {local}, there are {torch.cuda.device_count()}")
        torch.cuda.set_device(local)  # before anything else touches a GPU, which would be the first one
        name = f"cuda:{local}"
    return machine.pick_device(name)


def _me() -> str:
    return str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")


def lost(error: BaseException) -> bool:
    """Whether a collective failed because of another process."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "NCCL" in str(error)


def code() -> str:
    """A hash of the package's own files, with the versions that decide the arithmetic."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
