"""Estimates of memory and time before the work starts: too much memory is refused, long work is announced.

Calibrated on the CPU within a factor of two. Shapes: B batch, L length.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..likelihood.texts import Sequences
    from ..net.protocol import Network
    from .generate import Job

SLOW = 60.0  # seconds of work that are announced
KEPT = 200  # bytes of a finished token in memory: its id, its position in the schedule, its text
ACTIVATIONS = 96  # bytes of a token and channel in one pass
PAIR = 12  # bytes of a pair of positions when a text is scored


def check_sampling(
    net: Network, job: Job, options: Mapping[str, Any], quiet: bool = False, redraws: bool = False
) -> None:
    """Raise ValueError if the samples need more memory than there is; report work of more than a minute.

    redraws: every step feeds all tokens and needs the logits of all of them.
    """
    size, batch = net.config, min(options["batch_size"], job.total)
    from ..sampling.chain import STEPS

    steps = (options["num_steps"] or STEPS) if redraws else 2
    cache, logits = 2 * size.layers * net.dtype.itemsize, 4 * size.vocab_size if redraws else 0
    refuse_large(
        batch * job.length * (size.width * (cache + ACTIVATIONS) + logits),
        net.device,
        f"{batch} samples of {job.length:,} tokens at once",
        "reduce --batch_size or the length",
    )
    if not options["out"]:
        what = f"{job.total:,} samples of {job.length:,} tokens"
        refuse_large(
            job.total * job.length * KEPT, torch.device("cpu"), what, "write them as they are made: --out FILE"
        )
    if not quiet:
        warn_slow(
            net, 1.0 * steps * job.total * job.length, job.length, f"{job.total:,} samples of {job.length:,} tokens"
        )


def check_scoring(net: Network, texts: Sequences, batch_size: int, passes: int, quiet: bool = False) -> None:
    """Raise ValueError if a pass over the sequences needs more memory than there is; report work of over a minute."""
    number, length = texts.batch.x.shape
    batch = min(batch_size, number * passes)
    needed = batch * length * (2 * net.config.width * ACTIVATIONS + PAIR * length)
    what = f"{batch} sequences of {length:,} tokens at once"
    refuse_large(needed, net.device, what, "reduce --batch_size or --length")
    if not quiet:
        warn_slow(net, 2.0 * number * passes * length, 2 * length, f"{number * passes:,} passes over {length:,} tokens")


def refuse_large(needed: float, device: torch.device, what: str, advice: str) -> None:
    """Raise ValueError if `needed` bytes exceed the free memory of the device."""
    free = available(device)
    if free is not None and needed > free:
        raise ValueError(f"{what} need about {needed / 1e9:,.0f} GB of memory, {free / 1e9:,.1f} GB are free: {advice}")


def warn_slow(net: Network, rows: float, length: int, what: str) -> None:
    """Report on standard error how long it takes, if that is long, to compute `rows` rows that see half of `length`."""
    size = net.config
    weights = 12 * size.layers * size.width**2 + size.vocab_size * size.width
    operations = rows * (2 * weights + 2 * size.layers * size.width * length)
    if operations < 1e9 * SLOW:  # fast enough on any machine
        return
    seconds = operations / speed(net.device)
    if seconds > SLOW:
        print(f"{what}: {operations:.1e} operations, at least {seconds / 60:,.0f} minutes", file=sys.stderr)


def speed(device: torch.device) -> float:
    """Operations per second in a matrix product."""
    a, best = torch.ones(512, 512, device=device), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - begin)
    return 2 * 512**3 / best


def available(device: torch.device) -> int | None:
    """Free bytes on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = list[int]()
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError):  # a container
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free.append(limit - used)
    return min(free, default=None)
