"""Parsers of options whose texts stay what they are, and their errors in words."""

from __future__ import annotations

import collections.abc
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, NamedTuple

import yaml

_MODE = "esolm"
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def new_parser(**settings: Any) -> Any:
    """A parser of jsonargparse for which only the word null is null.

    By itself it reads the values of `str | None` as YAML, where also `#key`, `~` and `&x` are null.
    """
    from jsonargparse import ArgumentParser, set_loader

    set_loader(_MODE, _value, (yaml.YAMLError,))
    return ArgumentParser(exit_on_error=False, parser_mode=_MODE, **settings)


def _value(text: str) -> Any:
    from jsonargparse import get_loader

    value = get_loader("yaml")(text)
    return text if value is None else value


class WrongType(NamedTuple):
    """A value that an option does not take."""

    option: str
    value: str
    allowed: str  # in words


def wrong_type(message: str, actions: Iterable[Any]) -> WrongType | None:
    """What an error of jsonargparse says about a value of the wrong type, if it is one."""
    found = re.search(r'Parser key "([^"]+)":.*(?:Given value|Got value): (.*)$', " ".join(message.split()))
    action = next((each for each in actions if found and each.dest == found[1]), None)
    return WrongType(found[1], found[2], _allowed(action._typehint)) if found and action else None


def is_list(hint: Any) -> bool:
    """Whether a type is a list, or may be one."""
    found = (hint, *typing.get_args(hint))
    return any(typing.get_origin(each) in (list, collections.abc.Sequence) for each in found)


def _allowed(hint: Any) -> str:
    """The values of a type, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_allowed, arguments))
    if origin is tuple:
        return "a list of " + ("numbers" if arguments[0] in (int, float) else _allowed(arguments[0]))
    if is_list(hint):
        return "whole numbers, as in 2,0,1" if arguments == (int,) else "a list, as in [A,B]"
    return _NAMES.get(hint, str(hint))
