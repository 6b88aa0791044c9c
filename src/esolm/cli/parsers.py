"""The parsers of all commands: for shell completion, the reference and the tests. Imports nothing heavy."""

from __future__ import annotations

import importlib
from typing import Any

from . import COMMANDS


def kinds(command: str) -> tuple[str, ...]:
    """The words that may follow a command whose options depend on them, such as `esolm tune grpo`; otherwise none."""
    if command == "bench":
        from ..bench import NAMES

        return tuple(NAMES)
    if command == "tune":
        from .tune import KINDS

        return tuple(KINDS)
    return ()


def parser_of(command: str, kind: str | None = None) -> Any:
    """The parser of a command, with its options in groups.

    The options of a run include those of the system esolm; `system_options` has those of the others.
    """
    from .layout import arrange

    module = importlib.import_module(f"esolm.cli.{command}")
    made = module.make_parser() if kind is None else module.make_parser(kind)
    arrange(made)
    return made


def all_parsers() -> dict[str, Any]:
    """The parsers of all commands, by their words, such as `sample` and `tune grpo`."""
    words = [(command, kind) for command in COMMANDS for kind in kinds(command) or (None,)]
    return {" ".join(filter(None, each)): parser_of(*each) for each in words}


def system_options() -> dict[str, Any]:
    """A parser with the options of each system of the package, by its name."""
    from ..runtime.parsers import new_parser
    from ..runtime.signatures import modules
    from ..training.config import add_system

    made = {name: new_parser() for name in modules("esolm.systems")}
    for name, each in made.items():
        add_system(each, name)
    return made
