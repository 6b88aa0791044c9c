"""Builds and runs the parser of every command, and turns parser errors into one sentence."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.parsers import is_list, new_parser, wrong_type
from ..runtime.signatures import signature
from .examples import EXAMPLES

_TRUTH = {"true": True, "false": False}
JSON = "Print JSON and nothing else."


def parser(usage: str, about: str, examples: str | None = None) -> Any:
    """A parser for the words after `esolm COMMAND`, where usage is `COMMAND ARGUMENT …`.

    examples: the key of the examples to show; by default the command.
    """
    from jsonargparse import set_parsing_settings

    from .layout import formatter

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    word = usage.split()[0]
    lines = "".join(f"  {line}\n" for line in EXAMPLES.get(examples or word, ()))
    last = "--import MODULE, anywhere: import a module first, such as that of your own system."
    return new_parser(
        prog=f"esolm {word}",
        usage=f"esolm {usage} [--option VALUE ...]",
        description=about,
        epilog=f"examples:\n{lines}\n{last}" if lines else last,
        formatter_class=formatter(),
    )


def parse(parser: Any, argv: Sequence[str], defaults: bool = True) -> dict[str, Any]:
    """The options as a dict, or only the given ones without defaults.

    Raises ValueError, with the option and what it allows, for anything else.
    """
    words = _checked(argv, parser)
    if {"-h", "--help"} & set(words):
        from .layout import arrange

        arrange(parser)
    try:
        return parser.parse_args(words, defaults=defaults).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(f"{_explained(str(error), parser._actions)}. See {parser.prog} --help") from error


ELSEWHERE = {
    "max_tokens": "length", "max_new_tokens": "length", "max_length": "length", "temp": "temperature", "output": "out",
    "model_name": "name", "n": "num_samples", "output_dir": "run", "max_steps": "steps", "learning_rate": "optim.lr",
    "batch_size": "batch.size",
}  # fmt: skip
"""What options of other programs are called here."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known words that mean the same or look most like this one, or nothing."""
    name, dashes = word.lstrip("-").replace("-", "_"), "--" if word.startswith("--") else ""
    known = [*known]
    if (same := ELSEWHERE.get(name)) in {k.lstrip("-") for k in known}:
        return f": did you mean {dashes}{same}?"
    ratio = {k: difflib.SequenceMatcher(None, name, k.lstrip("-")).ratio() for k in known}
    best = max(ratio.values())
    near = [dashes + k.lstrip("-") for k, value in ratio.items() if value >= max(0.6, best - 0.1)]
    return f": did you mean {' or '.join(near)}?" if near else ""


def is_flag(action: Any) -> bool:
    """Whether an option is true or false, and so may be given without a value."""
    return isinstance(action, argparse._StoreTrueAction) or getattr(action, "_typehint", None) is bool


def positive(word: str) -> str:
    """The option that `--no-option` or `--no_option` switches off; otherwise the word itself."""
    return re.sub(r"^--no[-_]", "--", word)


def taken(words: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Whether the words have this flag, as `--flag`, `--flag true` or `--flag=true`, and the other words."""
    rest, value = list[str](), False
    for word, given in _flags(words, {flag}):
        if given is None:
            rest.append(word)
        else:
            value = given == "true"
    return value, rest


def _flags(words: Sequence[str], flags: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Each word, and with each flag its value, true unless the word says or the next word is something else."""
    flags, i = set(flags), 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        i += 1
        known = name in flags
        if not (known or equals) and (off := positive(name)) in flags:
            name, equals, value, known = off, "=", "false", True
        if not known:
            yield words[i - 1], None
        elif equals:
            yield name, value.lower()
        elif i < len(words) and words[i].lower() in _TRUTH:
            yield name, words[i].lower()
            i += 1
        else:
            yield name, "true"


def _checked(argv: Sequence[str], parser: Any) -> list[str]:
    """The words as jsonargparse takes them: flags with a value, `2,0,1` as a list where an option takes one.

    Raises ValueError for an unknown option and for a flag that is neither true nor false.
    """
    actions = {option: action for action in parser._actions for option in action.option_strings}
    flags = {option for option, action in actions.items() if is_flag(action)}
    words, listing = list[str](), False
    for word, given in _flags(argv, flags):
        if given is not None:
            if given not in _TRUTH:
                raise ValueError(
                    f"{word} is {given}; it is a flag: give {word}, or {word} false. See {parser.prog} --help"
                )
            stored = isinstance(actions[word], argparse._StoreTrueAction)
            words = [other for other in words if other != word] if stored else words
            words += [] if stored and given == "false" else [word if stored else f"{word}={given}"]
            listing = False
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--") and len(name) > 2:
            if name not in actions:
                known = [option for option in actions if option.startswith("--") and not option.endswith("+")]
                raise ValueError(f"unknown option {name}{nearest(name, known) or '.'} See {parser.prog} --help")
            listing = is_list(getattr(actions[name], "_typehint", None))
            words.append(f"{name}={_as_list(value)}" if listing and equals else word)
            listing = listing and not equals
        else:
            words.append(_as_list(word) if listing else word)
            listing = False
    return words


def _as_list(value: str) -> str:
    return value if value.startswith("[") or value in ("", "null") else f"[{value}]"


def _explained(message: str, actions: Sequence[Any]) -> str:
    """An error of argparse or jsonargparse as one sentence."""
    message = " ".join(message.split())
    if wrong := wrong_type(message, actions):
        return f"{_called(wrong.option, actions)} is {wrong.value}; it must be {wrong.allowed}"
    if found := re.match(r"argument (\S+): expected", message):
        return f"{found[1].split('/')[0]} needs a value"
    if found := re.match(r"argument (\S+): ignored explicit argument (.*)$", message):
        return f"{found[1]} is a flag and takes no value, but {found[2]} was given"
    if found := re.match(r"the following arguments are required: (.*)$", message):
        names = [_called(name, actions) for name in found[1].split(", ")]
        return f"{' and '.join(names)} {'are' if names[1:] else 'is'} missing"
    if found := re.match(r"[uU]nrecognized arguments: (.*)$", message):
        return f"unexpected argument {found[1]!r}"
    return message


def _called(name: str, actions: Sequence[Any]) -> str:
    """An option, or an argument as the usage calls it: `--reward.name`, `MODEL`."""
    action = next((each for each in actions if each.dest == name), None)
    if action is None or action.option_strings:
        return f"--{name.lstrip('-')}"
    return str(action.metavar or name.upper())


def add_json(made: Any) -> None:
    """Add the flag --json."""
    made.add_argument("--json", action="store_true", help=JSON)


@dataclass(frozen=True)
class Calling:
    """A command whose arguments are those of one function, which is imported after they are parsed."""

    module: str
    function: str
    usage: str
    about: str

    def call(self, options: dict[str, Any]) -> Any:
        """Call the function."""
        return getattr(importlib.import_module(self.module), self.function)(**options)

    def make_parser(self) -> Any:
        """The parser, with the function's arguments and --json."""
        made = parser(self.usage, self.about)
        made.add_function_arguments(
            signature(self.module, self.function), as_group=False, as_positional=True, skip={"force"}
        )
        add_json(made)
        return made


class Reporting(Calling):
    """A command that prints the numbers which a function returns."""

    def run(self, argv: Sequence[str]) -> int:
        """Call the function, and print its numbers as lines or as JSON."""
        options = parse(self.make_parser(), argv)
        as_json = options.pop("json")
        found = self.call(options)
        lines = (
            f"{key:22} " + (", ".join(value) if isinstance(value, list) else f"{value:.5g}")
            for key, value in found.items()
            if value is not None
        )
        print(json.dumps(found, allow_nan=False) if as_json else "\n".join(lines))
        return 0


class Writing(Calling):
    """A command that writes a model folder."""

    def make_parser(self) -> Any:
        made = super().make_parser()
        made.add_argument("--force", action="store_true", help="Replace OUT if it is a model folder of esolm.")
        return made


def announce(text: str, quiet: bool = False) -> None:
    """Print a line to standard error at once, if that is a terminal."""
    if not quiet and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
