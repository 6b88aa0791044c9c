"""`Trainer`: train the run that a configuration describes, or resume it."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data import Manifest
from ..net.protocol import Forward
from ..runtime import distributed, machine
from ..runtime.distributed import Ranks
from ..storage import checkpoint
from ..systems import options_of
from . import parallel, report, runs, tuning
from .config import RunConfig
from .distill import Teacher
from .distill import check as check_distillation
from .learner import Learner, learning_rate
from .loss import Batches, Objective, accumulate, check_finite, validate, variance
from .resolve import at_alphas, build, enter, identify, initial_weights, loaders, open_data, resolve, resolve_compute

Record = dict[str, Any]
"""One line of metrics.jsonl."""
SEARCHED = 100
"""Most validation batches on which the alternatives of a system are compared, as in the code of BD3-LM's authors."""


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    step: int
    """Steps trained in all."""
    checkpoint: Path | None
    """The folder of the last checkpoint."""
    signal: int | None
    """The signal that stopped training, if one did."""
    validation: Mapping[str, Any] | None
    """The last validation: `loss`, `perplexity` and `terms`."""


class Trainer:
    """Trains as configured; if the run folder exists, training resumes from its last checkpoint.

    Under torchrun every process makes a Trainer, and only rank 0 prints and writes. `outcome` is set when training
    ends. A first SIGINT or SIGTERM ends training after the current step and saves; a second one ends the process.
    session: how a step is made and what it learns from; by default the loss of the system on prepared data.
    """

    def __init__(self, config: RunConfig, quiet: bool = False, session: type[Session] | None = None) -> None:
        if config.run is None:
            raise ValueError("the configuration has no run folder: set run")
        self.config, self.quiet, self.session = config, quiet, session or Session
        self.outcome: Outcome | None = None

    def fit(self, callbacks: Sequence[Callable[[Record], Any]] = ()) -> Outcome:
        """Train up to the last step. callbacks: called with each record of `records`.

        Raises ValueError, and changes nothing, if the run folder has another configuration, network or corpus.
        """
        with closing(self.records()) as records:
            for record in records:
                for callback in callbacks:
                    callback(record)
        assert self.outcome is not None
        return self.outcome

    def records(self) -> Generator[Record, None, None]:
        """Train, and yield each record that is written to metrics.jsonl: logged steps and validations.

        Leaving the loop early saves a checkpoint; the next call resumes from it.
        """
        self.outcome, compute = None, self.config.compute
        with distributed.join(compute.device, compute.timeout) as ranks:
            console = Console(highlight=False, markup=False, soft_wrap=True, quiet=self.quiet or ranks.rank > 0)
            session = self.session(self.config, ranks)
            path = session.run / "metrics.jsonl"
            with (
                closing(session),
                ranks.everywhere(lambda: runs.NoMetrics() if ranks.rank else runs.Metrics(path)) as metrics,
            ):
                session.restore()
                if session.finished:
                    console.print(session.advice())
                else:
                    console.print(session.opening())
                    with suppress(GeneratorExit):  # the caller left the loop, and the session has saved
                        yield from session.train(metrics, console)
        self.outcome = session.outcome()
        if not session.trained:
            return
        if session.finished and not session.signal and session.folder is not None and ranks.rank == 0:
            checkpoint.consolidate(session.folder)
        console.print(session.summary())


class Session:
    """The part of one rank in training a run, from its last checkpoint to its end or to a signal.

    `esolm tune` overrides what a run learns from (`describe`, `sources`, `enter`), its `step` and its `validate`.
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        machine.keep_memory()
        if config.compute.threads is not None:
            torch.set_num_threads(config.compute.threads)
        manifest = ranks.everywhere(lambda: self.describe(config))
        options = {key: value for key, value in config.tree().items() if key != "data"}  # the path may differ
        code = distributed.code() if ranks.world > 1 else ""
        ranks.agree({"config": options, "corpus": manifest.fingerprint, "code": code})
        start = ranks.everywhere(lambda: initial_weights(config, manifest))
        self.compute = resolve_compute(config, ranks)
        self.ranks, self.run = ranks, Path(str(config.run))
        # Each rank has a GPU of its own, so the run keeps only the kind of device.
        kept = self.compute if ranks.world == 1 else replace(self.compute, device=ranks.device.type)
        self.config = config = ranks.everywhere(lambda: resolve(config, manifest, start, kept))
        self.system = self.configured = config.make_system(manifest)
        check_distillation(config, self.system)
        self.at_other_alpha_0 = at_alphas(config, self.system)
        self.batches, self.held_out = ranks.everywhere(lambda: self.sources(config, manifest, ranks))
        self.loggers = ranks.everywhere(lambda: report.loggers(config.log if ranks.rank == 0 else ()))
        self.notes = ranks.once(lambda: self.enter(config, manifest))
        net = build(config.net_config(manifest.vocab_size, manifest.length, self.system), config.seed, self.compute)
        if start.weights is not None:
            net.load_state_dict(start.weights)
        tuning.prepare(net, config.tuning, config.seed, start.adapter)
        parallel.shard(net, self.compute, ranks)
        self.learner = Learner(net, config.optim)
        self.teacher = Teacher.of(config, self.compute, ranks)
        self.identity = identify(config, self.system, manifest, start)
        self.folder: Path | None = None  # of the last checkpoint
        self.bound: float | None = None  # the validation loss of the current step
        self.validation: Mapping[str, Any] | None = None
        self.signal, self.trained = 0, False
        self.mark = (0, 0.0)  # tokens and seconds at the last record

    def describe(self, config: RunConfig) -> Manifest:
        """The manifest of what the run learns from."""
        return open_data(config)

    def sources(self, config: RunConfig, manifest: Manifest, ranks: Ranks) -> tuple[Any, Any]:
        """The batches of training and of validation."""
        return loaders(config, manifest, ranks)

    def enter(self, config: RunConfig, manifest: Manifest) -> list[str]:
        """Create the run folder or check the existing one, as `resolve.enter` does."""
        return enter(config, manifest, Path(config.data))

    def close(self) -> None:
        """Free what the session holds besides memory."""

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.learner.step >= self.config.steps

    def restore(self) -> None:
        """Load the last checkpoint, if there is one."""
        self.folder = self.ranks.once(lambda: checkpoint.latest(self.run / "checkpoints"))
        if self.folder is None:
            return
        state = self.learner.restore(self.folder, self.identity, self.ranks)
        self.system = replace(self.system, **state.get("chosen", {}))  # type: ignore[type-var]
        threads = state["threads"]
        if (now := torch.get_num_threads()) != threads and self.compute.device == "cpu":
            self.notes.append(f"it used {threads} threads and now uses {now}, so sums may round differently")
        self.mark = (self.learner.tokens, self.learner.seconds)
        step = self.learner.step
        past = [each for each in runs.read_metrics(self.run) if "validation" in each and each["step"] <= step]
        self.validation = past[-1]["validation"] if past else None

    def train(self, metrics: runs.Metrics, console: Console) -> Iterator[Record]:
        """Train to the last step or a signal, and save; yields each record after its step is complete."""
        config, ranks, learner = self.config, self.ranks, self.learner
        ranks.once(lambda: metrics.cut(learner.metrics_bytes))
        ranks.once(lambda: runs.update_config(self.run, config.tree()))
        net = parallel.connect(learner.net, self.compute, ranks)
        sinks = [logger(self.run) for logger in self.loggers]
        self.trained = True
        with (
            report.Live(learner.step, config.steps, sinks, console) as live,
            machine.deterministic(torch.device(self.compute.device)),
            interrupts(patient=ranks.world > 1) as caught,
            checkpoint.Saver(self.run / "checkpoints", config.saving.keep, ranks) as saver,
        ):
            saved = learner.step
            with suppress(GeneratorExit):
                if learner.step == 0 and config.init is not None and config.validation.alpha_0:
                    yield self.validated(net, live, metrics)  # what the model could do before it was adapted
                while not (self.finished or self.signal):
                    records = self.advance(net, live, metrics)
                    if config.saving.every and learner.step % config.saving.every == 0:
                        self.save(saver, metrics)
                        saved = learner.step
                    yield from records
                    self.signal = int(ranks.largest([caught[0] if caught else 0])[0])  # all ranks stop together
            if saved != learner.step:
                self.save(saver, metrics)

    def advance(self, net: Forward, live: report.Live, metrics: runs.Metrics) -> list[Record]:
        """Make one step and, if it is due, validate; returns the records that were written."""
        config, records = self.config, list[Record]()
        record = self.step(net)
        live.step(record)
        step, self.bound = record["step"], None
        if self.finished or step % config.log_every == 0:
            self.mark = (self.learner.tokens, self.learner.seconds)
            metrics.write(record)
            live.record(record)
            records.append(record)
        if self.finished or (config.validation.every and step % config.validation.every == 0):
            records.append(self.validated(net, live, metrics))
        return records

    def validated(self, net: Forward, live: report.Live, metrics: runs.Metrics) -> Record:
        """Validate, and write the record."""
        record = self.validate(net)
        metrics.write(record)
        live.record(record)
        return record

    def step(self, net: Forward) -> Record:
        """One training step; raises ValueError before the weights change if a term or the gradient is not finite."""
        start = time.perf_counter()
        system = self.system.at_step(self.learner.step)
        changed = self.update(net, system if self.teacher is None else self.teacher.beside(system), self.batches)
        return self.record(changed, start)

    def update(self, net: Forward, objective: Objective, batches: Batches, last: bool = True) -> Record:
        """Change the weights by the gradient of one batch; returns what was computed on the way. last: of the step."""
        config, learner = self.config, self.learner
        learner.net.train()
        nats, tokens = accumulate(
            net, objective, batches, learner.step, config.seed, config.batch, self.compute, self.ranks
        )
        norm = learner.gradient_norm().item()
        check_finite({**nats, "gradient norm": norm}, learner.step + 1, self.folder)
        lr = learning_rate(learner.step, config.steps, config.optim)
        learner.update(lr, tokens, last)
        return {"loss": sum(nats.values()), "terms": nats, "lr": lr, "grad_norm": norm}

    def record(self, changed: Record, start: float) -> Record:
        """The record of a step that began at `start`."""
        learner = self.learner
        learner.seconds += time.perf_counter() - start
        rate = (learner.tokens - self.mark[0]) / (learner.seconds - self.mark[1])
        timing = {"seconds": learner.seconds, "tokens_per_second": rate}
        return {"step": learner.step, **changed, "tokens": learner.tokens, "time": timing}

    def validate(self, net: Forward) -> Record:
        """The bound of the averaged weights on the validation split."""
        start, learner = time.perf_counter(), self.learner
        learner.net.eval()
        limit = self.config.validation.batches
        with learner.ema.applied(learner.net):
            terms = validate(net, self.system, self.held_out, limit, self.compute, self.ranks)
            others = {
                f"{alpha_0:g}": sum(validate(net, system, self.held_out, limit, self.compute, self.ranks).values())
                for alpha_0, system in self.at_other_alpha_0
            }
            self.choose(net)
        parallel.forget(learner.net)
        check_finite({f"validation {name}": value for name, value in terms.items()}, learner.step, self.folder)
        self.bound = loss = sum(terms.values())
        self.validation = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "terms": terms}
        if others:
            self.validation["alpha_0"] = others
        if self.system.alternatives():
            self.validation["chosen"] = self.chosen
        seconds = {"seconds": time.perf_counter() - start}
        return {"step": learner.step, "validation": self.validation, "time": seconds}

    def choose(self, net: Forward) -> None:
        """Continue with the alternative of the system whose loss varies least on the validation split."""
        limit = min(self.config.validation.batches or SEARCHED, SEARCHED)
        found = [
            (variance(net, system, self.held_out, limit, self.compute, self.ranks), system)
            for system in self.system.alternatives()
        ]
        if found:
            self.system = min(found, key=lambda pair: pair[0])[1]

    @property
    def chosen(self) -> dict[str, Any]:
        """The options of the system that a validation has changed."""
        now, before = options_of(self.system), options_of(self.configured)
        return {name: value for name, value in now.items() if value != before[name]}

    def save(self, saver: checkpoint.Saver, metrics: runs.Metrics) -> None:
        """Write a checkpoint of this step."""
        self.learner.metrics_bytes = metrics.sync()
        self.folder = self.learner.save(saver, self.identity, self.bound, self.chosen)

    def opening(self) -> str:
        """What begins: a resumed run with what has changed, or the size of a new one with what looks like a mistake."""
        if self.folder is not None:
            return f"resuming from {self.folder}" + "".join(f"; {note}" for note in self.notes)
        size = sum(weight.numel() for weight in self.learner.net.parameters())
        return report.opening(self.config, size, getattr(self.batches, "sequences", None))

    def outcome(self) -> Outcome:
        """How training ended."""
        return Outcome(self.learner.step, self.folder, self.signal or None, self.validation)

    def advice(self) -> str:
        """For a run that has nothing left to do: how to train longer."""
        return report.advice(self.config, self.run, self.learner.step)

    def summary(self) -> str:
        """One sentence on how training ended."""
        step, steps = self.learner.step, self.config.steps
        if self.finished and not self.signal:
            return f"finished: {step} steps, checkpoint {self.folder}"
        by = f" by {signal.Signals(self.signal).name}" if self.signal else ""
        return f"stopped{by} after step {step} of {steps}; saved {self.folder}. Run it again to resume"


@contextmanager
def interrupts(patient: bool = False) -> Iterator[list[int]]:
    """The signals received so far: a first SIGINT or SIGTERM is only noted, a second one acts as usual.

    patient: note all of them, because torchrun sends each signal again to processes that have received it already.
    """
    caught: list[int] = []
    usual: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        for each, handler in () if patient else usual.items():
            signal.signal(each, handler)

    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
        usual.update({each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)})
    try:
        yield caught
    finally:
        for each, handler in usual.items():
            signal.signal(each, handler)
