"""The command line: one file per command, each with `run(argv) -> int`. May import every other package.

A command's module is imported when the command runs, and PyTorch after its options are parsed, so that `--help` answers
at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "Train a small Eso-LM on a small corpus and show what it learned.",
    "sample": "Generate text: esolm sample MODEL [--prompt TEXT --alpha_0 0.25 --num_steps 64 --show].",
    "infill": 'Fill in the blanks of a text: esolm infill MODEL "The ____ fox" [--tokens_per_blank 8].',
    "score": "Likelihood of texts: esolm score MODEL CORPUS|FILE|FOLDER [--estimator iw --num_orders 100].",
    "serve": "Serve a model over HTTP, with a page to try it on: esolm serve MODEL [--port 8000 --api_key KEY].",
    "prepare": "Turn a corpus into token shards: esolm prepare CORPUS FOLDER [--tokenizer bpe:4096 --length 256].",
    "train": "Train a model or resume a run: esolm train PRESET|FILE.yaml [--data FOLDER --optim.lr 1e-3].",
    "adapt": "Adapt a left-to-right model to any order: esolm adapt MODEL RUN --data FOLDER.",
    "tune": "Tune a model by rewards or preferences: esolm tune grpo|dpo MODEL RUN [--reward NAME --data FILE.jsonl].",
    "plan": "Memory, speed and traffic of a run on many GPUs: esolm plan PRESET [--gpus 64 --gpu_memory 80GB].",
    "info": "Describe a run, a checkpoint, a model or a data folder: esolm info FOLDER [--json].",
    "export": "Write a model folder with a model card: esolm export RUN OUT.",
    "convert": "Convert a published checkpoint: esolm convert FILE.ckpt|FOLDER|HUB-NAME OUT [--tokenizer gpt2:PATH].",
    "consolidate": "Join a checkpoint that several processes saved: esolm consolidate RUN|CHECKPOINT.",
    "judge": "Generative perplexity and entropy of samples: esolm judge SAMPLES.jsonl JUDGE [--json].",
    "words": "Share of words in samples that occur in real texts: esolm words SAMPLES.jsonl CORPUS [--json].",
    "mauve": "MAUVE between samples and real texts: esolm mauve SAMPLES.jsonl REFERENCES EMBEDDER [--json].",
    "overlap": "ROUGE of predictions: esolm overlap FILE.jsonl [--bertscore FOLDER --json].",
    "molecules": "Validity, uniqueness and novelty of SMILES samples: esolm molecules SAMPLES.jsonl [--train FILE].",
    "variance": "Spread of single estimates of a bound: esolm variance MODEL FILE [--trials 100].",
    "bench": "Measure speed on this machine: esolm bench NAME.",
}


def usage() -> str:
    """All commands, a line each."""
    lines = [f"  {word:11} {summary}" for word, summary in COMMANDS.items()]
    last = (
        "esolm COMMAND --help lists the options of a command. --import MODULE, in any command, imports a module first."
    )
    return "usage: esolm COMMAND …\n\n" + "\n".join(lines) + f"\n\n{last}"


def import_modules(words: Sequence[str]) -> list[str]:
    """Import the MODULE of each `--import MODULE`, also from the working directory, and return the other words."""
    rest, waiting = list[str](), iter(words)
    for word in waiting:
        option, equals, module = word.partition("=")
        if option != "--import":
            rest.append(word)
            continue
        module = module if equals else next(waiting, "")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except (ImportError, ValueError) as error:
            raise ValueError(f"--import {module}: {error or 'give the name of a module'}") from error
    return rest


def _unknown(word: str) -> str:
    from .parsing import nearest

    return f"no command {word!r}{nearest(word, COMMANDS) or ':'} The commands are {', '.join(COMMANDS)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. User errors print one line and exit with 2; a traceback is a bug."""
    # Threads that spin while they wait are ten times slower beside another busy process, and those that sleep at once
    # are woken for every small operation: spin for a fraction of a millisecond. Read when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "6000")
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from .. import __version__

        print(__version__)
        return 0
    try:
        words = import_modules(words)
        if not words or words[0] not in COMMANDS:
            raise ValueError(_unknown(words[0] if words else ""))
        return importlib.import_module(f"esolm.cli.{words[0]}").run(words[1:]) or 0
    except BrokenPipeError:  # `esolm info … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
