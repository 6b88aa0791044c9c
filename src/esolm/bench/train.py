"""A training step of every system on one network, against the cost predicted from operation counts.

The prediction counts floating-point operations: rows fed to the blocks, rows that continue past the keys and values of
the last block and through the head, and attending pairs of slots.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from ..net.denoiser import Denoiser, DenoiserConfig
from ..runtime.machine import pick_precision
from ..systems import System, find
from ..training.cost import count, memory
from ..training.options import Compute
from . import weak
from .latency import network
from .machine import limits
from .plain import PlainDenoiser, peak, training_step
from .report import named, table
from .timing import interleaved, ratio, summary

SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mdlm": ("mdlm", {}),
    "ar": ("ar", {}),
    "bd3lm, block 16": ("bd3lm", {"block_size": 16}),
    "esolm, alpha_0 1": ("esolm", {"alpha_0": 1.0}),
    "esolm, alpha_0 0.5": ("esolm", {"alpha_0": 0.5}),
    "esolm, alpha_0 0.125": ("esolm", {"alpha_0": 0.125}),
    "esolm (A), alpha_0 0.5": ("esolm", {"alpha_0": 0.5, "variant": "A"}),
    "esolm any_order, alpha_0 0.5": ("esolm", {"alpha_0": 0.5, "loss": "any_order"}),
}
Records = dict[str, dict[str, Any]]
COLUMNS = {
    "system": "name", "× mdlm": "ratio_to_mdlm", "quartiles": "quartiles", "counted": "predicted_ratio",
    "over": "over_prediction", "padding": "padding_share:.1%", "tokens/s": "tokens_per_second", "GFLOP/s": "gflops",
}  # fmt: skip
PLAIN_COLUMNS = {
    "system": "name", "× faster than plain": "times_faster", "quartiles": "quartiles", "peak, bytes": "peak_bytes:,",
    "planned": "planned_bytes:,", "plain, bytes": "plain_peak_bytes:,",
}  # fmt: skip
MODE_COLUMNS = {"mode": "name", "speedup": "speedup", "quartiles": "quartiles", "tokens/s": "tokens_per_second"}


def measure(names: list[str], rounds: int, precision: str, config: DenoiserConfig, batch: int) -> Records:
    """Measure seconds, ratios and predictions of the named systems for one size."""
    net = network(config.layers, config.width, config.vocab_size, config.length).train()
    x = torch.randint(0, config.vocab_size - 1, (batch, config.length))
    systems = {name: make_system(name, config) for name in ("mdlm", *names)}
    work = {name: count(system, x, rounds) for name, system in systems.items()}
    flops = {name: counted.flops(config) for name, counted in work.items()}
    steps = {name: training_step(system, net, x, precision) for name, system in systems.items()}
    # Each step is compared with a step of mdlm just before it, since the machine's speed drifts within a round.
    pairs = ({f"mdlm, {name}": steps["mdlm"], name: step} for name, step in steps.items())
    seconds = interleaved({key: case for pair in pairs for key, case in pair.items()}, rounds)
    rows = {}
    for name in systems:
        median, against = summary(seconds[name]).median, ratio(seconds[name], seconds[f"mdlm, {name}"])
        counted = flops[name] / flops["mdlm"]
        rows[name] = {
            **against.record("ratio_to_mdlm", 3),
            "predicted_ratio": round(counted, 3),
            "over_prediction": round(against.median / counted, 3),
            "padding_share": round(work[name].padding / work[name].rows, 4),
            "seconds": round(median, 4),
            "tokens_per_second": round(x.numel() / median),
            "gflops": round(3 * flops[name] / median / 1e9, 1),
        }
    return rows


def measure_plain(names: list[str], rounds: int, precision: str, config: DenoiserConfig, batch: int) -> Records:
    """Compare seconds and bytes of each system's step with those of its plain float32 reference."""
    x, rows = torch.randint(0, config.vocab_size - 1, (batch, config.length)), Records()
    for name in names:
        system = make_system(name, config)
        ours = training_step(system, Denoiser(config), x, precision)
        twin = training_step(system, PlainDenoiser(config), x, "float32")
        seconds = interleaved({"ours": ours, "plain": twin}, rounds)
        needed = memory(config, count(system, x, 2), Compute(precision=precision), 1)  # type: ignore[arg-type]
        bytes_used = [peak(config, *SYSTEMS[name], batch, precision, plain) for plain in (False, True)]
        rows[name] = {
            **ratio(seconds["plain"], seconds["ours"]).record("times_faster", 3),
            "peak_bytes": round(bytes_used[0]),
            "plain_peak_bytes": round(bytes_used[1]),
            "planned_bytes": round(needed.total - needed.average),  # this step keeps no average
        }
    return rows


def measure_distributed(world: int, rounds: int, config: DenoiserConfig, batch: int) -> Records:
    """Measure tokens per second of all processes relative to one, for esolm at alpha_0 = 0.5."""
    seconds = weak.seconds_by_mode(world, config, batch, rounds, "float32")
    tokens, rows = batch * config.length, Records()
    for mode, times in seconds.items():
        processes = 1 if mode == "alone" else world
        speedup = ratio([processes * s for s in seconds["alone"]], times)
        rows[mode] = speedup.record("speedup", 3)
        rows[mode]["tokens_per_second"] = round(processes * tokens / summary(times).median)
    return rows


def make_system(name: str, config: DenoiserConfig) -> System:
    """Return the system of a row of SYSTEMS for a network of this size."""
    kind, options = SYSTEMS[name]
    return find(kind)(mask_id=config.vocab_size - 1, **options)


def run(
    lengths: list[int] | None = None,
    vocabularies: list[int] | None = None,
    tokens: int = 4096,
    layers: int = 6,
    width: int = 384,
    rounds: int = 7,
    precision: str = "auto",
    systems: list[str] | None = None,
    plain: bool = False,
    distributed: int | None = None,
) -> dict[str, Any]:
    """Time a whole training step (forward, backward, AdamW) of every system, in turn.

    Args:
        lengths: sequence lengths; 256 and 1024 by default, 256 with plain or distributed.
        vocabularies: vocabulary sizes; 257 and 50258 by default, 50258 with plain, 257 with distributed.
        tokens: tokens per batch.
        layers: number of blocks.
        width: width of the network, a multiple of 64.
        rounds: number of timed rounds.
        precision: auto, float32 or bf16.
        systems: rows of the table to time in addition to mdlm; all by default.
        plain: compare each system with its reference implementation instead, including peak memory.
        distributed: measure weak scaling instead: this many single-threaded processes, each with `tokens`, in float32.
    """
    names = list(SYSTEMS) if systems is None else systems
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise ValueError(f"no row {unknown[0]!r}: choose --systems from {'; '.join(SYSTEMS)}")
    if distributed is not None and distributed < 2:
        raise ValueError(f"distributed is {distributed}; it must be at least 2 processes")
    precision = "float32" if distributed else pick_precision(precision, torch.device("cpu"))
    result: dict[str, Any] = {"precision": precision}
    if distributed:
        vocabularies, lengths, columns = vocabularies or [257], lengths or [256], MODE_COLUMNS
        case = partial(measure_distributed, distributed, rounds)
        result["processes"] = distributed
    elif plain:
        vocabularies, lengths, columns = vocabularies or [50258], lengths or [256], PLAIN_COLUMNS
        case = partial(measure_plain, names, rounds, precision)
    else:
        vocabularies, lengths, columns = vocabularies or [257, 50258], lengths or [256, 1024], COLUMNS
        case = partial(measure, names, rounds, precision)
        result = {"limits": limits(), **result}
    cases = result["cases"] = []
    for vocab_size, length in itertools.product(vocabularies, lengths):
        batch = max(tokens // length, 4)
        rows = case(DenoiserConfig(vocab_size, length, layers, width, width // 64, dropout=0.0), batch)
        table(f"L = {length}, V = {vocab_size}, {layers} x {width}, {precision}", columns, named(rows))
        key = "modes" if distributed else "systems"
        cases.append({"length": length, "vocab_size": vocab_size, "batch": batch, key: rows})
    return result
