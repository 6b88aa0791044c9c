"""A training step of every system on one network, against the cost predicted from operation counts.

The prediction counts floating-point operations: rows fed to the blocks, rows that continue past the keys and values of
the last block and through the head, and attending pairs of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..core.terms import total
from ..net.denoiser import Denoiser, DenoiserConfig
from ..runtime.machine import autocast, keep_memory, pick_precision, settle
from ..systems import System, find
from ..training.cost import count, memory
from ..training.options import Compute
from . import weak
from .machine import limits
from .plain import PlainDenoiser, peak
from .report import facts, table
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


def training_step(system: System, net: Denoiser, x: Tensor, precision: str) -> Callable[[int], None]:
    """Return a function that runs training step number `i`."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=True)
    scored = torch.ones_like(x, dtype=torch.bool)

    def step(i: int) -> None:
        rng = Randomness(fold(1, i), 0, len(x))
        with autocast(x.device, precision):
            terms = system.terms(net, Batch(x), rng, True)
        total(terms, system.counts(scored, rng)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(
    names: list[str], length: int, vocab_size: int, batch: int, layers: int, width: int, rounds: int, precision: str
) -> dict[str, Any]:
    """Measure seconds, ratios and predictions of the named systems for one size."""
    torch.manual_seed(0)
    config = DenoiserConfig(vocab_size, length, layers, width, width // 64, dropout=0.0)
    net = Denoiser(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randint(0, vocab_size - 1, (batch, length))
    chosen = {name: SYSTEMS[name] for name in ("mdlm", *names)}
    systems: dict[str, System] = {k: find(n)(mask_id=vocab_size - 1, **o) for k, (n, o) in chosen.items()}
    work = {name: count(system, x, rounds) for name, system in systems.items()}
    flops = {name: counted.flops(config) for name, counted in work.items()}
    steps = {name: training_step(system, net, x, precision) for name, system in systems.items()}
    # Each step is compared with a step of mdlm just before it, since the machine's speed drifts within a round.
    pairs = ({f"mdlm, {name}": steps["mdlm"], name: step} for name, step in steps.items())
    seconds = interleaved({key: case for pair in pairs for key, case in pair.items()}, rounds)
    rows = {}
    for name in systems:
        times, against = summary(seconds[name]), ratio(seconds[name], seconds[f"mdlm, {name}"])
        counted = flops[name] / flops["mdlm"]
        rows[name] = {
            "ratio_to_mdlm": round(against.median, 3),
            "quartiles": [round(against.low, 3), round(against.high, 3)],
            "predicted_ratio": round(counted, 3),
            "over_prediction": round(against.median / counted, 3),
            "padding_share": round(work[name].padding / work[name].rows, 4),
            "seconds": round(times.median, 4),
            "tokens_per_second": round(batch * length / times.median),
            "gflops": round(3 * flops[name] / times.median / 1e9, 1),
        }
    return {"length": length, "vocab_size": vocab_size, "batch": batch, "systems": rows}


def run(
    lengths: list[int] | None = None,
    vocabularies: list[int] | None = None,
    tokens: int = 4096,
    layers: int = 6,
    width: int = 384,
    rounds: int = 7,
    precision: str = "auto",
    threads: int | None = None,
    systems: list[str] | None = None,
    plain: bool = False,
    distributed: int | None = None,
) -> dict[str, Any]:
    """Time a whole training step (forward, backward, AdamW) of every system, in turn.

    Args:
        lengths: sequence lengths; 256 and 1024 by default.
        vocabularies: vocabulary sizes; 257 and 50258 by default.
        tokens: tokens per batch.
        layers: number of blocks.
        width: width of the network, a multiple of 64.
        rounds: number of timed rounds.
        precision: auto, float32 or bf16.
        threads: number of threads; PyTorch's default if not given.
        systems: rows of the table to time in addition to mdlm; all by default.
        plain: compare each system with its reference implementation instead, including peak memory.
        distributed: measure weak scaling instead: this many single-threaded processes, each with `tokens`.
    """
    if distributed is not None:
        return run_distributed(distributed, lengths or [256], vocabularies or [257], tokens, layers, width, rounds)
    names = list(SYSTEMS) if systems is None else systems
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise ValueError(f"no row {unknown[0]!r}: choose --systems from {'; '.join(SYSTEMS)}")
    settle()
    keep_memory()
    if threads:
        torch.set_num_threads(threads)
    precision = pick_precision(precision, torch.device("cpu"))
    if plain:
        return run_plain(names, lengths or [256], vocabularies or [50258], tokens, layers, width, rounds, precision)
    cases = []
    for vocab_size in vocabularies or [257, 50258]:
        for length in lengths or [256, 1024]:
            batch = max(tokens // length, 4)
            found = measure(names, length, vocab_size, batch, layers, width, rounds, precision)
            cases.append(found)
            columns = ("system", "× mdlm", "quartiles", "counted", "over", "padding", "tokens/s", "GFLOP/s")
            rows = [
                (name, r["ratio_to_mdlm"], "{:.2f}-{:.2f}".format(*r["quartiles"]), r["predicted_ratio"],
                 r["over_prediction"], f"{r['padding_share']:.1%}", r["tokens_per_second"], r["gflops"])
                for name, r in found["systems"].items()
            ]  # fmt: skip
            table(f"L = {length}, V = {vocab_size}, {layers} x {width}, {precision}", columns, rows)
    return {"machine": facts(), "limits": limits(), "precision": precision, "cases": cases}


def run_plain(
    names: list[str],
    lengths: list[int],
    vocabularies: list[int],
    tokens: int,
    layers: int,
    width: int,
    rounds: int,
    precision: str,
) -> dict[str, Any]:
    """Compare seconds and bytes of each system's step with those of its plain float32 reference."""
    cases = []
    for vocab_size in vocabularies:
        for length in lengths:
            batch = max(tokens // length, 4)
            config = DenoiserConfig(vocab_size, length, layers, width, width // 64, dropout=0.0)
            x, rows = torch.randint(0, vocab_size - 1, (batch, length)), dict[str, dict[str, Any]]()
            for name in names:
                kind, options = SYSTEMS[name]
                system = find(kind)(mask_id=vocab_size - 1, **options)
                ours = training_step(system, Denoiser(config), x, precision)
                twin = training_step(system, PlainDenoiser(config), x, "float32")
                seconds = interleaved({"ours": ours, "plain": twin}, rounds)
                against = ratio(seconds["plain"], seconds["ours"])
                needed = memory(config, count(system, x, 2), Compute(precision=precision), 1)  # type: ignore[arg-type]
                bytes_used = [peak(config, kind, options, batch, precision, plain) for plain in (False, True)]
                rows[name] = {
                    "times_faster": round(against.median, 3),
                    "quartiles": [round(against.low, 3), round(against.high, 3)],
                    "peak_bytes": round(bytes_used[0]),
                    "plain_peak_bytes": round(bytes_used[1]),
                    "planned_bytes": round(needed.total - needed.average),  # this step keeps no average
                }
            cases.append({"length": length, "vocab_size": vocab_size, "batch": batch, "systems": rows})
            lines = [
                (name, r["times_faster"], "{:.2f}-{:.2f}".format(*r["quartiles"]), r["peak_bytes"] / 1e9,
                 r["planned_bytes"] / 1e9, r["plain_peak_bytes"] / 1e9)
                for name, r in rows.items()
            ]  # fmt: skip
            columns = ("system", "× faster than plain", "quartiles", "peak, GB", "planned", "plain, GB")
            table(f"L = {length}, V = {vocab_size}, {layers} x {width}, {precision}", columns, lines)
    return {"machine": facts(), "precision": precision, "cases": cases}


def run_distributed(
    world: int, lengths: list[int], vocabularies: list[int], tokens: int, layers: int, width: int, rounds: int
) -> dict[str, Any]:
    """Measure tokens per second of all processes relative to one, for esolm at alpha_0 = 0.5."""
    if world < 2:
        raise ValueError(f"distributed is {world}; it must be at least 2 processes")
    cases = []
    for vocab_size in vocabularies:
        for length in lengths:
            batch = max(tokens // length, 4)
            config = DenoiserConfig(vocab_size, length, layers, width, width // 64, dropout=0.0)
            seconds = weak.seconds_by_mode(world, config, batch, rounds, "float32")
            rows: dict[str, dict[str, Any]] = {}
            for mode in weak.MODES:
                against, times = ratio(seconds["alone"], seconds[mode]), summary(seconds[mode])
                rows[mode] = {
                    "speedup": round(world * against.median, 3),
                    "quartiles": [round(world * against.low, 3), round(world * against.high, 3)],
                    "tokens_per_second": round(world * batch * length / times.median),
                }
            alone = round(batch * length / summary(seconds["alone"]).median)
            cases.append({"length": length, "vocab_size": vocab_size, "batch": batch, "alone": alone, "modes": rows})
            lines = [
                (mode, r["speedup"], "{:.2f}-{:.2f}".format(*r["quartiles"]), r["tokens_per_second"])
                for mode, r in rows.items()
            ]
            title = f"L = {length}, V = {vocab_size}, {layers} x {width}: {world} processes over 1, one thread each"
            table(title, ("mode", "speedup", "quartiles", "tokens/s"), lines)
    return {"machine": facts(), "precision": "float32", "processes": world, "cases": cases}
