"""A whole sample with as many steps as tokens: Eso-LM (B) beside MDLM, BD3-LM and AR, each through its own sampler.

A sample of L tokens is not run to its end: METHOD says what is. What is passed over costs nothing, and leaves the cache
as large as it would be, with other keys and values, which take as long to read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.visibility import Visibility
from ..net.cache import KVCache
from ..net.fold import PRECISIONS, fold
from ..sampling.request import Request
from ..systems import find
from .latency import bytes_read, network, quiet
from .machine import gemm
from .report import facts, table
from .timing import interleaved, ratio, summary

METHOD = (
    "At each of `places` places, evenly spaced along the context, every sampler starts behind that many given tokens, "
    "and its next step is timed, `rounds` times in turn with the others. The mean over the places times L is the time "
    "of a sample. Of a block of BD3-LM two steps are timed: the first, which also commits the block before, and the "
    "second, which stands for all others. Every step of MDLM is a pass over all L tokens: it is timed at one place, in "
    "the precision whose products are faster, up to `rounds` times and not again after `mdlm_seconds`."
)
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
    """A network whose calls can be passed over: they then make room in the cache and return zeros.

    All samples share a cache's memory, since nobody looks at what they draw.
    """

    def __init__(self, net: Any, memory: KVCache | None) -> None:
        self.net, self.config, self.embed, self.memory, self.real = net, net.config, net.embed, memory, False

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Only as many slots as the steps that are timed need."""
        assert self.memory is not None
        return self.memory.again()

    def __call__(
        self, tokens: Tensor, position: Tensor, visibility: Visibility, cache: KVCache | None = None, **rest: Any
    ) -> Tensor:
        if self.real:
            return self.net(tokens, position, visibility, cache=cache, **rest)
        if cache is not None:
            cache.place(visibility)
        out = rest["out"]
        rows = (len(tokens), out.span.stop - out.span.start) if out.index is None else (len(out.index),)
        return torch.zeros(*rows, self.config.vocab_size)


class Sampling:
    """A sample under way whose first `given` tokens are there; after `repeat` steps its work is the same again."""

    def __init__(self, net: Any, memory: KVCache | None, name: str, length: int, given: int, batch: int) -> None:
        word, options, self.repeat = SYSTEMS[name]
        system = find(word)(mask_id=net.config.vocab_size - 1, **options)
        known = (torch.arange(length) < given).expand(batch, -1)
        request = Request(torch.zeros(batch, length, dtype=torch.long), known, torch.ones_like(known))
        rng, self.net = Randomness(0, 0, batch), Primed(net, memory)
        self.steps = iter(system.sample(self.net, request, system.plan(request, rng), rng))

    def step(self, i: int) -> None:
        """The next step, done."""
        self._go(1, real=True)

    def ready(self, i: int) -> None:
        """Pass over the steps that are not timed: first all of a block with the given tokens, then what is left of one
        behind its second step."""
        self._go(max(self.repeat - 2, 0) if i else self.repeat, real=False)

    def _go(self, number: int, real: bool) -> None:
        self.net.real = real
        assert sum(1 for _ in itertools.islice(self.steps, number)) == number, "the sample has come to its end"


def starts(length: int, places: int) -> list[int]:
    """Given tokens at each place."""
    return [int((k + 0.5) / places * length) // 16 * 16 for k in range(places)]


def cached(
    nets: dict[str, Any], length: int, batch: int, places: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of a sample of each system that has a cache, by system and precision, in each round."""
    names = [name for name in SYSTEMS if name != MDLM]
    totals = {key: [0.0] * rounds for key in itertools.product(names, nets)}
    given = starts(length, places)
    memory = {p: net.new_cache(batch, given[-1] + 16 * (rounds + 4)) for p, net in nets.items()}
    for place in given:
        cases: dict[str, Callable[[int], object]] = {}
        before: dict[str, Callable[[int], object]] = {}
        shares: dict[str, tuple[tuple[str, str], float]] = {}
        for name, precision in totals:
            sampling = Sampling(nets[precision], memory[precision], name, length, place, batch)
            for kind, steps in (("first", 1), ("other", sampling.repeat - 1)):
                if steps:
                    cases[case := f"{name}, {precision}, {kind}"] = sampling.step
                    shares[case] = (name, precision), steps / sampling.repeat * length / places
            before[f"{name}, {precision}, first"] = sampling.ready
        for case, times in interleaved(cases, rounds, before=before).items():
            key, share = shares[case]
            totals[key] = [a + share * b for a, b in zip(totals[key], times, strict=True)]
    return totals


def whole(net: Any, length: int, batch: int, rounds: int, most: float) -> list[float]:
    """Seconds of passes of MDLM, at least one."""
    sampling = Sampling(net, None, MDLM, length, length // 2, batch)
    begin, times = time.perf_counter(), list[float]()
    while len(times) < rounds and (not times or time.perf_counter() - begin < most):
        start = time.perf_counter()
        sampling.step(0)
        times.append(time.perf_counter() - start)
    return times


def measure(
    nets: dict[str, Any], length: int, batch: int, places: int, rounds: int, mdlm: str | None, mdlm_seconds: float
) -> dict[str, Any]:
    """Seconds of a sample by system and precision, and Eso-LM's gain over each system at its best precision.

    mdlm: its precision; None leaves it out.
    """
    totals, passes = cached(nets, length, batch, places, rounds), 0
    if mdlm is not None:
        times = whole(nets[mdlm], length, batch, rounds, mdlm_seconds)
        passes = len(times)
        totals[MDLM, mdlm] = [length * t for t in (times if passes == rounds else [summary(times).median] * rounds)]
    medians: dict[str, dict[str, float]] = {}
    for (name, precision), times in totals.items():
        medians.setdefault(name, {})[precision] = summary(times).median
    best = {name: min(found, key=found.__getitem__) for name, found in medians.items()}
    systems = {}
    for name, precision in best.items():
        more = ratio(totals[name, precision], totals[ESOLM, best[ESOLM]])
        systems[name] = {
            "over_esolm": round(more.median, 2),
            "quartiles": [round(more.low, 2), round(more.high, 2)],
            "precision": precision,
            "seconds_per_sample": round(medians[name][precision] / batch, 2),
            "samples_per_hour": round(3600 * batch / medians[name][precision], 2),
            "seconds_by_precision": {p: round(seconds / batch, 2) for p, seconds in medians[name].items()},
        }
    given = starts(length, places)
    return {"length": length, "batch": batch, "given": given, "mdlm_passes": passes, "systems": systems}


def run(
    lengths: list[int] | None = None,
    batches: list[int] | None = None,
    precisions: list[str] | None = None,
    layers: int = 12,
    width: int = 768,
    vocab_size: int = 50258,
    places: int = 4,
    rounds: int = 3,
    mdlm_seconds: float = 60.0,
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
        rounds: how often each step is timed at each place.
        mdlm_seconds: no pass of MDLM is begun after so many seconds, but for the first.
        mdlm_tokens: MDLM, which gains nothing from larger batches, is left out where a pass has more tokens.
        gigabytes: batches whose cache in float32 is larger are left out.
        threads: threads to use; PyTorch's choice by default.
    """
    if threads:
        torch.set_num_threads(threads)
    lengths, batches = lengths or [2048, 8192], batches or [1, 8, 32]
    for length in lengths:
        if length % 16 or length - starts(length, places)[-1] < 16 * (rounds + 2):
            raise ValueError(
                f"length {length} with {places} places and {rounds} rounds: use a multiple of 16 that leaves room for "
                f"{16 * (rounds + 2)} tokens behind the last place, or fewer rounds"
            )
    found = []
    with quiet():
        net = network(layers, width, vocab_size)
        nets = {p: fold(net, p) for p in precisions or ["float32", "bf16"]}
        arithmetic = max(nets, key=lambda p: gemm(PRECISIONS[p]))  # where passes are limited by products
        for length, batch in itertools.product(lengths, batches):
            if bytes_read(net.config, "float32", length, batch)[1] > gigabytes * 1e9:
                print(f"L = {length}, batch {batch} is left out: its cache is larger than {gigabytes:g} GB")
                continue
            mdlm = arithmetic if length * batch <= mdlm_tokens else None
            result = measure(nets, length, batch, places, rounds, mdlm, mdlm_seconds)
            found.append(result)
            rows = [
                (name, r["over_esolm"], "{:.2f}-{:.2f}".format(*r["quartiles"]), r["precision"],
                 r["seconds_per_sample"], r["samples_per_hour"])
                for name, r in result["systems"].items()
            ]  # fmt: skip
            columns = ("system", "× esolm", "quartiles", "precision", "s/sample", "samples/h")
            table(f"a sample of {length} tokens in {length} steps, batch {batch}", columns, rows)
    return {"machine": facts(), "method": METHOD, "cases": found}
