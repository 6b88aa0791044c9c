"""A training step of every system on one network, beside what counting predicts.

The prediction is of floating-point operations: rows fed to the blocks, rows that go on past the keys and values of the
last block and through the head, and pairs of slots that attend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..machine import autocast, keep_memory, pick_precision, settle
from ..net.denoiser import Denoiser, DenoiserConfig, Rows
from ..randomness import Randomness, fold
from ..system import System, find
from ..terms import total
from ..visibility import Packed, Part, Visibility
from .machine import limits
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


class Counter(Denoiser):
    """A network that counts the operations of its forward passes instead of doing them."""

    flops = 0.0

    def forward(  # type: ignore[override]
        self, tokens: Tensor, position: Tensor, visibility: Visibility | Packed, *, out: Rows, **rest: Any
    ) -> Tensor:
        c = self.config
        fed = tokens.shape[0] * tokens.shape[1]
        asked = out.index.numel() if out.index is not None else tokens.shape[0] * (out.span.stop - out.span.start)
        whole = () if isinstance(visibility, Packed) else (Part(tokens.shape[0], visibility, out.span),)
        pairs = last = 0.0
        for batch, seen, span in visibility.parts if isinstance(visibility, Packed) else whole:
            copies = batch // seen.rank.shape[0]
            pairs += float(seen.dense().sum()) * copies
            last += float(seen.dense(span).sum()) * copies
        per_row = 2 * c.width**2 * (4 + 2 * c.mlp_ratio)
        past = 2 * c.width**2 * 2
        self.flops += (c.layers - 1) * (fed * per_row + 4 * c.width * pairs)
        self.flops += fed * past + asked * (per_row - past) + 4 * c.width * last
        self.flops += asked * 2 * c.width * c.vocab_size
        return self.head.weight.new_zeros(asked)


def predicted(system: System, net: Counter, x: Tensor, rounds: int) -> float:
    """Mean forward operations of a training step over the draws that will be timed."""
    net.flops = 0.0
    with torch.no_grad():
        for i in range(rounds):
            system.terms(net, x, None, None, Randomness(fold(1, i), 0, len(x)), True)
    return net.flops / rounds


def training_step(system: System, net: Denoiser, x: Tensor, precision: str) -> Callable[[int], None]:
    """A function that does one whole step with the draws of its number."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=True)
    scored = torch.ones_like(x, dtype=torch.bool)

    def step(i: int) -> None:
        rng = Randomness(fold(1, i), 0, len(x))
        with autocast(x.device, precision):
            terms = system.terms(net, x, None, None, rng, True)
        total(terms, system.counts(scored, rng)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(
    names: list[str], length: int, vocab_size: int, batch: int, layers: int, width: int, rounds: int, precision: str
) -> dict[str, Any]:
    """One size: seconds, ratios and predictions of the named systems."""
    torch.manual_seed(0)
    config = DenoiserConfig(vocab_size, length, layers, width, width // 64, dropout=0.0)
    net = Denoiser(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randint(0, vocab_size - 1, (batch, length))
    chosen = {name: SYSTEMS[name] for name in ("mdlm", *names)}
    systems: dict[str, System] = {k: find(n)(mask_id=vocab_size - 1, **o) for k, (n, o) in chosen.items()}
    counter = Counter(config)
    flops = {name: predicted(system, counter, x, rounds) for name, system in systems.items()}
    steps = {name: training_step(system, net, x, precision) for name, system in systems.items()}
    # Each step is held against a step of mdlm just before it: the machine's speed drifts within a round.
    pairs = ({f"mdlm, {name}": steps["mdlm"], name: step} for name, step in steps.items())
    seconds = interleaved({key: case for pair in pairs for key, case in pair.items()}, rounds)
    rows = {}
    for name in systems:
        times, against = summary(seconds[name]), ratio(seconds[name], seconds[f"mdlm, {name}"])
        count = flops[name] / flops["mdlm"]
        rows[name] = {
            "ratio_to_mdlm": round(against.median, 3),
            "quartiles": [round(against.low, 3), round(against.high, 3)],
            "predicted_ratio": round(count, 3),
            "over_prediction": round(against.median / count, 3),
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
) -> dict[str, Any]:
    """A whole training step (forward, backward, AdamW) of every system, interleaved.

    Args:
        lengths: tokens in a sequence; 256 and 1024 by default.
        vocabularies: vocabulary sizes; 257 and 50258 by default.
        tokens: tokens in a batch.
        layers: blocks of the network.
        width: width of the network, a multiple of 64.
        rounds: how often each system is timed.
        precision: auto, float32 or bf16.
        threads: threads to use; PyTorch's choice by default.
        systems: rows of the table to time, besides mdlm; all by default.
    """
    names = list(SYSTEMS) if systems is None else systems
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise ValueError(f"no system {unknown[0]!r} in this table: choose from {'; '.join(SYSTEMS)}")
    settle()
    keep_memory()
    if threads:
        torch.set_num_threads(threads)
    precision = pick_precision(precision, torch.device("cpu"))
    cases = []
    for vocab_size in vocabularies or [257, 50258]:
        for length in lengths or [256, 1024]:
            batch = max(tokens // length, 4)
            found = measure(names, length, vocab_size, batch, layers, width, rounds, precision)
            cases.append(found)
            columns = ("system", "× mdlm", "quartiles", "counted", "over", "tokens/s", "GFLOP/s")
            rows = [
                (name, r["ratio_to_mdlm"], "{:.2f}-{:.2f}".format(*r["quartiles"]), r["predicted_ratio"],
                 r["over_prediction"], r["tokens_per_second"], r["gflops"])
                for name, r in found["systems"].items()
            ]  # fmt: skip
            table(f"L = {length}, V = {vocab_size}, {layers} x {width}, {precision}", columns, rows)
    return {"machine": facts(), "limits": limits(), "precision": precision, "cases": cases}
