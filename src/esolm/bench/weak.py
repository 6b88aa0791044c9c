"""Weak scaling: N single-threaded processes, each with a full batch, against one such process."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ..core.batch import Batch
from ..net.denoiser import Denoiser, DenoiserConfig
from ..runtime.distributed import ALONE, Ranks
from ..systems import find
from ..training.learner import Learner
from ..training.loss import accumulate
from ..training.options import Batching, Compute, Optim
from ..training.parallel import connect, shard

MODES = ("ddp", "fsdp")


class RandomSource:
    """A data source of random tokens."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length = vocab_size, length

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """Return `count` random sequences."""
        x: Tensor = torch.randint(0, self.vocab_size - 1, (count or 1, self.length))
        return Batch(x)

    def __len__(self) -> int:
        return 1


def seconds_by_mode(world: int, config: DenoiserConfig, batch: int, rounds: int, precision: str) -> dict[str, Any]:
    """Return the step times of one process alone and of all processes in each mode, timed in turn."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (world, folder, config, batch, rounds, precision), nprocs=world)
        return json.loads((Path(folder) / "seconds.json").read_text())


def _work(rank: int, world: int, folder: str, config: DenoiserConfig, batch: int, rounds: int, precision: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    ranks, found = Ranks(rank, world), dict[str, list[float]]()
    plain = Denoiser(config)
    steps = {"alone": _step(copy.deepcopy(plain), Compute(precision=precision, device="cpu"), batch, ALONE)}
    for mode in MODES:
        compute = Compute(precision=precision, device="cpu", parallel=mode)  # type: ignore[arg-type]
        steps[mode] = _step(copy.deepcopy(plain), compute, batch, ranks)
    for i in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            if name != "alone" or rank == 0:
                step(i)
            if i:  # the first round warms up
                found.setdefault(name, []).append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _step(net: Denoiser, compute: Compute, batch: int, ranks: Ranks) -> Callable[[int], None]:
    """Return a whole training step as in `esolm train`."""
    shard(net, compute, ranks)
    learner, call = Learner(net, Optim()), connect(net, compute, ranks)
    config = net.config
    system = find("esolm")(alpha_0=0.5, mask_id=config.vocab_size - 1)
    source, batching = RandomSource(config.vocab_size, config.length), Batching(batch * ranks.world, batch)

    def step(i: int) -> None:
        _, tokens = accumulate(call, system, source, i, 0, batching, compute, ranks)
        learner.gradient_norm()
        learner.update(1e-6, tokens)

    return step
