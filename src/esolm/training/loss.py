"""The loss of one step and the validation bound, over micro-batches and ranks.

Every number is a pure function of the seed, the step and the weights.

Shapes: B batch, L length, N blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.float64 import wide
from ..core.randomness import Randomness, fold
from ..core.terms import Term, total
from ..net.protocol import Forward
from ..runtime import machine
from ..runtime.distributed import ALONE, Ranks, Shared
from ..systems import System
from . import parallel
from .options import Batching, Compute


class Objective(Protocol):
    """The part of a system that training needs: the terms of its loss, and what they are normalised by."""

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """As `System.terms`."""
        ...

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        """As `System.counts`."""
        ...


class Batches(Protocol):
    """A data loader: the batch of a step is a pure function of the step."""

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """The examples first .. first + count of the step's batch."""
        ...

    def __len__(self) -> int: ...


def accumulate(
    net: Forward,
    system: Objective,
    batches: Batches,
    step: int,
    seed: int,
    batching: Batching,
    compute: Compute,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, float], int]:
    """Accumulate the gradient of one step over its micro-batches.

    Returns the nats per token of each term and the number of scored tokens, both of the global batch.
    """
    key = fold(fold(seed, "train"), step)
    parts = [
        (Randomness(key, first, batching.size), batches.batch(step, first, size).to(compute.device))
        for first, size in batching.micro_batches(ranks.rank, ranks.world)
    ]
    counts, tokens = count_tokens(system, parts, ranks)
    dtype = wide(torch.device(compute.device))
    nats = dict.fromkeys(counts, torch.zeros((), dtype=dtype, device=compute.device))
    for index, (rng, batch) in enumerate(parts):
        torch.manual_seed(fold(fold(key, "dropout"), rng.first // len(batch.x)) >> 1)
        with parallel.gradient_sync(net, last=index == len(parts) - 1):
            with machine.autocast(batch.x.device, compute.precision):
                terms = system.terms(net, batch, rng, train=True)
            # Gradients are averaged over ranks, while each term is this rank's part of a global mean.
            (total(terms, counts) * ranks.world).backward()
        for term in terms:
            nats[term.name] = nats[term.name] + term.nats.detach().to(dtype).sum() / max(counts[term.name], 1)
    return dict(zip(nats, ranks.sum([value.item() for value in nats.values()]))), tokens


def count_tokens(
    system: Objective, parts: Sequence[tuple[Randomness, Batch]], ranks: Ranks
) -> tuple[dict[str, int], int]:
    """The number of tokens of each term and of all scored tokens in the global batch."""
    counts: Counter[str] = Counter()
    tokens = 0
    for rng, batch in parts:
        counts.update(system.counts(batch.scored, rng))
        tokens += int(batch.scored.sum())
    *sums, tokens = (int(n) for n in ranks.sum([*counts.values(), tokens]))
    return dict(zip(counts, sums)), tokens


@torch.no_grad()
def validate(
    net: Forward, system: Objective, batches: Batches, limit: int | None, compute: Compute, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Each term of the bound in nats per token on the first `limit` batches, or all, always with the same noise."""
    nats: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for terms, extra in _held_out_terms(net, system, batches, limit, compute, ranks, train=False):
        for term in terms:
            nats[term.name] += 0 if extra else term.nats.cpu().double().sum().item()  # type: ignore[assignment]
            counts[term.name] += 0 if extra else int(term.valid.sum())
    sums = ranks.sum([*nats.values(), *counts.values()])
    return {name: sums[i] / max(sums[i + len(nats)], 1) for i, name in enumerate(nats)}


@torch.no_grad()
def variance(
    net: Forward, system: System, batches: Batches, limit: int | None, compute: Compute, ranks: Ranks = ALONE
) -> float:
    """The variance of the training loss between blocks, in nats per token squared: the mean over the first `limit`
    validation batches, or all, always with the same noise."""
    found = used = 0.0
    for terms, extra in _held_out_terms(net, system, batches, limit, compute, ranks, train=True):
        nats, tokens = (
            torch.cat([part.cpu().double().unflatten(1, (-1, system.block_size)).sum(-1) for part in parts])  # [B, N]
            for parts in ([term.nats for term in terms], [term.valid for term in terms])
        )
        means = nats[tokens > 0] / tokens[tokens > 0]
        if not extra and len(means) > 1:
            found, used = found + means.var().item(), used + 1
    found, used = ranks.sum([found, used])
    return found / max(used, 1.0)


def _held_out_terms(
    net: Forward, system: Objective, batches: Batches, limit: int | None, compute: Compute, ranks: Ranks, train: bool
) -> Iterator[tuple[list[Term], bool]]:
    """The terms of this rank's share of the first `limit` validation batches.

    A rank without a batch repeats the last one, so that all ranks make the same number of calls; the second value says
    that its terms are to be discarded.
    """
    device = torch.device(compute.device)
    steps = len(batches) if limit is None else min(limit, len(batches))
    if steps == 0:
        raise ValueError("the validation split has no sequence: prepare the corpus with a larger one")
    size, last = (len(batches.batch(step).x) for step in (0, steps - 1))  # the last may be smaller
    for turn in range(0, steps, ranks.world):
        step = turn + ranks.rank
        extra, step = step >= steps, min(step, steps - 1)
        batch = batches.batch(step).to(device)
        rng = Randomness(fold(0, "valid"), step * size, (steps - 1) * size + last)
        with machine.autocast(device, compute.precision), machine.uncompiled(compute.compile):
            terms = system.terms(net, batch, rng, train)
        yield terms, extra


def check_finite(values: Mapping[str, float], step: int, checkpoint: Path | None) -> None:
    """Raise ValueError if a value is not finite, naming the step, the value and the last checkpoint."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise Shared(
                f"training stopped at step {step}: {name} is {value}. The last good checkpoint is "
                f"{checkpoint or 'none'}; the weights of this step were not saved. Start a new run with a lower "
                "--optim.lr, a longer --optim.warmup or --compute.precision float32"
            )
