"""Parsers of options whose texts stay what they are."""

from __future__ import annotations

from typing import Any

import yaml

_MODE = "esolm"


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
