"""What a model is, in a line and as a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..data import Tokenizer
from ..net.protocol import Network
from ..systems import FROM_DATA, System
from . import html

LONGEST = 60
"""Characters of a value; a system may have long ones, such as token counts."""


def line(net: Network, system: System, tokenizer: Tokenizer, parameters: Callable[[], int]) -> str:
    """The model in one line."""
    return ", ".join(
        known(
            lambda: system.name,
            lambda: f"{readable(parameters())} parameters",
            lambda: f"length {net.config.length}",
            lambda: f"tokenizer {tokenizer.name} of {tokenizer.vocab_size:,} tokens",
            lambda: str(net.device),
        )
    )


def draw(
    net: Network, system: System, tokenizer: Tokenizer, parameters: Callable[[], int], infills: Callable[[], bool]
) -> str:
    """The card of a model for a notebook; what a partial model lacks is left out."""
    parts: dict[str, tuple[Callable[[], str], ...]] = {
        "system": (lambda: system.name, lambda: _options(system)),
        "size": (lambda: f"{readable(parameters())} parameters", lambda: _shape(net)),
        "length": (lambda: f"{net.config.length} tokens",),
        "tokenizer": (lambda: f"{tokenizer.name} of {tokenizer.vocab_size:,} tokens",),
        "runs on": (lambda: str(net.device), lambda: str(net.dtype).removeprefix("torch.")),
    }
    rows = {name: "; ".join(text for text in known(*values) if text) for name, values in parts.items()}
    code = known(
        lambda: 'lm.sample("A beginning", num_samples=4, top_p=0.9)' if system.samplers else "",
        lambda: 'lm.infill("A text with a ____ in it.", tokens_per_blank="1-4")' if infills() else "",
        lambda: 'lm.log_prob("A text to score.")' if system.any_order else "",
        lambda: 'lm.chat("A question?")' if tokenizer.chat_template is not None else "",
    )
    shown = {name: value for name, value in rows.items() if value}
    return html.card("LanguageModel", shown, [text for text in code if text])


def known(*values: Callable[[], str]) -> list[str]:
    """The values that can be computed; a model may be a stand-in that lacks some of its parts."""
    found = []
    for value in values:
        try:
            found.append(value())
        except AttributeError:
            continue
    return found


def readable(number: int) -> str:
    """A number with three digits, as in 7.46 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _options(system: System) -> str:
    """The hyperparameters of a system that are not those by default, and alpha_0 if it has one."""
    if not dataclasses.is_dataclass(system):
        return ""
    fields = [field for field in dataclasses.fields(system) if field.name not in FROM_DATA]
    values: list[tuple[str, Any, Any]] = [(f.name, vars(system).get(f.name), f.default) for f in fields]
    shown = (f"{name} = {_short(value)}" for name, value, usual in values if name == "alpha_0" or value != usual)
    return ", ".join(shown)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _shape(net: Network) -> str:
    return f"{net.config.layers} blocks of width {net.config.width}, {net.config.heads} heads"
