"""The training loop: every number of a step is a pure function of the seed, the step and the weights before it.

Shapes: B batch, L length.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..core.batch import Batch
from ..core.precision import wide
from ..core.randomness import Randomness, fold
from ..core.terms import total
from ..net.protocol import Forward
from ..runtime import distributed, machine
from ..runtime.distributed import ALONE, Ranks
from ..storage import checkpoint
from ..systems import System
from . import parallel
from .learner import Learner, learning_rate
from .options import Batching, Compute, Optim, Saving, Validation
from .runs import Metrics


class Source(Protocol):
    """A loader: the examples first .. first + count of a step's batch."""

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch: ...

    def __len__(self) -> int: ...


class Report(Protocol):
    """Who is told of progress."""

    def step(self, record: Mapping[str, Any]) -> None: ...

    def record(self, record: Mapping[str, Any]) -> None: ...


class Outcome(NamedTuple):
    """Where training stopped: after the last step, or after a signal."""

    step: int
    folder: Path | None
    signal: int | None


def accumulate(
    net: Forward,
    system: System,
    source: Source,
    step: int,
    seed: int,
    batching: Batching,
    compute: Compute,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, float], int]:
    """Add up the gradient of one step over its micro-batches; the nats per token of each term, and the tokens."""
    key = fold(fold(seed, "train"), step)
    parts = [
        (Randomness(key, first, batching.size), source.batch(step, first, size).to(compute.device))
        for first, size in batching.passes(ranks.rank, ranks.world)
    ]
    counts, tokens = count(system, parts, ranks)
    kind = wide(torch.device(compute.device))
    nats = dict.fromkeys(counts, torch.zeros((), dtype=kind, device=compute.device))
    for index, (rng, batch) in enumerate(parts):
        torch.manual_seed(fold(fold(key, "dropout"), rng.first // len(batch.x)) >> 1)
        with parallel.meeting(net, last=index == len(parts) - 1):
            with machine.autocast(batch.x.device, compute.precision):
                terms = system.terms(net, batch, rng, train=True)
            # Gradients of several processes are averaged, and each term is a part of a mean over all of them.
            (total(terms, counts) * ranks.world).backward()
        for term in terms:
            nats[term.name] = nats[term.name] + term.nats.detach().to(kind).sum() / max(counts[term.name], 1)
    return dict(zip(nats, ranks.sum([value.item() for value in nats.values()]))), tokens


def count(system: System, parts: Sequence[tuple[Randomness, Batch]], ranks: Ranks) -> tuple[dict[str, int], int]:
    """Of the global batch, the tokens of each term and of all."""
    counts: Counter[str] = Counter()
    tokens = 0
    for rng, batch in parts:
        counts.update(system.counts(batch.scored, rng))
        tokens += int(batch.scored.sum())
    *sums, tokens = (int(n) for n in ranks.sum([*counts.values(), tokens]))
    return dict(zip(counts, sums)), tokens


@torch.no_grad()
def validate(
    net: Forward, system: System, source: Source, batches: int | None, compute: Compute, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Each term of the bound in nats per token on the first batches of a split, with the same noise each time."""
    device = torch.device(compute.device)
    steps = len(source) if batches is None else min(batches, len(source))
    if steps == 0:
        raise ValueError("the validation split has no sequence: prepare the corpus with a larger one")
    size, last = (len(source.batch(step).x) for step in (0, steps - 1))  # the last may be smaller
    nats: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for turn in range(0, steps, ranks.world):
        step = turn + ranks.rank
        extra, step = step >= steps, min(step, steps - 1)  # the last one again, for nothing, to keep step with others
        batch = source.batch(step).to(device)
        rng = Randomness(fold(0, "valid"), step * size, (steps - 1) * size + last)
        with machine.autocast(device, compute.precision), machine.uncompiled(compute.compile):
            terms = system.terms(net, batch, rng, train=False)
        for term in terms:
            nats[term.name] += 0 if extra else term.nats.cpu().double().sum().item()  # type: ignore[assignment]
            counts[term.name] += 0 if extra else int(term.valid.sum())
    sums = ranks.sum([*nats.values(), *counts.values()])
    return {name: sums[i] / max(sums[i + len(nats)], 1) for i, name in enumerate(nats)}


def learn(
    net: Forward,
    learner: Learner,
    system: System,
    source: Source,
    folder: Path | None,
    *,
    steps: int,
    seed: int,
    batching: Batching,
    optim: Optim,
    compute: Compute,
    ranks: Ranks,
) -> dict[str, Any]:
    """One step, and its line for metrics.jsonl; folder is the last checkpoint, named when the loss is not finite."""
    start = time.perf_counter()
    learner.net.train()
    nats, tokens = accumulate(net, system, source, learner.step, seed, batching, compute, ranks)
    norm = learner.gradient_norm().item()
    check_finite({**nats, "gradient norm": norm}, learner.step + 1, folder)
    lr = learning_rate(learner.step, steps, optim)
    learner.update(lr, tokens)
    learner.seconds += time.perf_counter() - start
    loss = sum(nats.values())
    return {
        "step": learner.step,
        "loss": loss,
        "terms": nats,
        "lr": lr,
        "grad_norm": norm,
        "tokens": learner.tokens,
    }


def measure(
    net: Forward,
    learner: Learner,
    system: System,
    source: Source,
    folder: Path | None,
    batches: int | None,
    compute: Compute,
    ranks: Ranks,
) -> dict[str, Any]:
    """The bound of the averaged weights on held-out data, as a line for metrics.jsonl."""
    start = time.perf_counter()
    learner.net.eval()
    with learner.ema.applied(learner.net):
        terms = validate(net, system, source, batches, compute, ranks)
    parallel.forget(learner.net)
    check_finite({f"validation {name}": value for name, value in terms.items()}, learner.step, folder)
    loss = sum(terms.values())
    found = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "terms": terms}
    return {"step": learner.step, "validation": found, "time": {"seconds": time.perf_counter() - start}}


def train(
    root: Path,
    learner: Learner,
    metrics: Metrics,
    system: System,
    source: Source,
    held_out: Source,
    identity: Mapping[str, Any],
    report: Report,
    *,
    steps: int,
    seed: int,
    log_every: int,
    batching: Batching,
    optim: Optim,
    compute: Compute,
    validation: Validation,
    saving: Saving,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Train up to `steps` steps from where the learner is, with checkpoints under root.

    Raises ValueError when a term or the gradient is not finite, before it reaches the weights.
    """
    net = parallel.connect(learner.net, compute, ranks)
    folder, saved = ranks.once(lambda: checkpoint.latest(root)), learner.step
    fixed: dict[str, Any] = {"steps": steps, "seed": seed, "batching": batching, "optim": optim, "compute": compute}
    mark = (learner.tokens, learner.seconds)
    with (
        machine.deterministic(torch.device(compute.device)),
        interrupts(patient=ranks.world > 1) as caught,
        checkpoint.Saver(root, saving.keep, ranks) as saver,
    ):

        def save(bound: float | None) -> Path:
            learner.metrics_bytes = metrics.sync()
            return learner.save(saver, identity, bound)

        bound, stop = None, 0
        while learner.step < steps and not stop:
            record = learn(net, learner, system, source, folder, ranks=ranks, **fixed)
            step, bound = learner.step, None
            rate = (learner.tokens - mark[0]) / (learner.seconds - mark[1])
            record["time"] = {"seconds": learner.seconds, "tokens_per_second": rate}
            report.step(record)
            if step == steps or step % log_every == 0:
                mark = (learner.tokens, learner.seconds)
                metrics.write(record)
                report.record(record)
            if step == steps or (validation.every and step % validation.every == 0):
                record = measure(net, learner, system, held_out, folder, validation.batches, compute, ranks)
                bound = record["validation"]["loss"]
                metrics.write(record)
                report.record(record)
            if saving.every and step % saving.every == 0:
                folder, saved = save(bound), step
            stop = int(ranks.largest([caught[0] if caught else 0])[0])  # all processes stop after the same step
        if saved != learner.step:
            folder = save(bound)
    return Outcome(learner.step, folder, stop or None)


def check_finite(values: Mapping[str, float], step: int, folder: Path | None) -> None:
    """Raise ValueError that names the step, the value and the last good checkpoint if one is not finite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise distributed.Shared(
                f"training stopped at step {step}: {name} is {value}. The last good checkpoint is {folder or 'none'}; "
                "the weights of this step were not saved. Start anew with a lower --optim.lr, a longer "
                "--optim.warmup or --compute.precision float32"
            )


@contextmanager
def interrupts(patient: bool = False) -> Iterator[list[int]]:
    """The signals noted so far: a first SIGINT or SIGTERM waits for the step's end, a second acts as usual.

    patient: a second waits too, because torchrun passes on what the processes have got already; it kills in the end.
    """
    caught: list[int] = []
    usual: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        for each, handler in () if patient else usual.items():
            signal.signal(each, handler)

    if threading.current_thread() is threading.main_thread():  # elsewhere Python does not allow handlers
        usual.update({each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)})
    try:
        yield caught
    finally:
        for each, handler in usual.items():
            signal.signal(each, handler)
