"""Animates denoising in a terminal: dots that turn into words, with one colour for each phase.

While tokens appear, each stays on its line, so that the text does not reflow; the last frame is wrapped by words.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..data import Tokenizer
from ..sampling.events import Event
from .frames import BREAK, DIFFUSION, DRAFT, END, GIVEN, REJECTED, SEQUENTIAL, UNDECIDED, Film, Meter, layout, pieces

STYLES = {GIVEN: "bold", DIFFUSION: "#2f8fd8", SEQUENTIAL: "#e07b39", DRAFT: "italic #8e6fc1", REJECTED: "#d0453f"}
COLUMNS = 100  # at most
FRAME = 0.04  # seconds between two frames, at least
PLAY = 5.0  # a faster batch is slowed down to this many seconds, by up to PAUSE a pass
PAUSE = 0.2
VOCABULARY = 500  # tokens of which the typical width is taken


def animate(
    events: Iterator[Event], films: Sequence[Film], tokenizer: Tokenizer, meter: Meter, console: Console
) -> Iterator[Event]:
    """Pass the events of one batch on, drawing `films` after each; without a terminal, only after the last."""
    columns = min(console.width, COLUMNS)
    tokens = tokens_per_line(tokenizer, columns)
    with Live(console=console, auto_refresh=False) as live:
        shown, event = time.monotonic(), None
        for event in events:
            if console.is_terminal:
                time.sleep(max(0.0, min(PAUSE, PLAY / event.steps) - (time.monotonic() - shown)))
                if time.monotonic() - shown > FRAME:
                    live.update(frame(films, event, tokenizer, meter, columns, tokens), refresh=True)
                    shown = time.monotonic()
            yield event
        if event is not None:
            live.update(frame(films, event, tokenizer, meter, columns, tokens, done=True))
    console.print()


def tokens_per_line(tokenizer: Tokenizer, columns: int) -> int:
    """How many tokens of typical width fit on a line."""
    ids = range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // VOCABULARY))
    widths = [max(1, cell_len(tokenizer.decode([token]))) for token in ids]
    return max(1, int(columns * len(widths) / sum(widths)))


def frame(
    films: Sequence[Film],
    event: Event,
    tokenizer: Tokenizer,
    meter: Meter,
    columns: int,
    tokens: int,
    done: bool = False,
) -> Group:
    """Every row of a batch and a status line; unless all is done, the newest tokens are highlighted."""
    parts = []
    for row, film in enumerate(films):
        if len(films) > 1 or event.first:
            parts.append(Text(f"sample {event.first + row + 1}", "dim"))
        parts.append(read(film, tokenizer) if done else draw(film, tokenizer, columns, tokens, event.step))
        parts.append(Text())
    nfe = sum(film.passes for film in films) / len(films)
    step = event.step + 1
    steps = step if done else max(event.steps, step)  # the speculative sampler needs fewer than planned
    status = f"step {step}/{steps} · {nfe:.4g} passes · {meter.speed:,.0f} tokens/s"
    phases = {phase for film in films for phase in film.phase}
    if event.committed.drafts is not None:
        phases |= {DRAFT, REJECTED}
    legend = [Text(f"  ● {phase}", style) for phase, style in STYLES.items() if phase in phases]
    return Group(*parts, Text.assemble((status, "dim"), *legend))


def read(film: Film, tokenizer: Tokenizer) -> Text:
    """A finished row as one reads it: with line breaks, up to the end-of-sequence token behind all that was given."""
    texts = pieces(tokenizer, film)
    given = max((i for i, phase in enumerate(film.phase) if phase == GIVEN), default=-1)
    texts = texts[: next((i for i, piece in enumerate(texts) if i > given and piece == END), None)]
    return Text.assemble(*((piece, STYLES[phase]) for piece, phase in zip(texts, film.phase, strict=False)))


def draw(film: Film, tokenizer: Tokenizer, columns: int, tokens: int, now: int) -> Text:
    """One row, `tokens` tokens on each line; those of pass `now` are highlighted."""
    text, texts = Text(no_wrap=True), [piece.replace("\n", BREAK) for piece in pieces(tokenizer, film)]
    for first in range(0, len(texts), tokens):
        text.append("\n" if first else "")
        line = 0
        for span in layout(texts[first : first + tokens], columns):
            token = first + span.token
            style = STYLES[film.phase[token]]
            if film.when[token] == UNDECIDED:
                style = STYLES[DRAFT] if token in film.drafts else "dim"
            elif film.when[token] == now:
                style = (STYLES[REJECTED] if token in film.rejected else style) + " bold reverse"
            text.append("\n" * (span.line - line))
            text.append(span.text, style)
            line = span.line
    text.highlight_words([BREAK], "dim")
    return text
