"""The figures of `esolm plan`: memory, speed and traffic of a training run on many GPUs, without running it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data import Manifest
from ..net.config import with_defaults
from ..net.denoiser import DenoiserConfig
from ..storage import checkpoint, folder
from ..storage.models import locate
from ..systems import System
from .config import SIZES, RunConfig
from .cost import count, memory, traffic, tuned_parameters
from .options import Cluster

GPT2_IDS = 50258
"""Of GPT-2's tokenizer with a mask."""


class _Ids(NamedTuple):
    """Ids in place of those of a tokenizer: only their number matters for the cost."""

    vocab_size: int
    mask_id: int
    bos_id: int
    eos_id: int
    token_counts: str = ""


def initial_sizes(config: RunConfig) -> dict[str, Any]:
    """The fields of the network that `init` names, if it is a model or a run that exists; otherwise none."""
    path = Path(folder.packaged().get(str(config.init), str(config.init)))
    if config.init is None or not path.is_dir():
        return {}
    if folder.is_model(path):
        return with_defaults(json.loads((path / "config.json").read_text(encoding="utf-8"))["net"])
    return with_defaults(checkpoint.read(locate(path)[0])["identity"]["net"])


def data_sizes(config: RunConfig) -> tuple[int, int] | None:
    """The length and the vocabulary of the data folder, if there is one."""
    if not (Path(config.data) / "manifest.json").is_file():
        return None
    manifest = Manifest.load(Path(config.data))
    return manifest.length, manifest.vocab_size


def guesses(config: RunConfig, net: DenoiserConfig, known_ids: bool) -> list[str]:
    """What the figures assume because a folder that the configuration names is not there, a sentence each."""
    found = []
    if data_sizes(config) is None:
        length = [f"length {net.length}"] if config.net.get("length") is None else []
        ids = [] if known_ids else [f"{net.vocab_size:,} ids"]
        if length or ids:
            found.append(f"planned for {' and '.join(length + ids)}: {config.data} was not found")
    if config.init is not None and not initial_sizes(config):
        found.append(f"planned for {net.layers} layers of width {net.width}: {config.init} was not found")
    return found


def soft_share(system: System, steps: int) -> float:
    """The share of the training steps that feed probabilities, at 100 of them."""
    some = range(0, steps, max(steps // 100, 1))
    return sum(system.at_step(step).soft_inputs for step in some) / max(len(some), 1)


def plan(config: RunConfig, cluster: Cluster, vocab_size: int | None = None) -> dict[str, Any]:
    """All figures of a run.

    vocab_size: of the tokenizer, the mask included; None: that of `init`, of the data, of the configuration, or of
    GPT-2.
    """
    start, data = initial_sizes(config), data_sizes(config)
    config = dataclasses.replace(config, net={**config.net, **{name: start[name] for name in SIZES if start}})
    known_ids = vocab_size is not None or bool(start)
    if vocab_size is None:
        vocab_size = start.get("vocab_size") or (data and data[1]) or config.corpus.vocab_size or GPT2_IDS
    if vocab_size < 2:
        raise ValueError(f"vocab_size is {vocab_size}; it must be at least 2")
    system = config.make_system(_Ids(vocab_size, *(vocab_size - 1,) * 3))
    length = data[0] if data else config.net.get("length") or config.corpus.length
    net = config.net_config(vocab_size, length, system)
    compute = config.compute
    if compute.precision == "auto":
        compute = dataclasses.replace(compute, precision="bf16")
    micro_batches = config.batch.micro_batches(0, cluster.gpus)
    examples = micro_batches[0][1]
    few = min(max(examples, 4), 32)  # count a few examples, and scale
    counted = count(system, torch.zeros(few, net.length, dtype=torch.long), 1 if net.length > 512 else 4)
    counts, soft = counted.scaled(examples / few), soft_share(system, config.steps)
    mean, most = (dataclasses.replace(counts, soft_rows=share * counts.rows) for share in (soft, float(soft > 0)))
    flops = mean.flops(net) / (examples * net.length) * (4 if compute.checkpoint_blocks else 3)
    needed = memory(net, most, compute, cluster.gpus, config.tuning)
    tuned = tuned_parameters(net, config.tuning)
    tokens = config.batch.size * net.length
    speed = cluster.gpus * cluster.tflops * 1e12 * cluster.efficiency / flops
    sent = traffic(net, compute, cluster.gpus, len(micro_batches), config.tuning)
    return {
        "network": {name: getattr(net, name) for name in ("layers", "width", "length", "vocab_size")},
        "notes": guesses(config, net, known_ids),
        "parameters": tuned.every,
        "trained_parameters": tuned.trained,
        "gpus": cluster.gpus,
        "tflops": cluster.tflops,
        "efficiency": cluster.efficiency,
        "parallel": compute.parallel if cluster.gpus > 1 else None,
        "examples_per_pass": examples,
        "passes_per_step": len(micro_batches),
        "rows_fed_per_token": round(counts.rows / (examples * net.length), 3),
        "memory": {**{name: round(value) for name, value in dataclasses.asdict(needed).items()},
                   "total": round(needed.total)},
        "gpu_memory": round(cluster.gpu_memory),
        "fits": needed.total < 0.9 * cluster.gpu_memory,
        "flops_per_token": round(flops),
        "tokens_per_step": tokens,
        "tokens_per_second": round(speed),
        "seconds_per_step": tokens / speed,
        "steps": config.steps,
        "hours": config.steps * tokens / speed / 3600,
        "bytes_sent_per_step": round(sent),
        "bytes_per_second_to_hide": round(sent / (tokens / speed)),
    }  # fmt: skip
