"""`esolm plan`: memory, speed and traffic of a training run on many GPUs, from counting."""

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

from ..net.denoiser import DenoiserConfig
from ..systems import FROM_DATA, System, find
from .config import read_config, show_config
from .cost import Work, count, memory, parameters, traffic
from .options import Batching, Compute

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
    config, printing = read_config(words)
    if printing:
        return show_config(config)
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
