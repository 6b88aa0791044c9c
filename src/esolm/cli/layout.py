"""The look of `--help`: groups of options, short types and defaults, examples."""

from __future__ import annotations

import argparse
import functools
import textwrap
import types
import typing
from typing import Any

COMMON = {
    "model and machine": (
        "weights", "which", "device", "precision", "engine", "threads", "batch_size", "workers", "seed",
    ),
    "output": ("json", "show", "svg", "gif", "out", "work", "plot", "force", "print_config"),
}  # fmt: skip
"""Groups of options that have the same meaning in every command."""
_SHORT = {int: "N", float: "X"}


def group(made: Any, title: str, names: typing.Iterable[str]) -> None:
    """Move options into a group of their own."""
    names = set(names)
    moved = [action for each in made._action_groups for action in each._group_actions if action.dest in names]
    moved = [action for action in moved if action.option_strings]
    if not moved:
        return
    for each in made._action_groups:
        each._group_actions[:] = [action for action in each._group_actions if action not in moved]
    made.add_argument_group(title, name=title)._group_actions.extend(moved)


def arrange(made: Any) -> None:
    """Put the groups into order, with the options that all commands share at the end; may be called again.

    Options that read the options of a group from a file are hidden.
    """
    arguments, rest = made._positionals, made._optionals
    arguments.title = "arguments"
    for action in made._actions:
        if not action.option_strings and action.metavar is None and action.nargs != 0:
            action.metavar = action.dest.upper()
        if type(action).__name__ == "_ActionConfigLoad":
            action.help = argparse.SUPPRESS
    for each in made._action_groups:
        positional = [action for action in each._group_actions if not action.option_strings and each is not arguments]
        arguments._group_actions.extend(positional)
        each._group_actions[:] = [action for action in each._group_actions if action not in positional]
    left = {action.dest for action in rest._group_actions} - {"help"}
    shared = set().union(*COMMON.values())
    for title, names in {**COMMON, "options": left - shared}.items():
        if title not in made.groups:
            group(made, title, left.intersection(names))
    rest.title = "help"
    places = {id(each): 3 if title in COMMON else 1 for title, each in made.groups.items() if each.title == title}
    made._action_groups.sort(
        key=lambda each: 0 if each is arguments else 4 if each is rest else places.get(id(each), 2)
    )


@functools.cache
def formatter() -> type[argparse.HelpFormatter]:
    """The class that formats help."""
    from jsonargparse import DefaultHelpFormatter

    class Help(DefaultHelpFormatter):
        """One line for a flag, short names for numbers, defaults that say something."""

        def _format_action_invocation(self, action: Any) -> str:
            names = [name for name in action.option_strings if not name.endswith("+")]  # --order+ appends to --order
            if not names:
                return str(super()._format_action_invocation(action))
            if getattr(action, "_typehint", None) is bool:
                return f"--no-{names[-1][2:]}, {names[-1]}" if action.default else names[-1]
            value = self._format_args(action, self._get_default_metavar_for_optional(action))
            return ", ".join(names) + (f" {value}" if action.nargs != 0 else "")

        def _get_help_string(self, action: Any) -> str:
            if not action.option_strings or isinstance(action, argparse._HelpAction):
                return action.help or ""
            if action.required:
                return f"{action.help or ''} (required)".lstrip()
            if getattr(action, "_jsonargparse_preexpanded_help", False):  # an option without a text, called again
                return str(action.help)
            default = action.default
            quiet = default is None or default is False or default in ("", argparse.SUPPRESS, (), [])
            shown = "on" if default is True else str(default).replace("%", "%%")
            shown = shown if shown.strip() else repr(shown)
            return f"{action.help or ''}{'' if quiet else f' (default: {shown})'}".lstrip()

        def _get_default_metavar_for_optional(self, action: Any) -> str:
            if values := choices(action):
                return f"{{{','.join(values)}}}"
            kind = next((k for k in _SHORT if k in _members(action)), None)
            return _SHORT[kind] if kind else str(super()._get_default_metavar_for_optional(action))

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return "\n".join(
                line if line.startswith(" ") else textwrap.fill(line, width, break_on_hyphens=False)
                for line in text.split("\n")
            )

    return Help


def choices(action: Any) -> list[str]:
    """The values of an option that takes one of several names."""
    found = [hint for hint in _members(action) if typing.get_origin(hint) is typing.Literal]
    return [str(value) for hint in found for value in typing.get_args(hint)]


def _members(action: Any) -> list[Any]:
    """The types that an option takes."""
    hint = getattr(action, "_typehint", None) or action.type
    return list(typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint])
