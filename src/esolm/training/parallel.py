"""Data parallelism: DDP and FSDP wrapping of a network, and when its gradients are synchronised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..net import attention, head
from ..runtime.distributed import Ranks
from .options import Compute


def shard(net: nn.Module, compute: Compute, ranks: Ranks) -> None:
    """Bring the network to its device and make it ready for several processes, in place.

    It is compiled and, with FSDP, brought there and sharded block by block, so that no device holds all of it.
    """
    if ranks.world == 1 or compute.parallel != "fsdp":
        net.to(compute.device)
    if ranks.world == 1:
        return
    blocks = cast(Any, net).blocks
    if compute.compile:
        _leave_uncompiled()
        for block in blocks:
            block.compile(dynamic=True)
    if compute.parallel != "fsdp":
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    low = torch.bfloat16 if compute.gather == "bf16" else None
    options: dict[str, Any] = {
        "mesh": dist.device_mesh.init_device_mesh(ranks.device.type, (ranks.world,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(ranks.device.type != "cpu") if compute.offload else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)


def connect(net: nn.Module, compute: Compute, ranks: Ranks) -> Callable:
    """What to call for training: the network, its gradients meeting those of the other processes."""
    if ranks.world == 1 and compute.compile:
        _leave_uncompiled()
        return torch.compile(net, dynamic=True)
    if ranks.world == 1:
        return net
    return net if compute.parallel == "fsdp" else DistributedDataParallel(net)


@functools.cache
def _leave_uncompiled() -> None:
    """Called before anything is compiled. Inductor fails on the symbolic sizes of packed inputs; loops over stairs and
    over chunks of rows would be unrolled, for every number of rows anew."""
    for module, name in ((attention, "_packed"), (attention, "_fast"), (head, "_chunked")):
        setattr(module, name, torch.compiler.disable(getattr(module, name)))


def meeting(net: Callable, last: bool) -> AbstractContextManager[Any]:
    """The context of one pass: gradients that are replicated meet in the last pass of a step, sharded ones in each."""
    return net.no_sync() if isinstance(net, DistributedDataParallel) and not last else nullcontext()


def forget(net: nn.Module) -> None:
    """Drop gathered weights that a pass without a gradient has left, which the next pass would take for current."""
    if hasattr(net, "reshard"):
        cast(Any, net).reshard()


def whole(value: Tensor) -> Tensor:
    """A tensor that is not spread over processes."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def local(value: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return value.to_local() if hasattr(value, "to_local") else value
