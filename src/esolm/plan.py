"""`esolm plan`: memory, speed and traffic of a training run on many GPUs, from counting.

Shapes: P parameters, R rows of one pass, W width, V vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .config import FROM_DATA, read_config
from .counting import Work, count
from .net.denoiser import Denoiser, DenoiserConfig
from .net.head import CHUNK, WHOLE
from .options import Batching, Compute
from .system import System, find

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Cluster:
    """The machines that are planned for."""

    gpus: int = 8
    """GPUs in all, one process each."""
    gpu_memory: float = 80e9
    """Bytes of each."""
    tflops: float = 400.0
    """Dense bf16 operations per second of each, in units of 1e12."""
    efficiency: float = 0.4
    """The share of them that training reaches."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at the moment of most."""

    weights: float
    gradients: float
    moments: float  # of AdamW
    average: float
    gathered: float  # weights that FSDP has put together, or buckets that DDP sums in
    activations: float
    head: float  # logits and what their gradient needs

    @property
    def total(self) -> float:
        """All of it."""
        return sum(dataclasses.astuple(self))


def parameters(config: DenoiserConfig) -> tuple[int, int]:
    """Of the whole network and of one block."""
    with torch.device("meta"):
        net = Denoiser(config)
    return tuple(sum(p.numel() for p in part.parameters()) for part in (net, net.blocks[0]))  # type: ignore


def activations(config: DenoiserConfig, work: Work, compute: Compute) -> float:
    """Bytes that one pass keeps for its backward pass, or of a block that is recomputed.

    Rows of width W that a block keeps: the two inputs of the norms and the two changes of the residual in float32; in
    the precision of products the outputs of the norms, q, k and v before and after the rotation, the mixed values
    twice, and both sides of the GELU; and two masks of dropout.
    """
    low = 2 if compute.precision == "bf16" else 4
    block = 4 * 4 + low * (2 + 5 + 2 + 2 * config.mlp_ratio) + (2 if config.dropout else 0)
    whole = config.width * work.fed * block
    if compute.checkpoint_blocks:
        return config.layers * 4 * config.width * work.fed + whole
    fed = config.width * work.fed * (4 + low * 4)  # in the last block: its input, k, v and their rotation
    return (config.layers - 1) * whole + fed + work.asked / work.fed * (whole - fed)


def head_bytes(config: DenoiserConfig, work: Work, compute: Compute) -> float:
    """Logits at once with their gradient, or a chunk of them beside the gradient of the output layer."""
    logits = work.asked * config.vocab_size
    if logits <= WHOLE:
        return logits * 4 * 3
    low = 2 if compute.precision == "bf16" else 4
    return CHUNK * config.vocab_size * (4 + low) + config.vocab_size * config.width * (4 + (low if low < 4 else 0))


def memory(config: DenoiserConfig, work: Work, compute: Compute, world: int) -> Memory:
    """Of one process among `world`, in a pass that asks for `work`."""
    every, block = parameters(config)
    sharded = compute.parallel == "fsdp" and world > 1
    held = every / world if sharded else every
    low = 2 if compute.gather == "bf16" else 4
    gathered = 0.0
    if sharded:  # the ends of the network stay; of the blocks, one is used while the next arrives
        gathered = low * (every - config.layers * block + 2 * block) + 4 * block
    elif world > 1:
        gathered = 4.0 * every
    state = (0.0,) * 4 if sharded and compute.offload else (4 * held, 4 * held, 8 * held, 4 * held)
    return Memory(*state, gathered, activations(config, work, compute), head_bytes(config, work, compute))


def traffic(config: DenoiserConfig, compute: Compute, world: int, passes: int) -> float:
    """Bytes that each process sends in a step."""
    every, _ = parameters(config)
    if world == 1:
        return 0.0
    ring = (world - 1) / world
    if compute.parallel == "ddp":
        return 2 * ring * 4 * every
    return passes * ring * every * (2 * (2 if compute.gather == "bf16" else 4) + 4)


def plan(
    config: DenoiserConfig, system: System, batching: Batching, compute: Compute, cluster: Cluster
) -> dict[str, Any]:
    """All figures of a run."""
    passes = batching.passes(0, cluster.gpus)
    examples = min(passes[0][1], 32)  # counted on so many and scaled: orders and masks are draws
    least = max(examples, 4)
    work = count(system, torch.zeros(least, config.length, dtype=torch.long), 1 if config.length > 512 else 4)
    scale = passes[0][1] / least
    one_pass = Work(*(value * scale for value in dataclasses.astuple(work)))
    every, _ = parameters(config)
    forward = one_pass.flops(config) / (passes[0][1] * config.length)
    flops = forward * (4 if compute.checkpoint_blocks else 3)
    found = memory(config, one_pass, compute, cluster.gpus)
    tokens = batching.size * config.length
    speed = cluster.gpus * cluster.tflops * 1e12 * cluster.efficiency / flops
    sent = traffic(config, compute, cluster.gpus, len(passes))
    return {
        "parameters": every,
        "gpus": cluster.gpus,
        "parallel": compute.parallel if cluster.gpus > 1 else None,
        "examples_per_pass": passes[0][1],
        "passes_per_step": len(passes),
        "rows_fed_per_token": round(one_pass.fed / (passes[0][1] * config.length), 3),
        "memory": {name: round(value) for name, value in (*dataclasses.asdict(found).items(), ("total", found.total))},
        "gpu_memory": round(cluster.gpu_memory),
        "fits": found.total < 0.9 * cluster.gpu_memory,
        "flops_per_token": round(flops),
        "tokens_per_step": tokens,
        "tokens_per_second": round(speed),
        "seconds_per_step": tokens / speed,
        "bytes_sent_per_step": round(sent),
        "bytes_per_second_to_hide": round(sent / (tokens / speed)),
    }  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """`esolm plan`."""
    parser = argparse.ArgumentParser(
        prog="esolm plan",
        usage="esolm plan PRESET|FILE.yaml [--gpus N --gpu_memory 80GB …] [any option of esolm train]",
        description="Memory, speed and traffic of a training run, from counting; nothing is run.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", help="the preset, if it is not the first word")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs in all (default: %(default)s)")
    parser.add_argument("--gpu_memory", default="80GB", help="of each (default: %(default)s)")
    parser.add_argument("--tflops", type=float, default=400.0, help="dense bf16 TFLOP/s of each (default: %(default)s)")
    parser.add_argument("--efficiency", type=float, default=0.4, help="share of them that is reached (%(default)s)")
    parser.add_argument("--vocab_size", type=int, default=50258, help="ids, the mask included (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    known, rest = parser.parse_known_args(list(argv))
    words = rest if known.preset is None else [known.preset, *rest]
    config, _ = read_config(words)
    if known.gpus < 1 or not 0 < known.efficiency <= 1 or known.tflops <= 0 or known.vocab_size < 2:
        raise ValueError("gpus and tflops must be positive, efficiency in (0, 1], vocab_size at least 2")
    net = {**config["net"], "length": config["net"]["length"] or config["corpus"]["length"]}
    cls = find(config["system"].pop("name"))
    ids = {f.name: known.vocab_size - 1 for f in dataclasses.fields(cls) if f.name in FROM_DATA}
    system = cls(**config["system"], **ids)
    compute = Compute(**config["compute"])
    if compute.precision == "auto":
        compute = dataclasses.replace(compute, precision="bf16")
    cluster = Cluster(known.gpus, size(known.gpu_memory), known.tflops, known.efficiency)
    found = plan(
        DenoiserConfig(vocab_size=known.vocab_size, **net), system, Batching(**config["batch"]), compute, cluster
    )
    if known.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0


def size(text: str) -> float:
    """Bytes, as in 80GB, 80G or 80e9."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"gpu_memory is {text!r}; it must be a size, as in 80GB")
    return float(match[1]) * UNITS[match[2].upper()]


def show(found: dict[str, Any]) -> None:
    """A table for people."""
    table = Table(show_header=False)
    table.add_row("parameters", f"{found['parameters'] / 1e6:,.0f} M")
    table.add_row("a step", f"{found['tokens_per_step']:,} tokens in {found['seconds_per_step']:.2f} s")
    table.add_row("of a GPU", f"{found['passes_per_step']} passes of {found['examples_per_pass']} examples")
    table.add_row("tokens per second", f"{found['tokens_per_second']:,} ({found['flops_per_token']:.3g} FLOP each)")
    table.add_row("sent by a GPU", f"{_gigabytes(found['bytes_sent_per_step'])} a step")
    table.add_row("to hide it", f"{_gigabytes(found['bytes_per_second_to_hide'])}/s")
    table.add_section()
    for name, value in found["memory"].items():
        table.add_row(f"{name} of a GPU", _gigabytes(value))
    fits = "fits" if found["fits"] else "does not fit: lower batch.micro, or see docs/scaling.md"
    table.add_row(f"of {_gigabytes(found['gpu_memory'])}", fits)
    Console(highlight=False).print(table)


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:,.2f} GB"
