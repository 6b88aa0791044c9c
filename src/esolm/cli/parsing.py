"""The one way to build and to run the parser of a command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any


def parser(usage: str, about: str) -> Any:
    """A parser for the words after `esolm COMMAND`, where usage is `COMMAND ARGUMENT …`."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    prog, usage = f"esolm {usage.split()[0]}", f"esolm {usage} [--option VALUE ...]"
    return ArgumentParser(prog=prog, usage=usage, description=about, exit_on_error=False)


def parse(parser: Any, argv: Sequence[str], defaults: bool = True) -> dict[str, Any]:
    """The options as a dict, or only the given ones without defaults; raises ValueError for invalid ones."""
    try:
        return parser.parse_args(list(argv), defaults=defaults).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(f"{' '.join(str(error).split())}. See {parser.prog} --help") from error


def report(function: Callable[..., dict[str, Any]], usage: str, about: str, argv: Sequence[str]) -> int:
    """Print what a function of a file returns, as lines or as JSON."""
    made = parser(usage, about)
    made.add_function_arguments(function, as_positional=True)
    made.add_argument("--json", action="store_true", help="Print JSON and nothing else.")
    options = parse(made, argv)
    as_json = options.pop("json")
    found = function(**options)
    lines = (f"{key:22} {value:.5g}" for key, value in found.items() if value is not None)
    print(json.dumps(found, allow_nan=False) if as_json else "\n".join(lines))
    return 0


def to_folder(function: Callable[..., Any], usage: str, about: str, argv: Sequence[str]) -> dict[str, Any]:
    """The options of a function that writes a model folder."""
    made = parser(usage, about)
    made.add_function_arguments(function, as_positional=True, skip={"force"})
    made.add_argument("--force", action="store_true", help="Replace OUT if it is a model folder of esolm.")
    return parse(made, argv)
