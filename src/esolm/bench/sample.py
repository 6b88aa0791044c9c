"""A whole sample with NFE = L: Eso-LM (B) against MDLM, BD3-LM and AR, each through its own sampler.

Only some steps of a sample run (see METHOD). Skipped steps extend the cache with arbitrary keys and values, which take
as long to read as real ones.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.randomness import Randomness
from ..core.visibility import Visibility
from ..net.cache import KVCache
from ..net.fold import PRECISIONS
from ..sampling.options import SamplingOptions
from ..sampling.request import Request
from ..systems import find
from . import llama
from .latency import bytes_read, network, networks
from .llama import LlamaCpp
from .machine import gemm
from .report import named, table
from .timing import interleaved, ratio, summary

METHOD = (
    "At `places` evenly spaced context lengths every sampler starts after that many given tokens, and its next step is "
    "timed `rounds` times, in turn with the other samplers. The time of a sample is L times the mean over the places. "
    "For a block of BD3-LM two steps are timed: the first, which also commits the previous block, and the second, "
    "which represents the remaining steps. Every step of MDLM is a pass over all L tokens: it is timed at one place, "
    "in the precision with the faster matrix products, up to `rounds` times; no pass starts after `mdlm_seconds`."
)
ESOLM, MDLM = "esolm", "mdlm"


class Case(NamedTuple):
    """A system with its options, and how it samples."""

    system: str
    options: dict[str, Any]
    repeat: int = 1  # steps after which its work repeats
    parallelism: int = 1  # tokens drawn in a step


SYSTEMS = {
    ESOLM: Case("esolm", {"alpha_0": 1.0}),
    "esolm, 16 tokens a step": Case("esolm", {"alpha_0": 1.0}, parallelism=16),
    "ar": Case("ar", {}),
    "bd3lm, block 4": Case("bd3lm", {"block_size": 4}, repeat=4),
    "bd3lm, block 16": Case("bd3lm", {"block_size": 16}, repeat=16),
    MDLM: Case("mdlm", {}),
}
LLAMA = "ar, llama.cpp"
COLUMNS = {
    "system": "name", "× esolm": "over_esolm", "quartiles": "quartiles", "precision": "precision",
    "s/sample": "seconds_per_sample", "samples/h": "samples_per_hour", "tokens/s": "tokens_per_second",
}  # fmt: skip


class Primed:
    """A network whose calls can be skipped: a skipped call extends the cache and returns zeros.

    All samples share the memory of one cache, since their tokens are not used.
    """

    def __init__(self, net: Any, memory: KVCache | None) -> None:
        self.net, self.config, self.memory, self.real = net, net.config, memory, False
        self.device, self.dtype = net.device, net.dtype

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return the shared cache, which has only the slots that timed steps need."""
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
    """A sample in progress after `given` tokens; its work repeats every `repeat` steps."""

    def __init__(self, net: Any, memory: KVCache | None, name: str, length: int, given: int, batch: int) -> None:
        case = SYSTEMS[name]
        self.repeat = case.repeat
        system = find(case.system)(mask_id=net.config.vocab_size - 1, **case.options)
        known = (torch.arange(length) < given).expand(batch, -1)
        together = case.parallelism
        how = SamplingOptions(sampler="block", parallelism=together) if together > 1 else SamplingOptions()
        request = Request(torch.zeros(batch, length, dtype=torch.long), known, torch.ones_like(known), how)
        rng, self.net = Randomness(0, 0, batch), Primed(net, memory)
        self.steps = iter(system.sample(self.net, request, system.plan(request, rng), rng))

    def step(self, i: int) -> None:
        """Run the next step."""
        self._go(1, real=True)

    def ready(self, i: int) -> None:
        """Skip the untimed steps: in round 0 a whole block, later the rest of a block after its second step."""
        self._go(max(self.repeat - 2, 0) if i else self.repeat, real=False)

    def _go(self, number: int, real: bool) -> None:
        self.net.real = real
        assert sum(1 for _ in itertools.islice(self.steps, number)) == number, "the sample has ended"


def starts(length: int, places: int) -> list[int]:
    """Return the number of given tokens at each place."""
    return [int((k + 0.5) / places * length) // 16 * 16 for k in range(places)]


def cached(
    nets: dict[str, Any], others: dict[str, LlamaCpp], length: int, batch: int, places: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds per batch of samples of each system with a cache, by system and precision, for each round."""
    names = [name for name in SYSTEMS if name != MDLM]
    totals = {key: [0.0] * rounds for key in itertools.product(names, nets)}
    given = starts(length, places)
    memory = {p: net.new_cache(batch, given[-1] + 32 * (rounds + 4)) for p, net in nets.items()}
    for place in given:
        cases: dict[str, Callable[[int], object]] = {}
        before: dict[str, Callable[[int], object]] = {}
        shares: dict[str, tuple[tuple[str, str], float]] = {}
        for precision, model in others.items():
            cases[case := f"{LLAMA}, {precision}"] = model.step(place, batch)
            shares[case] = (LLAMA, precision), length / places
        for name, precision in itertools.product(names, nets):
            sampling = Sampling(nets[precision], memory[precision], name, length, place, batch)
            for kind, steps in (("first", 1), ("other", sampling.repeat - 1)):
                if steps:
                    cases[case := f"{name}, {precision}, {kind}"] = sampling.step
                    number = length / SYSTEMS[name].parallelism
                    shares[case] = (name, precision), steps / sampling.repeat * number / places
            before[f"{name}, {precision}, first"] = sampling.ready
        for case, times in interleaved(cases, rounds, before=before).items():
            key, share = shares[case]
            before_it = totals.get(key, [0.0] * rounds)
            totals[key] = [a + share * b for a, b in zip(before_it, times, strict=True)]
    return totals


def whole(net: Any, length: int, batch: int, rounds: int, most: float) -> list[float]:
    """Return the seconds of at least one pass of MDLM."""
    sampling = Sampling(net, None, MDLM, length, length // 2, batch)
    begin, times = time.perf_counter(), list[float]()
    while len(times) < rounds and (not times or time.perf_counter() - begin < most):
        start = time.perf_counter()
        sampling.step(0)
        times.append(time.perf_counter() - start)
    return times


def measure(
    nets: dict[str, Any],
    others: dict[str, LlamaCpp],
    length: int,
    batch: int,
    places: int,
    rounds: int,
    mdlm: str | None,
    mdlm_seconds: float,
) -> dict[str, Any]:
    """Measure seconds per sample by system and precision, and the ratio to Eso-LM, each at its best precision.

    `mdlm` is MDLM's precision, or None to omit it; `others` are llama.cpp's models.
    """
    totals, passes = cached(nets, others, length, batch, places, rounds), 0
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
        systems[name] = {
            **ratio(totals[name, precision], totals[ESOLM, best[ESOLM]]).record("over_esolm", 2),
            "precision": precision,
            "seconds_per_sample": round(medians[name][precision] / batch, 2),
            "samples_per_hour": round(3600 * batch / medians[name][precision], 2),
            "tokens_per_second": round(length * batch / medians[name][precision], 1),
            "tokens_per_second_by_precision": {
                p: round(length * batch / seconds, 1) for p, seconds in medians[name].items()
            },
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
    llama_cpp: bool = True,
) -> dict[str, Any]:
    """Estimate the time of whole samples with NFE = L from steps timed at several context lengths.

    Args:
        lengths: sample lengths, multiples of 16; 2048 and 8192 by default.
        batches: batch sizes; 1, 8 and 32 by default.
        precisions: weight precisions; float32 and bf16 by default. Each system is compared at its fastest.
        layers: number of blocks.
        width: width of the network, a multiple of 64.
        vocab_size: vocabulary size, including the mask token.
        places: number of context lengths at which steps are timed.
        rounds: number of times each step is timed at each place.
        mdlm_seconds: time limit after which no further pass of MDLM starts.
        mdlm_tokens: largest number of tokens per pass for which MDLM is timed; larger batches do not help it.
        gigabytes: largest float32 cache; larger batches are skipped.
        llama_cpp: also time llama.cpp, if `llama_cpp` and `gguf` are installed, on a GPT-2 of the same size.
    """
    lengths, batches = lengths or [2048, 8192], batches or [1, 8, 32]
    for length in lengths:
        if length % 16 or length - starts(length, places)[-1] < 16 * (rounds + 2):
            raise ValueError(
                f"length {length} with {places} places and {rounds} rounds: use a multiple of 16 that leaves room for "
                f"{16 * (rounds + 2)} tokens after the last place, or fewer rounds"
            )
    found = []
    with torch.inference_mode():
        net = network(layers, width, vocab_size)
        precisions = precisions or ["float32", "bf16"]
        nets = networks(net, precisions, native=True)
        arithmetic = max((p for p in nets if p in PRECISIONS), key=lambda p: gemm(PRECISIONS[p]))  # MDLM computes more
        kinds = precisions if llama_cpp and llama.installed() else []
        others = {p: llama.LlamaCpp(layers, width, vocab_size, max(lengths), p) for p in kinds}
        for length, batch in itertools.product(lengths, batches):
            if bytes_read(net.config, "float32", length, batch)[1] > gigabytes * 1e9:
                print(f"L = {length}, batch {batch} skipped: its cache is larger than {gigabytes:g} GB")
                continue
            mdlm = arithmetic if length * batch <= mdlm_tokens else None
            result = measure(nets, others, length, batch, places, rounds, mdlm, mdlm_seconds)
            found.append(result)
            title = f"a sample of {length} tokens in {length} steps, batch {batch}"
            table(title, COLUMNS, named(result["systems"]))
    return {"method": METHOD, "cases": found}
