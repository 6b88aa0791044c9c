"""`esolm adapt`: adapt a left-to-right model to any order, as `esolm train PRESET --init MODEL --run RUN` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import train
from .parsing import parse


def make_parser(preset: str = "adapt") -> Any:
    """The parser, for help: the options are those of `esolm train`."""
    usage = "adapt MODEL RUN --data FOLDER"
    made, _, _, defaults = train.run_parser("adapt", preset, add=_add_preset, usage=usage)
    made.set_defaults(defaults)
    return made


def _add_preset(made: Any) -> None:
    made.add_argument("--preset", type=str, default="adapt", help="A preset of `esolm train`, or a YAML file.")


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="adapt")
    found, argv = first.parse_known_args(list(argv))
    if {"-h", "--help"} & set(argv):
        parse(make_parser(found.preset), ["--help"])
    if len(argv) < 2 or any(word.startswith("-") for word in argv[:2]):
        raise ValueError("give a model and a run folder first: esolm adapt MODEL RUN --data FOLDER")
    model, folder, *options = argv
    if twice := {"--run", "--init"} & {option.partition("=")[0] for option in options}:
        raise ValueError(f"esolm adapt takes the model and the run folder as its arguments: leave out {min(twice)}")
    check_model(Path(model))
    return train.run([found.preset, "--init", model, "--run", folder, *options])


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
