"""Builds and runs the parser of every command, and turns parser errors into one sentence."""

from __future__ import annotations

import argparse
import ast
import collections.abc
import difflib
import importlib.util
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_LIGHT = ("typing", "collections.abc", "pathlib")
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def parser(usage: str, about: str) -> Any:
    """A parser for the words after `esolm COMMAND`, where usage is `COMMAND ARGUMENT …`."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    prog, usage = f"esolm {usage.split()[0]}", f"esolm {usage} [--option VALUE ...]"
    last = "--import MODULE, anywhere: import a module first, such as that of your own system."
    return ArgumentParser(prog=prog, usage=usage, description=about, epilog=last, exit_on_error=False)


def parse(parser: Any, argv: Sequence[str], defaults: bool = True) -> dict[str, Any]:
    """The options as a dict, or only the given ones without defaults.

    Raises ValueError, with the option and what it allows, for anything else.
    """
    actions = {option: action for action in parser._actions for option in action.option_strings}
    words = _checked(argv, actions, parser.prog)
    try:
        return parser.parse_args(words, defaults=defaults).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(f"{_explained(str(error), parser._actions)}. See {parser.prog} --help") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known words that look most like this one, or nothing."""
    name, dashes = word.lstrip("-").replace("-", "_"), "--" if word.startswith("--") else ""
    ratio = {k: difflib.SequenceMatcher(None, name, k.lstrip("-")).ratio() for k in known}
    best = max(ratio.values())
    near = [dashes + k.lstrip("-") for k, value in ratio.items() if value >= max(0.6, best - 0.1)]
    return f": did you mean {' or '.join(near)}?" if near else ""


def _checked(argv: Sequence[str], actions: dict[str, Any], prog: str) -> list[str]:
    """The words, with `2,0,1` as a list where an option takes one; raises ValueError for an unknown option."""
    words, listing = list[str](), False
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--") and len(name) > 2:
            if name not in actions:
                known = [option for option in actions if option.startswith("--") and not option.endswith("+")]
                raise ValueError(f"unknown option {name}{nearest(name, known) or '.'} See {prog} --help")
            listing = _is_list(getattr(actions[name], "_typehint", None))
            words.append(f"{name}={_as_list(value)}" if listing and equals else word)
            listing = listing and not equals
        else:
            words.append(_as_list(word) if listing else word)
            listing = False
    return words


def _is_list(hint: Any) -> bool:
    found = (hint, *typing.get_args(hint))
    return any(typing.get_origin(each) in (list, collections.abc.Sequence) for each in found)


def _as_list(value: str) -> str:
    return value if value.startswith("[") or value in ("", "null") else f"[{value}]"


def _explained(message: str, actions: Sequence[Any]) -> str:
    """An error of argparse or jsonargparse as one sentence."""
    message = " ".join(message.split())
    if found := re.match(r'Parser key "([^"]+)":.*(?:Given value|Got value): (.*)$', message):
        name, value = found.groups()
        action = next((each for each in actions if each.dest == name), None)
        allowed = "" if action is None else f"; it must be {_allowed(action._typehint)}"
        return f"{'--' if action is None or action.option_strings else ''}{name} is {value}{allowed}"
    if found := re.match(r"argument (\S+): expected", message):
        return f"{found[1].split('/')[0]} needs a value"
    if found := re.match(r"argument (\S+): ignored explicit argument (.*)$", message):
        return f"{found[1]} is a flag and takes no value, but {found[2]} was given"
    if found := re.match(r"the following arguments are required: (.*)$", message):
        return f"{found[1]} is missing"
    if found := re.match(r"[uU]nrecognized arguments: (.*)$", message):
        return f"unexpected argument {found[1]!r}"
    return message


def _allowed(hint: Any) -> str:
    """The values of a type, in words."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, arguments))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_allowed, arguments))
    if _is_list(hint):
        return "whole numbers, as in 2,0,1" if arguments == (int,) else "a list, as in [A,B]"
    return _NAMES.get(hint, str(hint))


def signature(module: str, name: str) -> Callable[..., Any]:
    """A function that has only the signature and docstring of `module.name`, read from the source.

    The module is not imported, so `--help` need not wait for PyTorch.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = list[ast.stmt]()
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module in _LIGHT:
            body.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            node.body, node.decorator_list, node.returns = node.body[:1], [], None
            body.append(node)
    scope: dict[str, Any] = {"__name__": __name__}  # jsonargparse imports the module that a function names
    exec(compile(ast.Module(body, []), spec.origin, "exec"), scope)
    return scope[name]


def report(module: str, name: str, usage: str, about: str, argv: Sequence[str]) -> int:
    """Call a function that returns numbers, and print them as lines or as JSON."""
    made = parser(usage, about)
    made.add_function_arguments(signature(module, name), as_positional=True)
    made.add_argument("--json", action="store_true", help="Print JSON and nothing else.")
    options = parse(made, argv)
    as_json = options.pop("json")
    found = getattr(importlib.import_module(module), name)(**options)
    lines = (
        f"{key:22} " + (", ".join(value) if isinstance(value, list) else f"{value:.5g}")
        for key, value in found.items()
        if value is not None
    )
    print(json.dumps(found, allow_nan=False) if as_json else "\n".join(lines))
    return 0


def to_folder(module: str, name: str, usage: str, about: str, argv: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Call a function that writes a model folder; what it returns, and its options."""
    made = parser(usage, about)
    made.add_function_arguments(signature(module, name), as_positional=True, skip={"force"})
    made.add_argument("--force", action="store_true", help="Replace OUT if it is a model folder of esolm.")
    options = parse(made, argv)
    return getattr(importlib.import_module(module), name)(**options), options


def announce(text: str, quiet: bool = False) -> None:
    """Print a line to standard error at once, if that is a terminal."""
    if not quiet and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
