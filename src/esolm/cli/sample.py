"""`esolm sample` and `esolm infill`: text from a trained model, for people and for machines."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..model import LanguageModel, collect, load, until
from ..runtime import distributed, files
from ..runtime.distributed import Ranks
from ..runtime.machine import keep_memory, pick_device, pick_weights
from ..sampling.events import Event, Samples, Speculation
from ..viz import frames, picture
from ..viz import terminal as show
from .parsing import parse, parser

SETTINGS = (
    "sampler", "alpha_0", "num_steps", "parallelism", "window", "given_order", "temperature", "top_p", "top_k", "seed",
    "batch_size",
)  # fmt: skip
FILES = ("out", "svg", "gif")
_PATIENCE = 2.0  # seconds without a progress bar


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return sample(parse(sample_parser(), argv))


def sample_parser() -> Any:
    """The options of `esolm sample`."""
    made = _with_model("sample MODEL", "Generate text from scratch or from a prompt.")
    option = made.add_argument
    option("--length", type=int, help="Tokens of a sample, the prompt included (default: the training length).")
    option("--prompt", type=str, help="The text that every sample begins with.")
    option("--prompt_file", type=str, help='One prompt a line, or .jsonl with "prompt"; num_samples for each.')
    option("--order", type=str, help="With sampler order or speculative: the positions in turn, as in 2,0,1.")
    _add_common(made)
    return made


def infill_parser() -> Any:
    """The options of `esolm infill`."""
    made = _with_model('infill MODEL "The ____ fox"', "Fill in the blanks of a text.")
    option = made.add_argument
    option("text", type=str, help="What is given, with blanks.")
    option("--blank", type=str, default="____", help="What marks a blank (default: %(default)s).")
    option("--tokens_per_blank", type=str, default="8", help="Tokens of every blank, or of each, as in 3,5.")
    option("--order", type=str, help="With sampler order or speculative: all positions in turn, as in 2,0,1.")
    _add_common(made)
    return made


def _with_model(usage: str, about: str) -> Any:
    made = parser(usage, about)
    made.add_argument("run", type=str, help="A run, or one checkpoint of it.")
    return made


def _add_common(made: Any) -> None:
    option = made.add_argument
    option("--num_samples", type=int, default=1, help="How many.")
    option("--sampler", type=str, help="ancestral, first_hitting, block, left_to_right, order or speculative.")
    option("--alpha_0", type=float, help="Share of the tokens that diffusion makes (default: as trained).")
    option("--num_steps", type=int, help="Diffusion steps T; without it, one token at a time.")
    option("--parallelism", type=int, help="With sampler block: tokens drawn together.")
    option("--window", type=int, help="With sampler speculative: tokens drawn ahead of a pass (default: adaptive).")
    option("--given_order", type=str, default="ascending", help="Order among given tokens: ascending or random.")
    option("--temperature", type=float, default=1.0, help="0 is greedy.")
    option("--top_p", type=float, default=1.0, help="Keep the likeliest tokens up to this mass.")
    option("--top_k", type=int, help="Keep so many of the likeliest tokens.")
    option("--seed", type=int, default=0, help="Decides every sample, each alone.")
    option("--batch_size", type=int, default=32, help="Samples computed together; their text does not depend on it.")
    option("--device", type=str, default="auto", help="auto, cpu, cuda, …")
    option("--precision", type=str, default="auto", help="float32, bf16, int8, or auto: bf16 where it is fast.")
    option("--weights", type=str, default="ema", help="ema, or model for the raw ones.")
    option("--which", type=str, default="best", help="The best or the last checkpoint of the run.")
    option("--json", action="store_true", help="Print one JSON object and nothing else.")
    option("--show", action="store_true", help="Animate the denoising in the terminal.")
    option("--svg", type=str, help="Draw the first sample's denoising as an animated SVG.")
    option("--gif", type=str, help="The same as a GIF (needs esolm[plot]).")
    option("--out", type=str, help="Write one JSON line for each sample here.")
    option("--force", action="store_true", help="Replace files that exist.")


def sample(options: Mapping[str, Any]) -> int:
    """`esolm sample`: texts from scratch, from one prompt, or from a file of prompts."""

    def start(lm: LanguageModel) -> Start:
        if options["prompt"] is not None and options["prompt_file"] is not None:
            raise ValueError("give either --prompt or --prompt_file")
        prompts = [{"prompt": options["prompt"] or ""}]
        if options["prompt_file"] is not None:
            prompts = read_prompts(Path(options["prompt_file"]))
        records = [dict(record) for record in prompts for _ in range(options["num_samples"])]
        texts = [record["prompt"] for record in records]
        return records, functools.partial(lm.stream, texts, len(records), options["length"])

    if (made := make(options, start, cut=True)) is None:
        return 0
    lm, samples, _, records = made
    for record, tokens, steps in zip(records, samples.tokens, samples.steps, strict=True):
        rest = tokens[len(tokens) - sum(map(len, steps)) :]
        record["prediction"] = lm.tokenizer.decode(until(rest, lm.tokenizer.eos_id))
    deliver(*made, options)
    return 0


def infill(options: Mapping[str, Any]) -> int:
    """`esolm infill`: a text with its blanks filled in."""
    sizes = numbers(options["tokens_per_blank"], "tokens_per_blank")
    number = options["num_samples"]

    def start(lm: LanguageModel) -> Start:
        per_blank = sizes[0] if len(sizes) == 1 else sizes
        stream = functools.partial(lm.infill_stream, options["text"], options["blank"], per_blank, number)
        return [{"given": options["text"]} for _ in range(number)], stream

    if (made := make(options, start, cut=False)) is not None:
        deliver(*made, options)
    return 0


Start = tuple[list[dict[str, Any]], Callable[..., Iterator[Event]]]
"""A record of what is asked of each sample, and the stream that makes them."""
Made = tuple[LanguageModel, Samples, frames.Film | None, list[dict[str, Any]]]


def make(options: Mapping[str, Any], start: Callable[[LanguageModel], Start], cut: bool) -> Made | None:
    """All samples; under torchrun the processes share them, and the first has the result."""
    with distributed.join(options["device"], distributed.PATIENCE) as ranks:
        ranks.everywhere(lambda: check_files(options))
        precision = ranks.once(lambda: pick_weights(options["precision"], own_device(options, ranks)))

        def own() -> Made:
            if ranks.world > 1 and options["show"]:
                raise ValueError("--show is for one process: leave it out, or start without torchrun")
            keep_memory()
            lm = load(options["run"], options["weights"], options["which"], str(own_device(options, ranks)), precision)
            records, stream = start(lm)
            if 0 < len(records) < ranks.world:
                raise ValueError(f"{len(records)} samples for {ranks.world} processes: start no more than samples")
            part = ranks.share(len(records))
            events = stream(**settings(options), part=part)
            return lm, *generate(lm, events, len(part), options, cut, ranks.rank > 0), records

        lm, samples, film, records = ranks.everywhere(own)
        samples = united(ranks.gathered(samples))
    return (lm, samples, film, records) if ranks.rank == 0 else None


def own_device(options: Mapping[str, Any], ranks: Ranks) -> torch.device:
    """The device of this process."""
    return pick_device(options["device"]) if ranks.world == 1 else ranks.device


def united(parts: list[Samples]) -> Samples:
    """The samples of several processes as one."""
    if len(parts) == 1:
        return parts[0]

    def chain(name: str, of: Sequence[Any]) -> list[Any]:
        return [value for part in of for value in getattr(part, name)]

    rows = {name: chain(name, parts) for name in ("texts", "tokens", "nfe", "steps")}
    tried = [part.speculation for part in parts if part.speculation is not None]
    names = [field.name for field in dataclasses.fields(Speculation)]
    passes, seconds = sum(part.passes for part in parts), max(part.seconds for part in parts)
    speculation = Speculation(**{name: chain(name, tried) for name in names}) if tried else None
    return Samples(**rows, passes=passes, seconds=seconds, speculation=speculation)


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a stream takes as they are, and the order as numbers."""
    order = None if options["order"] is None else tuple(numbers(options["order"], "order"))
    return {**{name: options[name] for name in SETTINGS}, "order": order}


def numbers(text: str, name: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be whole numbers and commas, as in 2,0,1") from None


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file: each line, or the field `prompt` of each line of a .jsonl, whose other fields are kept."""
    if not path.is_file():
        raise ValueError(f"no file {path}: give one prompt a line, or a .jsonl file whose lines have a prompt")
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if path.suffix != ".jsonl":
        records = [{"prompt": line.removesuffix("\r")} for line in lines]
    else:
        records = [_record(line, f"line {n} of {path}") for n, line in enumerate(lines, 1)]
    if lines == [""]:
        raise ValueError(f"{path} has no prompts")
    return records


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ValueError(f'{where} must be an object with a text as its "prompt"')
    return record


def check_files(options: Mapping[str, Any]) -> None:
    """Raise ValueError, before any work is done, for files that could not be written or must not be."""
    for name, path in ((name, Path(options[name])) for name in FILES if options[name] is not None):
        if path.exists() and not (options["force"] and path.is_file()):
            raise ValueError(f"{path} exists and is left as it is: choose another --{name}, or add --force")
        if not path.parent.is_dir():
            raise ValueError(f"no folder {path.parent} for --{name} {path}")
    if options["gif"] is not None:
        picture.need_gif()


def generate(
    lm: LanguageModel, events: Iterator[Event], number: int, options: Mapping[str, Any], cut: bool, quiet: bool = False
) -> tuple[Samples, frames.Film | None]:
    """Generate, showing what is asked for; the samples, and a film of the first if a picture or a show needs one."""
    meter, reels = frames.Meter(), list[list[frames.Film]]()
    events = meter.measure(events)
    if options["show"] or options["svg"] or options["gif"]:
        events = frames.record(events, reels)
    if options["show"]:
        console = Console(stderr=options["json"], highlight=False)
        events = show.animate(events, reels, lm.tokenizer, meter, console)
    elif not quiet:
        events = bar(events, number, meter)
    samples = collect(lm, events, cut)
    return dataclasses.replace(samples, seconds=meter.seconds), reels[0][0] if reels else None


def bar(events: Iterator[Event], number: int, meter: frames.Meter) -> Iterator[Event]:
    """Pass events on; on a terminal, after two seconds, show how far it is, how fast, and the time left."""
    console = Console(stderr=True)
    columns = TextColumn("sample {task.fields[at]} of {task.total}"), BarColumn(), TextColumn("{task.description}")
    progress = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=console, transient=True)
    task = progress.add_task("", total=number, at=1)
    start, shown = time.monotonic(), False
    try:
        for event in events:
            done = event.first + len(event.tokens) * min((event.step + 1) / event.steps, 1)
            at = min(event.first + len(event.tokens), number)
            progress.update(task, completed=done, description=f"{meter.speed:,.0f} tokens/s", at=at)
            if not shown and console.is_terminal and time.monotonic() - start > _PATIENCE:
                progress.start()
                shown = True
            yield event
    finally:
        if shown:
            progress.stop()


def deliver(
    lm: LanguageModel,
    samples: Samples,
    film: frames.Film | None,
    records: list[dict[str, Any]],
    options: Mapping[str, Any],
) -> None:
    """Write the files, and print the JSON object or, unless they were shown or written, the texts."""
    if options["out"] is not None:
        for record, *made in zip(records, samples.texts, samples.tokens, samples.nfe, strict=True):
            record.update(zip(("text", "tokens", "nfe"), made, strict=True))
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write(Path(options["out"]), lines.encode())
    if options["svg"] is not None and film is not None:
        write(Path(options["svg"]), picture.svg(film, lm.tokenizer).encode())
    if options["gif"] is not None and film is not None:
        write(Path(options["gif"]), picture.gif(film, lm.tokenizer))
    if options["json"]:
        print(json.dumps(as_json(samples, options)))
    elif not options["show"] and options["out"] is None:
        print_texts(samples)


def write(path: Path, content: bytes) -> None:
    """The whole file or nothing, and a note about it."""
    files.write(path, content)
    print(f"wrote {path}", file=sys.stderr)


def as_json(samples: Samples, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that was made, what it cost, and what was asked for."""
    delivery = (*FILES, "json", "show", "force")
    made = dataclasses.asdict(samples)
    made["schedule"] = made.pop("steps")
    if samples.speculation is None:
        made.pop("speculation")
    request = {name: value for name, value in options.items() if name not in delivery}
    return {**made, "seed": options["seed"], "request": request}


def print_texts(samples: Samples) -> None:
    """The texts; on a terminal each under a line about it."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    generated = sum(len(step) for steps in samples.steps for step in steps)
    speed = generated / max(samples.seconds, 1e-9)
    for k, text in enumerate(samples.texts):
        if not console.is_terminal:
            print(text, end="\n" if k + 1 == len(samples.texts) else "\n\n")
            continue
        number = f"sample {k + 1} of {len(samples.texts)} · " if len(samples.texts) > 1 else ""
        console.print(f"{number}NFE {samples.nfe[k]} · {speed:,.0f} tokens/s", style="dim")
        console.print(frames.visible(text), end="\n" if k + 1 == len(samples.texts) else "\n\n")
