"""`esolm adapt`: adapt a left-to-right model to any order, as `esolm train PRESET --init MODEL --run RUN` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import train
from .generation_options import MODEL
from .parsing import parse


def make_parser(preset: str = "adapt") -> Any:
    """The parser, for help: the options are those of `esolm train`."""
    usage = "adapt MODEL RUN --data FOLDER"
    made, _, _, defaults = train.run_parser("adapt", preset, add=_add_preset, usage=usage)
    made.set_defaults(defaults)
    add_arguments(made)
    return made


def add_arguments(made: Any) -> None:
    """Show MODEL and RUN in the help of a command that starts from a model, and not the options that they stand for."""
    made.add_argument("model", **MODEL)
    made.add_argument("folder", metavar="RUN", help="The run folder; a run that it holds is resumed.")
    for action in made._actions:
        if action.dest in ("init", "run"):
            action.help = argparse.SUPPRESS


def arguments(command: str, words: Sequence[str], more: str) -> tuple[str, str, list[str]]:
    """MODEL, RUN and the other words of a command that starts from a model; more: the option that it needs."""
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise ValueError(f"give a model and a run folder first: esolm {command} MODEL RUN {more}")
    model, folder, *options = words
    if twice := {"--run", "--init"} & {option.partition("=")[0] for option in options}:
        raise ValueError(f"esolm {command} takes the model and the run folder as its arguments: leave out {min(twice)}")
    check_model(Path(model))
    return model, folder, options


def _add_preset(made: Any) -> None:
    made.add_argument("--preset", type=str, default="adapt", help="A preset of `esolm train`, or a YAML file.")


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="adapt")
    found, argv = first.parse_known_args(list(argv))
    if {"-h", "--help"} & set(argv):
        parse(make_parser(found.preset), ["--help"])
    model, folder, options = arguments("adapt", argv, "--data FOLDER")
    return train.run([found.preset, "--init", model, "--run", folder, *options], "adapt")


def check_model(path: Path) -> None:
    """Raise ValueError, with the command to convert it, for a checkpoint that is not a model of esolm."""
    from ..storage.folder import is_model, not_a_model, packaged
    from ..training.runs import is_run

    ours = is_model(path) or is_run(path) or (path / "state.json").is_file() or str(path) in packaged()
    if ours or not path.exists():
        return
    if (path / "config.json").is_file():
        raise not_a_model(path)
    raise ValueError(f"{path} is not a model of esolm: convert it with `esolm convert {path} OUT`, and give OUT")
