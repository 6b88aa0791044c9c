"""Data parallelism: DDP and FSDP wrapping of a network, and when its gradients are synchronised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..net import attention, head
from ..net.adapters import is_adapted
from ..net.denoiser import Denoiser
from ..runtime.distributed import Ranks
from .options import Compute


def shard(net: Denoiser, compute: Compute, ranks: Ranks) -> None:
    """Move the network to its device and prepare it for several ranks, in place.

    Each block is compiled and, with FSDP, moved and sharded on its own, so that no device holds the whole network.
    """
    if ranks.world == 1 or compute.parallel != "fsdp":
        net.to(compute.device)
    if ranks.world == 1:
        return
    blocks = net.blocks
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
    """The function to call for training: the network, wrapped to synchronise its gradients, or compiled."""
    if ranks.world == 1 and compute.compile:
        _leave_uncompiled()
        return torch.compile(net, dynamic=True)
    if ranks.world == 1:
        return net
    return net if compute.parallel == "fsdp" else DistributedDataParallel(net)


@functools.cache
def _leave_uncompiled() -> None:
    """Exclude functions from compilation. Inductor fails on the symbolic sizes of packed inputs, and would unroll the
    loops over tiles and over chunks of rows again for every number of rows."""
    for module, name in ((attention, "_packed"), (attention, "_fast"), (head, "_chunked")):
        setattr(module, name, torch.compiler.disable(getattr(module, name)))


def gradient_sync(net: Callable, last: bool) -> AbstractContextManager[Any]:
    """The context of one micro-batch: DDP synchronises gradients on the last micro-batch only, FSDP on each."""
    return net.no_sync() if isinstance(net, DistributedDataParallel) and not last else nullcontext()


def forget(net: nn.Module) -> None:
    """Free the gathered weights that FSDP keeps after a pass without gradients, which the next pass would reuse."""
    if callable(reshard := getattr(net, "reshard", None)):
        reshard()


def whole(value: Tensor) -> Tensor:
    """The tensor, gathered if it is sharded."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@torch.no_grad()
def gather(net: Denoiser, plain: Denoiser, device: torch.device) -> None:
    """Copy the weights of a sharded network into a plain one on every rank, with LoRA adapters merged."""
    forget(net)
    state = {
        name.replace(".base_layer.", "."): whole(value.to(device))
        for name, value in net.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in net.named_modules():
        if is_adapted(layer):
            found: Any = layer
            for adapter in found.active_adapters:
                down, up = (whole(part[adapter].weight.to(device)) for part in (found.lora_A, found.lora_B))
                state[f"{name}.weight"] = state[f"{name}.weight"] + (up @ down) * found.scaling[adapter]
    plain.load_state_dict(state)


def local(value: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return value.to_local() if hasattr(value, "to_local") else value
