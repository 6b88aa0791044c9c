"""A whole sample with as many steps as tokens: Eso-LM (B) beside MDLM, BD3-LM and AR, each through its own sampler.

A sample of L tokens is not run to its end. At a few places along it, evenly spaced, every sampler starts behind that
many given tokens, and its next steps are timed; the mean over the places, times L, is the time of the sample. The pass
over the given tokens is left out: the cache there holds zeros, which cost as much to read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..net.cache import KVCache
from ..net.fold import fold
from ..randomness import Randomness
from ..system import Request, Step, System, find
from ..visibility import Visibility
from .latency import bytes_read, network, quiet
from .report import facts, table
from .timing import interleaved, ratio, summary

ESOLM, MDLM = "esolm", "mdlm"
SYSTEMS: dict[str, tuple[str, dict[str, Any], int]] = {
    ESOLM: ("esolm", {"alpha_0": 1.0}, 1),
    "ar": ("ar", {}, 1),
    "bd3lm, block 4": ("bd3lm", {"block_size": 4}, 4),
    "bd3lm, block 16": ("bd3lm", {"block_size": 16}, 16),
    MDLM: ("mdlm", {}, 1),
}
"""Name and options of each system, and the steps after which its work repeats."""


class Primed:
    """A network whose first cached call, over the given tokens, only makes room for them."""

    def __init__(self, net: Any) -> None:
        self.net, self.config, self.embed, self.fresh = net, net.config, net.embed, False

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """The network's own, whose first pass is yet to come."""
        self.fresh = True
        return self.net.new_cache(batch, capacity)

    def __call__(
        self, tokens: Tensor, position: Tensor, visibility: Visibility, cache: KVCache | None = None, **rest: Any
    ) -> Tensor:
        if cache is None or not self.fresh:
            return self.net(tokens, position, visibility, cache=cache, **rest)
        self.fresh = False
        cache.place(visibility)
        out = rest["out"]
        rows = (len(tokens), out.span.stop - out.span.start) if out.index is None else (len(out.index),)
        return torch.zeros(*rows, self.config.vocab_size)


def start(net: Any, system: System, length: int, given: int, batch: int) -> Iterator[Step]:
    """The steps of a sample whose first `given` tokens are there, behind the first of them."""
    known = (torch.arange(length) < given).expand(batch, -1)
    request = Request(torch.zeros(batch, length, dtype=torch.long), known, torch.ones_like(known))
    rng = Randomness(0, 0, batch)
    return iter(system.sample(Primed(net), request, system.plan(request, rng), rng))


def several(steps: Iterator[Step], number: int, skip: int) -> Callable[[int], None]:
    """A function that does so many of the steps, after those that are left out."""
    next(itertools.islice(steps, skip - 1, None))

    def go(i: int) -> None:
        assert sum(1 for _ in itertools.islice(steps, number)) == number, "the sample has come to its end"

    return go


def measure(
    nets: dict[str, Any], systems: list[str], length: int, batch: int, places: int, rounds: int
) -> dict[str, Any]:
    """Seconds of a sample by system and precision, and Eso-LM's gain over each system at its best precision."""
    mask_id = next(iter(nets.values())).config.vocab_size - 1
    totals: dict[tuple[str, str], list[float]] = {}
    for k in range(places):
        cases: dict[str, Callable[[int], None]] = {}
        for name, precision in itertools.product(systems, nets):
            word, options, repeat = SYSTEMS[name]
            given = int((k + 0.5) / places * length) // 16 * 16
            steps = start(nets[precision], find(word)(mask_id=mask_id, **options), length, given, batch)
            cases[f"{name}|{precision}"] = several(steps, repeat, repeat)
        for case, times in interleaved(cases, rounds).items():
            name, _, precision = case.partition("|")
            scale = length / SYSTEMS[name][2] / places
            before = totals.setdefault((name, precision), [0.0] * rounds)
            totals[name, precision] = [a + b * scale for a, b in zip(before, times, strict=True)]
    best = {name: min(nets, key=lambda p: summary(totals[name, p]).median) for name in systems}
    found = {}
    for name in systems:
        times = totals[name, best[name]]
        more = ratio(times, totals[ESOLM, best[ESOLM]])
        found[name] = {
            "over_esolm": round(more.median, 2),
            "quartiles": [round(more.low, 2), round(more.high, 2)],
            "precision": best[name],
            "seconds_per_sample": round(summary(times).median / batch, 2),
            "samples_per_hour": round(3600 * batch / summary(times).median, 2),
            "seconds_by_precision": {p: round(summary(totals[name, p]).median / batch, 2) for p in nets},
        }
    return {"length": length, "batch": batch, "systems": found}


def run(
    lengths: list[int] | None = None,
    batches: list[int] | None = None,
    precisions: list[str] | None = None,
    layers: int = 12,
    width: int = 768,
    vocab_size: int = 50258,
    places: int = 3,
    rounds: int = 5,
    mdlm_tokens: int = 8192,
    gigabytes: float = 6.0,
    threads: int | None = None,
) -> dict[str, Any]:
    """Time for whole samples with NFE = L, from steps timed at places along the context.

    Args:
        lengths: tokens of a sample, multiples of 16; 2048 and 8192 by default.
        batches: samples drawn together; 1, 8 and 32 by default.
        precisions: of the weights; float32 and bf16 by default. Each system is compared at its best.
        layers: blocks of the network.
        width: width of the network, a multiple of 64.
        vocab_size: entries of the vocabulary, the mask included.
        places: where along the context steps are timed.
        rounds: how often each case is timed at each place.
        mdlm_tokens: MDLM, which gains nothing from larger batches, is left out where a pass has more tokens.
        gigabytes: batches whose cache in float32 is larger are left out.
        threads: threads to use; PyTorch's choice by default.
    """
    if threads:
        torch.set_num_threads(threads)
    found = []
    with quiet():
        net = network(layers, width, vocab_size)
        nets = {p: fold(net, p) for p in precisions or ["float32", "bf16"]}
        for length, batch in itertools.product(lengths or [2048, 8192], batches or [1, 8, 32]):
            if bytes_read(net.config, "float32", length, batch)[1] > gigabytes * 1e9:
                print(f"L = {length}, batch {batch} is left out: its cache is larger than {gigabytes:g} GB")
                continue
            systems = [name for name in SYSTEMS if name != MDLM or length * batch <= mdlm_tokens]
            result = measure(nets, systems, length, batch, places, rounds)
            found.append(result)
            rows = [
                (name, r["over_esolm"], "{:.2f}-{:.2f}".format(*r["quartiles"]), r["precision"],
                 r["seconds_per_sample"], r["samples_per_hour"])
                for name, r in result["systems"].items()
            ]  # fmt: skip
            columns = ("system", "× esolm", "quartiles", "precision", "s/sample", "samples/h")
            table(f"a sample of {length} tokens in {length} steps, batch {batch}", columns, rows)
    return {"machine": facts(), "cases": found}
