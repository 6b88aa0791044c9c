"""The command line: one file per command, each with `run(argv) -> int`. May import every other package.

A command's module is imported when the command runs, and PyTorch after its options are parsed, so that `--help` answers
at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

GROUPS = {
    "try a model": {
        "demo": "Show the bundled model, then train a small one on this machine in two minutes.",
        "sample": "Generate text, from scratch or from a prompt.",
        "infill": "Fill in the blanks of a text.",
        "serve": "Serve a model over HTTP, with a page to try it on.",
    },
    "train": {
        "prepare": "Turn a corpus into token shards.",
        "train": "Train a model or resume a run.",
        "plan": "Estimate memory, speed and traffic of a run on many GPUs.",
    },
    "adapt and tune": {
        "convert": "Convert a published checkpoint into a model folder.",
        "adapt": "Adapt a left-to-right model to any order.",
        "tune": "Tune a model by rewards (grpo) or preferences (dpo).",
    },
    "measure": {
        "score": "Likelihood of texts, with its error.",
        "variance": "Spread of single estimates of a bound.",
        "judge": "Generative perplexity and entropy of samples, by an outside model.",
        "mauve": "MAUVE between samples and real texts.",
        "words": "Share of the words in samples that occur in real texts.",
        "overlap": "ROUGE and BERTScore of predictions.",
        "molecules": "Validity, uniqueness and novelty of samples of SMILES.",
        "bench": "Measure speed on this machine.",
    },
    "runs and models": {
        "info": "Describe a run, a checkpoint, a model or a data folder.",
        "export": "Write a run as a model folder with a model card.",
        "consolidate": "Join a checkpoint that several processes saved.",
    },
    "this installation": {
        "doctor": "Report what this machine has, and what to install for what is missing.",
        "completion": "Print a script that completes commands and options in bash, zsh or fish.",
    },
}
"""The commands by what they are for."""
COMMANDS = {word: about for group in GROUPS.values() for word, about in group.items()}


def usage() -> str:
    """All commands in groups, a line each."""
    parts = ["usage: esolm COMMAND …"]
    for title, commands in GROUPS.items():
        parts.append("\n".join([f"{title}:", *(f"  {word:12} {about}" for word, about in commands.items())]))
    parts.append(
        "examples:\n"
        "  esolm sample stories --show --sampler confidence --window 16 --top_p 0.9\n"
        '  esolm infill stories "Tom ____ the dog." --tokens_per_blank 1-4\n'
        "  esolm doctor"
    )
    parts.append(
        "esolm COMMAND --help lists the options of a command, with examples. esolm --version prints the version.\n"
        "--import MODULE, in any command, imports a module first."
    )
    return "\n\n".join(parts)


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
