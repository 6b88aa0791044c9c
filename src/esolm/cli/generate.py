"""The work of `esolm sample` and `esolm infill`: generate batch by batch, show it, write it and print it.

Under torchrun the processes share each round of batches, and rank 0 writes and prints.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..generation.collect import before_stop
from ..generation.samples import Samples
from ..model import LanguageModel, collect, load
from ..runtime import distributed, files
from ..runtime.distributed import Ranks
from ..runtime.machine import keep_memory, pick_device, pick_weights
from ..sampling.events import Event, Speculation, until
from ..storage import folder
from ..storage.models import find_folder, locate
from ..viz import frames, picture, terminal
from .estimates import check_sampling
from .generation_options import DELIVERY, sampling_options
from .output import SampleFile, check_writable, partial_of

_PATIENCE = 2.0  # seconds without a progress bar


@dataclass(frozen=True)
class Job:
    """What to generate."""

    total: int  # samples
    length: int  # tokens of the longest sample
    stream: Callable[..., Iterator[Event]]  # takes `part` and the sampling options
    record: Callable[[int], dict[str, Any]]  # the given fields of sample i
    cut: bool  # whether a text ends at the first end-of-sequence token that was generated
    content: str | None = None  # a hash of what the samples depend on besides the options
    chat: bool = False  # whether a text is only the answer to a conversation
    stops: Sequence[str] = ()  # texts before which what is generated ends


def generate(options: Mapping[str, Any], plan: Callable[[LanguageModel, Mapping[str, Any]], Job]) -> int:
    """Generate all samples that are not in the file of `--out` yet, and deliver them."""
    with distributed.join(options["device"], distributed.PATIENCE) as ranks:
        ranks.everywhere(lambda: check(options))
        precision = ranks.once(lambda: pick_weights(options["precision"], own_device(options, ranks)))
        lm, job = ranks.everywhere(lambda: prepare(options, plan, precision, ranks))
        request = request_of(options, precision, job)
        file = ranks.everywhere(lambda: open_file(options, request) if ranks.rank == 0 else None)
        begin = ranks.once(lambda: 0 if file is None else file.done)
        view, kept = View(lm, job.total, options, begin, quiet=ranks.rank > 0), list[Samples]()
        try:
            with view:
                for samples in rounds(lm, job, options, ranks, begin, view):
                    if file is not None:
                        file.write(records(lm, job, samples, file.done))
                    if options["json"] or not (options["out"] or options["show"]):
                        kept.append(samples)
        except KeyboardInterrupt:
            if file is not None and file.done:
                print(f"{file.done} of {job.total} samples are in {file.partial}: run again to resume", file=sys.stderr)
            raise
    if file is not None:
        file.finish()
    if ranks.rank == 0 and kept:
        deliver(joined(kept, sum(samples.seconds for samples in kept)), options)
    return 0


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError, before any work is done, for wrong values and for files that cannot or must not be written."""
    if options["num_samples"] < 1:
        raise ValueError(f"num_samples is {options['num_samples']}; it must be at least 1")
    sampling_options(options)
    resuming = options["out"] is not None and partial_of(Path(options["out"])).exists()
    for name in ("out", "svg", "gif"):
        if options[name] is not None:
            check_writable(Path(options[name]), f"--{name}", options["force"] or (resuming and name != "out"))
    if options["gif"] is not None:
        picture.need_gif()


def prepare(
    options: Mapping[str, Any],
    plan: Callable[[LanguageModel, Mapping[str, Any]], Job],
    precision: str,
    ranks: Ranks,
) -> tuple[LanguageModel, Job]:
    """Load the model and plan the samples; raises ValueError if there are too many, or too few for the processes."""
    if ranks.world > 1 and options["show"]:
        raise ValueError("--show is for one process: leave it out, or start without torchrun")
    keep_memory()
    if options["threads"] is not None:
        if options["threads"] < 1:
            raise ValueError(f"threads is {options['threads']}; it must be at least 1")
        torch.set_num_threads(options["threads"])
    device = str(own_device(options, ranks))
    lm = load(options["run"], options["weights"], options["which"], device, precision, options["engine"])
    job = plan(lm, options)
    if job.total < ranks.world:
        raise ValueError(f"{job.total} samples for {ranks.world} processes: start no more processes than samples")
    check_sampling(lm.net, job, options, quiet=ranks.rank > 0, redraws=not lm.system.masks)
    return lm, job


def own_device(options: Mapping[str, Any], ranks: Ranks) -> torch.device:
    """The device of this process."""
    return pick_device(options["device"]) if ranks.world == 1 else ranks.device


def request_of(options: Mapping[str, Any], precision: str, job: Job) -> dict[str, Any]:
    """Everything that the samples depend on."""
    home = find_folder(options["run"])
    home = home if folder.is_model(home) else locate(home, options["which"])[0]
    changed = max(file.stat().st_mtime_ns for file in home.iterdir())
    free = (*DELIVERY, "batch_size", "device", "prompt_file", "threads")
    return {
        **{name: value for name, value in options.items() if name not in free},
        "run": str(home.resolve()),
        "modified": changed,
        "precision": precision,
        "content": job.content,
    }


def open_file(options: Mapping[str, Any], request: Mapping[str, Any]) -> SampleFile | None:
    """The file of `--out`, with the samples that are there."""
    if options["out"] is None:
        return None
    file = SampleFile(Path(options["out"]), request, options["force"])
    if file.done and options["json"]:
        raise ValueError(f"{file.partial} has {file.done} samples, which --json cannot print: leave --json out")
    return file


def rounds(
    lm: LanguageModel, job: Job, options: Mapping[str, Any], ranks: Ranks, begin: int, view: View
) -> Iterator[Samples]:
    """The samples from `begin` on, one batch of each process at a time, on every process."""
    size, settings = options["batch_size"] * ranks.world, vars(sampling_options(options))
    for start in range(begin, job.total, size):
        chunk = range(start, min(start + size, job.total))
        share = ranks.share(len(chunk))
        own = functools.partial(one_batch, lm, job, chunk[share.start : share.stop], settings, view)
        made = [samples for samples in ranks.gathered(ranks.everywhere(own)) if samples is not None]
        view.draw_pictures()
        yield joined(made, max(samples.seconds for samples in made))


def one_batch(lm: LanguageModel, job: Job, part: range, settings: dict[str, Any], view: View) -> Samples | None:
    """The samples of this process in one round, if it has any."""
    if not part:
        return None
    made = collect(lm, view.watch(job.stream(**settings, part=part)), job.cut, job.stops)
    if not job.chat:
        return made
    answers = [before_stop(lm.tokenizer.chat.answer(drawn(made, i)), job.stops) for i in range(len(made))]
    return dataclasses.replace(made, texts=answers)


def drawn(samples: Samples, i: int) -> list[int]:
    """The tokens of sample i that follow its prompt."""
    tokens = samples.tokens[i]
    return tokens[len(tokens) - len({p for step in samples.steps[i] for p in step}) :]


def joined(parts: list[Samples], seconds: float) -> Samples:
    """Several samples as one."""

    def chain(name: str, of: Iterable[Any]) -> list[Any]:
        return [value for part in of for value in getattr(part, name)]

    rows: dict[str, Any] = {name: chain(name, parts) for name in ("texts", "tokens", "nfe", "steps")}
    tried = [part.speculation for part in parts if part.speculation is not None]
    names = [field.name for field in dataclasses.fields(Speculation)]
    speculation = Speculation(**{name: chain(name, tried) for name in names}) if tried else None
    fed = None if any(part.fed is None for part in parts) else chain("fed", parts)
    log_q = None if any(part.log_q is None for part in parts) else chain("log_q", parts)
    passes = sum(part.passes for part in parts)
    return Samples(**rows, passes=passes, seconds=seconds, speculation=speculation, fed=fed, log_q=log_q)


def records(lm: LanguageModel, job: Job, samples: Samples, first: int) -> Iterator[dict[str, Any]]:
    """The record of each sample, where the first is sample `first` of the job."""
    for i, text in enumerate(samples.texts):
        record, tokens = job.record(first + i), samples.tokens[i]
        if job.cut:
            ids = until(drawn(samples, i), lm.tokenizer.eos_id)
            record["prediction"] = text if job.chat else before_stop(lm.tokenizer.decode(ids), job.stops)
        yield {**record, "text": text, "tokens": tokens, "nfe": samples.nfe[i]}


class View:
    """What is seen while samples are made: an animation, or a progress bar on a terminal after two seconds."""

    def __init__(
        self, lm: LanguageModel, total: int, options: Mapping[str, Any], begin: int = 0, quiet: bool = False
    ) -> None:
        self.lm, self.options, self.quiet = lm, options, quiet
        self.meter, self.films = frames.Meter(), list[frames.Film]()
        self.pictures = [name for name in ("svg", "gif") if options[name] is not None and begin == 0 and not quiet]
        columns = TextColumn("sample {task.fields[at]} of {task.total}"), BarColumn(), TextColumn("{task.description}")
        self.console = Console(stderr=True)
        self.bar = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=self.console, transient=True)
        self.task = self.bar.add_task("", total=total, completed=begin, at=begin + 1)
        self.start, self.shown = time.monotonic(), False

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self.bar.stop()

    def watch(self, events: Iterator[Event]) -> Iterator[Event]:
        """Pass the events of one batch on, and show them."""
        events, self.films = self.meter.measure(events), []
        if self.options["show"] or self.pictures:
            events = frames.record(events, self.films)
        if self.options["show"]:
            console = Console(stderr=self.options["json"], highlight=False)
            return terminal.animate(events, self.films, self.lm.tokenizer, self.meter, console)
        return events if self.quiet else self._progress(events)

    def _progress(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            done = event.first + len(event.tokens) * min((event.step + 1) / event.steps, 1)
            speed, at = f"{self.meter.speed:,.0f} tokens/s", event.first + len(event.tokens)
            self.bar.update(self.task, completed=done, description=speed, at=at)
            if not self.shown and self.console.is_terminal and time.monotonic() - self.start > _PATIENCE:
                self.bar.start()
                self.shown = True
            yield event

    def draw_pictures(self) -> None:
        """Write the pictures of the first sample, once."""
        drawers: dict[str, Callable[[frames.Film, Any], bytes]] = {
            "svg": lambda film, tokenizer: picture.svg(film, tokenizer).encode(),
            "gif": picture.gif,
        }
        for name in self.pictures:
            files.write(path := Path(self.options[name]), drawers[name](self.films[0], self.lm.tokenizer))
            print(f"wrote {path}", file=sys.stderr)
        self.pictures = []


def deliver(samples: Samples, options: Mapping[str, Any]) -> None:
    """Print the JSON object or the texts."""
    if not options["json"]:
        print_texts(samples)
        return
    made = dataclasses.asdict(samples)
    made["schedule"] = made.pop("steps")
    if made["log_q"] is not None:  # JSON has no NaN
        made["log_q"] = [None if value != value else value for value in made["log_q"]]
    for name in ("speculation", "fed", "log_q", "diffusion"):  # `joined` leaves the last one out
        if made[name] is None:
            made.pop(name)
    request = {name: value for name, value in options.items() if name not in DELIVERY}
    print(json.dumps({**made, "seed": options["seed"], "request": request}))


def print_texts(samples: Samples) -> None:
    """The texts; on a terminal each below a line with its cost."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    generated = sum(len({p for step in steps for p in step}) for steps in samples.steps)
    speed = generated / max(samples.seconds, 1e-9)
    for k, text in enumerate(samples.texts):
        if not text:
            print(f"sample {k + 1} is empty: the model drew the end of the text first", file=sys.stderr)
        if not console.is_terminal:
            print(text, end="\n" if k + 1 == len(samples.texts) else "\n\n")
            continue
        number = f"sample {k + 1} of {len(samples.texts)} · " if len(samples.texts) > 1 else ""
        console.print(f"{number}NFE {samples.nfe[k]} · {speed:,.0f} tokens/s", style="dim")
        console.print(frames.visible(text), end="\n" if k + 1 == len(samples.texts) else "\n\n")
