"""Process groups: ranks, reductions, and checks that all ranks run the same job.

torchrun starts the processes and sets RANK, WORLD_SIZE and LOCAL_RANK; without these there is one process, for which
every function here is trivial. Losses are defined on the global batch: each rank computes some of its rows, and sums
are reduced over all ranks.
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
from .dotted import differing

T = TypeVar("T")
PATIENCE = 3600.0
"""Timeout of a collective, in seconds, where work is split only once, as in scoring and sampling."""
LINGER = 10.0
"""Seconds that a surviving rank waits before it exits, so that the launcher reports the rank that died first."""


class Shared(ValueError):
    """An error that every rank raises: rank 0 reports it, the others exit silently."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among `world` processes."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    second: dist.ProcessGroup | None = None

    def aside(self) -> Ranks:
        """The same ranks over a second process group, for communication in the background of training."""
        return replace(self, device=torch.device("cpu"), group=self.second)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Maxima over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return list(values)
        device = self.device if self.device.type == "cuda" else "cpu"  # gloo reduces on the CPU
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor.tolist()

    def everywhere(self, function: Callable[[], T]) -> T:
        """Call the function on every rank and return its result; raises Shared, naming the first rank that failed."""
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
        """Call the function on rank 0 and return its result on every rank."""
        if self.world == 1:
            return function()
        found = self.everywhere(lambda: function() if self.rank == 0 else None)
        box = [found]
        dist.broadcast_object_list(box, group=self.group)
        return cast(T, box[0])

    def share(self, total: int) -> range:
        """The indices, of `total`, that this rank works on."""
        return range(total * self.rank // self.world, total * (self.rank + 1) // self.world)

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in order of rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise Shared, naming the rank and what differs, unless all ranks have the same facts."""
        first, *others = self.gathered(dict(facts))
        for rank, other in enumerate(others, 1):
            wrong = [f"{key} is {there!r} there and {here!r} on rank 0" for key, (there, here) in _both(other, first)]
            if wrong:
                raise Shared(
                    f"rank {rank} of {self.world} belongs to another run: {'; '.join(wrong)}. Nothing was changed"
                )


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
    return list(differing(one, other).items())


ALONE = Ranks()


def launched() -> int:
    """The number of processes that the launcher started."""
    try:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            int(os.environ["RANK"])
        return world
    except (ValueError, KeyError) as error:
        raise ValueError(f"WORLD_SIZE or RANK is not set as torchrun sets it ({error}): start with torchrun") from error


@contextmanager
def join(name: str, seconds: float) -> Iterator[Ranks]:
    """Join the process group of the launcher; a collective that takes longer than `seconds` ends the job.

    name: the device, as for `machine.pick_device`. CPUs communicate by gloo and GPUs by NCCL; each process takes the
    GPU of its LOCAL_RANK. An existing process group is used and not destroyed.
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
            # torchrun keeps one store over its restarts, with the addresses of dead processes
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
            f"rank {_me()}: another rank died, or did not answer within the {seconds:g} s of "
            f"compute.timeout ({str(error).splitlines()[0]}). Run the same command again to resume"
        ) from error
    if ours:
        dist.destroy_process_group()


def own_device(name: str) -> torch.device:
    """The device of this process on its machine."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name.startswith(("auto", "cuda")) and torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(f"rank {_me()}: no GPU for LOCAL_RANK {local}, there are {torch.cuda.device_count()}")
        torch.cuda.set_device(local)  # before any other use of CUDA, which would take the first GPU
        name = f"cuda:{local}"
    return machine.pick_device(name)


def _me() -> str:
    return str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")


def lost(error: BaseException) -> bool:
    """Whether a collective failed because of another rank."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "NCCL" in str(error)


def code() -> str:
    """A hash of the package's source and of the versions that determine the arithmetic."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
