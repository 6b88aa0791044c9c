"""HTML for notebooks: models, samples and likelihoods, without scripts, style sheets or anything from the network.

All text is escaped. Colours are laid transparently over the page, so they suit light and dark themes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

from ..data import Tokenizer
from .frames import BREAK, DOT, GIVEN, Film, pieces, visible
from .picture import svg

MOMENTS = 48  # of an animation, at most
ANIMATED = 512  # tokens of an animation; a longer sample is shown as text
TEXTS, TOKENS, CHARACTERS = 8, 1024, 2000  # shown at most: texts, tokens of a heat map, characters of a text
INK = "217,72,1"
"""The colour of unlikely tokens, red, green and blue."""
SHADES = ((0.5, 0.0), (0.2, 0.09), (0.05, 0.18), (0.01, 0.27), (0.001, 0.36), (0.0, 0.45))
"""The opacity of the ink for tokens of at least this probability."""
BOX = "border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:.5em .8em;margin:.3em 0"
QUIET = "opacity:.7;font-size:90%"
TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6"


def card(title: str, rows: Mapping[str, str], code: Sequence[str]) -> str:
    """A title, a table of properties, and lines of code to go on with."""
    cells = "".join(
        f'<tr><th style="text-align:left;padding-right:1em">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    lines = "".join(f'<div><code style="white-space:pre-wrap">{escape(line)}</code></div>' for line in code)
    go_on = f'<div style="{QUIET}">Go on with</div>{lines}' if code else ""
    return f'<div style="{BOX}"><b>{escape(title)}</b><table>{cells}</table>{go_on}</div>'


def samples(head: str, image: str | None, texts: Sequence[str]) -> str:
    """The picture of the first text, and the others as text; without a picture all of them as text."""
    parts = [f'<div style="{QUIET}">{escape(head)}</div>', image or ""]
    rest = texts[1:] if image else texts
    shown = rest[: TEXTS - 1 if image else TEXTS]
    parts += [f'<div style="{BOX};{TEXT}">{escape(_short(visible(text)))}</div>' for text in shown]
    return "".join([*parts, _more(len(rest) - len(shown))])


def animation(film: Film, tokenizer: Tokenizer, label: str) -> str | None:
    """The film as an image that holds its own data; None if it is too long.

    As an image, because the style sheets of several pictures on one page would mix.
    """
    if len(film.ids) > ANIMATED:
        return None
    text = escape(_short("".join(pieces(tokenizer, film)).replace("\n", " ")), quote=True)
    data = base64.b64encode(svg(film, tokenizer, MOMENTS, label).encode()).decode()
    return f'<img style="max-width:100%;height:auto" alt="{text}" src="data:image/svg+xml;base64,{data}">'


def likelihood(
    total: Sequence[float],
    tokens: Sequence[Sequence[float]],
    kind: str,
    ids: Sequence[Sequence[int]] | None,
    given: Sequence[Sequence[bool]] | None,
    tokenizer: Tokenizer | None,
) -> str:
    """Every token of each text on a background that says how unlikely it is, and on hover its log-probability."""
    parts = []
    for at, (nats, values) in enumerate(zip(total[:TEXTS], tokens[:TEXTS])):
        own = ids[at] if ids is not None and at < len(ids) else []
        kept = list(given[at]) if given is not None and at < len(given) else []
        kept = [*kept, *[False] * (len(values) - len(kept))]
        texts = _spelt(tokenizer, own) if len(own) == len(values) else [DOT] * len(values)
        spans = [_token(*token) for token in zip(texts[:TOKENS], values, kept)]
        cut = _more(len(values) - len(spans), "tokens")
        scored = len(values) - sum(kept)
        head = f"log p = {nats:.2f} nats ({kind})" + (f", {nats / scored:.2f} per token" if scored else "")
        parts.append(f'<div style="{BOX}"><div style="{QUIET}">{escape(head)}</div>')
        parts.append(f'<div style="{TEXT}">{"".join(spans)}</div>{cut}</div>')
    return "".join([_legend(), *parts, _more(len(total) - TEXTS)])


def shade(log_p: float) -> float:
    """The opacity of the ink behind a token of this log-probability."""
    probability = math.exp(min(log_p, 0.0)) if log_p == log_p else 0.0
    return next(opacity for least, opacity in SHADES if probability >= least)


def _spelt(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text to show for each token; a dot for one that only starts a character."""
    if tokenizer is None:
        return [DOT] * len(ids)
    film = Film([*ids], [GIVEN] * len(ids), [-1] * len(ids))
    return [text or DOT for text in pieces(tokenizer, film)]


def _token(text: str, log_p: float, given: bool) -> str:
    """One token; given ones are bold."""
    title = "given" if given else f"log p = {log_p:.3f}, p = {math.exp(min(log_p, 0.0)):.3g}"
    style = "font-weight:bold" if given else f"background-color:rgba({INK},{shade(log_p)})"
    shown = escape(text).replace("\n", f"{BREAK}\n")
    return f'<span style="{style};border-radius:2px" title="{title}">{shown}</span>'


def _legend() -> str:
    """The shades with their probabilities."""
    labels = [f"p ≥ {least:g}" for least, _ in SHADES[:-1]] + [f"p < {SHADES[-2][0]:g}"]
    boxes = (
        f'<span style="background-color:rgba({INK},{opacity});padding:0 .4em">{escape(label)}</span>'
        for label, (_, opacity) in zip(labels, SHADES, strict=True)
    )
    return f'<div style="font-size:90%">{"".join(boxes)}</div>'


def _more(number: int, what: str = "texts") -> str:
    return f'<div style="{QUIET}">… and {number} more {what}</div>' if number > 0 else ""


def _short(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}…"
