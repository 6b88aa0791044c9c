"""Sharded tensors in one folder, by torch.distributed.checkpoint: each rank writes its part, and any number of ranks
can read them. The files are safetensors, without pickle.
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
    """Copy the tensors and start writing them; every rank calls this, and the future is done when all have written."""
    import torch.distributed.checkpoint as dcp  # which takes a second to import

    writer = _hf("Writer")(str(folder), save_distributed=True)
    return cast(Future, dcp.async_save(dict(tensors), storage_writer=writer, process_group=group))


def finish(writing: Future) -> None:
    """Wait until all ranks have written; raises OSError if one could not."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writing.result()
    except CheckpointException as error:
        rank, problem = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {problem[0]}") from error


def own_files(folder: Path, rank: int) -> list[Path]:
    """The files that one rank wrote."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def shapes(folder: Path) -> dict[str, torch.Size]:
    """The global shape of every tensor in the folder."""
    found = _hf("Reader")(str(folder)).read_metadata().state_dict_metadata
    return {name: about.size for name, about in found.items()}


def fill(folder: Path, tensors: Mapping[str, Tensor], alone: bool) -> None:
    """Load the folder into `tensors`, in place; of a sharded tensor, only the local part is read."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is not needed here
        dcp.load(dict(tensors), storage_reader=_hf("Reader")(str(folder)), no_dist=alone)


def fill_from_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The same from one safetensors file of unsharded tensors."""
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            if not hasattr(tensor, "to_local"):
                tensor.copy_(file.get_tensor(name))
            elif (local := tensor.to_local()).numel():
                local.copy_(file.get_slice(name)[_here(tensor)])


def _here(tensor: Any) -> tuple[slice, ...]:
    """The range of a sharded tensor that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def _hf(kind: str) -> Any:
    import torch.distributed.checkpoint as dcp

    name = f"HuggingFaceStorage{kind}"
    if not hasattr(dcp, name):
        raise ValueError(f"checkpoints of several ranks need PyTorch 2.9 or newer; this is {torch.__version__}")
    return getattr(dcp, name)
