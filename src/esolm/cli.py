"""The command line: one dict from word to function. Each function takes the words after its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def prepare(argv: Sequence[str]) -> int:
    """Turn a corpus into token shards: esolm prepare CORPUS FOLDER --tokenizer bpe:4096 --length 256."""
    from . import data

    about = "Turn a corpus into memory-mapped token shards with a manifest; the same command again resumes."
    parser = _parser("prepare CORPUS FOLDER", about)
    parser.add_function_arguments(data.prepare, as_positional=True)
    options = _parse(parser, argv)
    manifest = data.prepare(**options)
    if manifest is None:
        print(f"part {options['part']} is encoded; when all are, the same command without --part joins them")
        return 0
    for name, split in manifest.splits.items():
        print(f"{name}: {split.sequences:,} sequences of {manifest.length}, {split.tokens:,} tokens")
    print(f"{manifest.folder}: {manifest.vocab_size:,} ids, fingerprint {manifest.fingerprint[:12]}")
    return 0


def train(argv: Sequence[str]) -> int:
    """Train a model or resume a run: esolm train PRESET|FILE.yaml [--optim.lr 1e-3 …]."""
    from .config import read_config, show_config

    config, printing = read_config(argv)
    if printing:
        return show_config(config)
    from .launch import launch

    return launch(config)


def plan(argv: Sequence[str]) -> int:
    """Memory, speed and traffic of a run on many GPUs: esolm plan PRESET --gpus 64 --gpu_memory 80GB."""
    from .plan import run

    return run(argv)


def info(argv: Sequence[str]) -> int:
    """Say what a run, a checkpoint or a data folder is: esolm info FOLDER [--json]."""
    from .info import describe
    from .nested import flat

    parser = _parser("info FOLDER", str(info.__doc__))
    parser.add_argument("folder", type=str, help="a run, a checkpoint or prepared data")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = _parse(parser, argv)
    about = describe(Path(options["folder"]))
    if options["json"]:
        print(json.dumps(about, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value", show_header=False)
    for key, value in flat(about).items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
    Console().print(table)
    return 0


def consolidate(argv: Sequence[str]) -> int:
    """Join what several processes saved: esolm consolidate RUN|CHECKPOINT."""
    from . import checkpoint

    parser = _parser("consolidate RUN|CHECKPOINT", str(consolidate.__doc__))
    parser.add_argument("folder", type=str, help="a checkpoint, or a run for all its checkpoints")
    folder = Path(_parse(parser, argv)["folder"])
    root = folder / "checkpoints"
    found = [root / checkpoint.name_of(step) for step in checkpoint.list_steps(root)] or [folder]
    for each in found:
        print(checkpoint.consolidate(each))
    return 0


def demo(argv: Sequence[str]) -> int:
    """Prepare a small corpus, train a small Eso-LM on it and show what it learned."""
    from .demo import main

    return main(argv)


def sample(argv: Sequence[str]) -> int:
    """Generate text: esolm sample RUN [--prompt TEXT --alpha_0 0.25 --num_steps 64 --show …]."""
    from . import generate

    return generate.sample(_parse(generate.sample_parser(), argv))


def infill(argv: Sequence[str]) -> int:
    """Fill in the blanks of a text: esolm infill RUN "The ____ fox" [--tokens_per_blank 8 …]."""
    from . import generate

    return generate.infill(_parse(generate.infill_parser(), argv))


def score(argv: Sequence[str]) -> int:
    """Likelihood of texts: esolm score RUN CORPUS|FILE|FOLDER … [--estimator iw --num_orders 100 --json]."""
    from . import score as scoring

    return scoring.score(**_parse(scoring.parser("score", scoring.Scoring), argv))


def variance(argv: Sequence[str]) -> int:
    """Spread of single estimates of a bound: esolm variance RUN FILE [--trials 100]."""
    from .score import parser
    from .variance import Trials
    from .variance import variance as function

    return function(**_parse(parser("variance", Trials), argv))


def overlap(argv: Sequence[str]) -> int:
    """Compare predictions with references: esolm overlap FILE.jsonl [--bertscore FOLDER --json]."""
    from .overlap import overlap as function

    about = "ROUGE, and BERTScore by a local model, of the predictions that `esolm sample --out` wrote."
    return _report(function, "overlap FILE.jsonl", about, argv)


def judge(argv: Sequence[str]) -> int:
    """Generative perplexity and entropy of samples: esolm judge SAMPLES.jsonl FOLDER [--json]."""
    from .judge import judge as function

    about = "Quality of the samples that `esolm sample --out` wrote, by an outside causal language model."
    return _report(function, "judge SAMPLES.jsonl JUDGE", about, argv)


def molecules(argv: Sequence[str]) -> int:
    """Validity, uniqueness and novelty of samples of SMILES: esolm molecules SAMPLES.jsonl [--train FILE --json]."""
    from .molecules import molecules as function

    about = "How many of the samples that `esolm sample --out` wrote are molecules, differ, and are new."
    return _report(function, "molecules SAMPLES.jsonl", about, argv)


def mauve(argv: Sequence[str]) -> int:
    """How near samples are to real texts: esolm mauve SAMPLES.jsonl FILE.jsonl|DATA EMBEDDER [--json]."""
    from .mauve import mauve as function

    about = "MAUVE between the samples that `esolm sample --out` wrote and real texts, by a local embedder."
    return _report(function, "mauve SAMPLES.jsonl REFERENCES EMBEDDER", about, argv)


def _report(function: Callable[..., dict[str, Any]], usage: str, about: str, argv: Sequence[str]) -> int:
    """Print what a function of a file finds, as lines or as JSON."""
    parser = _parser(usage, about)
    parser.add_function_arguments(function, as_positional=True)
    parser.add_argument("--json", action="store_true", help="Print JSON and nothing else.")
    options = _parse(parser, argv)
    printing = options.pop("json")
    found = function(**options)
    lines = (f"{key:22} {value:.5g}" for key, value in found.items() if value is not None)
    print(json.dumps(found, allow_nan=False) if printing else "\n".join(lines))
    return 0


def convert(argv: Sequence[str]) -> int:
    """Bring a published checkpoint: esolm convert FILE.ckpt|FOLDER|HUB-NAME OUT [--tokenizer gpt2:PATH …]."""
    from . import convert as converting

    about = "Turn a published checkpoint into a folder of esolm, without running anything from it."
    options = _to_folder(converting.convert, "convert FILE.ckpt|FOLDER|HUB-NAME OUT", about, argv)
    print(converting.report(converting.convert(**options), options["out"]))
    return 0


def export(argv: Sequence[str]) -> int:
    """Write a model for others, with a card: esolm export RUN OUT."""
    from . import export as exporting

    about = "Write a model as a folder that transformers and esolm.load open, with a model card."
    print(f"wrote {exporting.export(**_to_folder(exporting.export, 'export RUN OUT', about, argv))}")
    return 0


def _to_folder(function: Callable[..., Any], usage: str, about: str, argv: Sequence[str]) -> dict[str, Any]:
    """The options of a function that writes a model."""
    parser = _parser(usage, about)
    parser.add_function_arguments(function, as_positional=True, skip={"force"})
    parser.add_argument("--force", action="store_true", help="Replace OUT if it is a model of esolm.")
    return _parse(parser, argv)


def bench(argv: Sequence[str]) -> int:
    """Measure speed: esolm bench train."""
    from .bench import main

    return main(argv)


def reproduce(argv: Sequence[str]) -> int:
    """The paper's findings at laptop scale, in one document: esolm reproduce [NAME …] [--smoke true]."""
    from .reproduce import reproduce as function

    parser = _parser("reproduce [NAME ...]", str(function.__doc__).split("\n", 1)[0])
    parser.add_argument("names", type=str, nargs="*", help="Experiments to run (default: all).")
    parser.add_function_arguments(function, skip={"names", "command"})
    return function(**_parse(parser, argv), command=main)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "prepare": prepare,
    "train": train,
    "plan": plan,
    "info": info,
    "sample": sample,
    "infill": infill,
    "score": score,
    "variance": variance,
    "overlap": overlap,
    "judge": judge,
    "molecules": molecules,
    "mauve": mauve,
    "convert": convert,
    "export": export,
    "consolidate": consolidate,
    "demo": demo,
    "bench": bench,
    "reproduce": reproduce,
}


def _parser(usage: str, about: str) -> Any:
    """A parser of the words after the first one of usage."""
    from jsonargparse import ArgumentParser

    prog, usage = f"esolm {usage.split()[0]}", f"esolm {usage} [--option VALUE ...]"
    return ArgumentParser(prog=prog, usage=usage, description=about, exit_on_error=False)


def _parse(parser: Any, argv: Sequence[str]) -> dict[str, Any]:
    """The options as a dict; what argparse refuses is a ValueError."""
    import argparse

    try:
        return parser.parse_args(list(argv)).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(f"{' '.join(str(error).split())}. See {parser.prog} --help") from error


def usage() -> str:
    """The words and what they do."""
    lines = [f"  {word:11} {function.__doc__}" for word, function in COMMANDS.items()]
    return "usage: esolm COMMAND …\n\n" + "\n".join(lines) + "\n\nesolm COMMAND --help says more."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what the user can mend is one line and exit code 2, a traceback is a bug of ours."""
    # Threads that spin while they wait are ten times slower beside another busy process, and those that sleep at once
    # are woken for every small operation: spin for a fraction of a millisecond. Read when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "6000")
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from . import __version__

        print(__version__)
        return 0
    try:
        if words[0] not in COMMANDS:
            raise ValueError(f"no command {words[0]!r}: choose {', '.join(COMMANDS)}")
        return COMMANDS[words[0]](words[1:]) or 0
    except BrokenPipeError:  # `esolm info … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
