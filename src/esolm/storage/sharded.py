"""Tensors of several processes in one folder, by torch.distributed.checkpoint: each process writes its part, and any
number of processes reads its own. The files are safetensors, so nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

FOLDER = "shards"


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Future:
    """Copy the tensors and begin to write them; every process calls this, and all have written when one's is done."""
    import torch.distributed.checkpoint as dcp  # which takes a second to import

    writer = _hf("Writer")(str(folder), save_distributed=True)
    return cast(Future, dcp.async_save(dict(tensors), storage_writer=writer, process_group=group))


def finish(writing: Future) -> None:
    """Wait until all processes have written; raises OSError if one could not."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writing.result()
    except CheckpointException as error:
        rank, problem = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {problem[0]}") from error


def own_files(folder: Path, rank: int) -> list[Path]:
    """The files that one process wrote."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def shapes(folder: Path) -> dict[str, torch.Size]:
    """The whole shape of every tensor in the folder."""
    found = _hf("Reader")(str(folder)).read_metadata().state_dict_metadata
    return {name: about.size for name, about in found.items()}


def fill(folder: Path, tensors: Mapping[str, Tensor], alone: bool) -> None:
    """Copy what the folder holds into tensors of these names, by ranges: of a sharded tensor only the part here."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is as it should be
        dcp.load(dict(tensors), storage_reader=_hf("Reader")(str(folder)), no_dist=alone)


def fill_from_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The same from one safetensors file of whole tensors."""
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            if not hasattr(tensor, "to_local"):
                tensor.copy_(file.get_tensor(name))
            elif (local := tensor.to_local()).numel():
                local.copy_(file.get_slice(name)[_here(tensor)])


def _here(tensor: Any) -> tuple[slice, ...]:
    """The part of a sharded tensor that this process holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def _hf(kind: str) -> Any:
    import torch.distributed.checkpoint as dcp

    name = f"HuggingFaceStorage{kind}"
    if not hasattr(dcp, name):
        raise ValueError(f"checkpoints of several processes need PyTorch 2.9 or newer, this is {torch.__version__}")
    return getattr(dcp, name)
