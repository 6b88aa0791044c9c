"""Denoising in a terminal: dots that turn into words, the two phases in two colours, and guesses in a third."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..data import Tokenizer
from ..sampling.events import Event
from .frames import BREAK, DIFFUSION, DRAFT, GIVEN, REJECTED, SEQUENTIAL, UNDECIDED, Film, Meter, layout, pieces

STYLES = {GIVEN: "bold", DIFFUSION: "#2f8fd8", SEQUENTIAL: "#e07b39", DRAFT: "italic #8e6fc1", REJECTED: "#d0453f"}
COLUMNS = 100  # at most
FRAME = 0.04  # seconds between two frames, at least
PLAY = 5.0  # seconds that a batch is stretched to if the model is faster, of up to PAUSE a pass
PAUSE = 0.2


def animate(
    events: Iterator[Event], reels: list[list[Film]], tokenizer: Tokenizer, meter: Meter, console: Console
) -> Iterator[Event]:
    """Pass events on, drawing the last of `reels` after each; not on a terminal, only when a batch is complete."""
    columns = min(console.width, COLUMNS)
    for _, batch in itertools.groupby(events, lambda event: event.first):
        with Live(console=console, auto_refresh=False) as live:
            shown = time.monotonic()
            for event in batch:
                films = reels[-1]  # which the next batch adds to before this loop ends
                if console.is_terminal:
                    time.sleep(max(0.0, min(PAUSE, PLAY / event.steps) - (time.monotonic() - shown)))
                    if time.monotonic() - shown > FRAME:
                        live.update(frame(films, event, tokenizer, meter, columns), refresh=True)
                        shown = time.monotonic()
                yield event
            live.update(frame(films, event, tokenizer, meter, columns, done=True))
        console.print()


def frame(
    films: Sequence[Film], event: Event, tokenizer: Tokenizer, meter: Meter, columns: int, done: bool = False
) -> Group:
    """Every row of a batch and a line about them; unless all is done, the newest tokens are bright."""
    parts = []
    for row, film in enumerate(films):
        if len(films) > 1 or event.first:
            parts.append(Text(f"sample {event.first + row + 1}", "dim"))
        parts.append(draw(film, tokenizer, columns, -2 if done else event.step))
        parts.append(Text())
    nfe = sum(film.passes for film in films) / len(films)
    status = f"step {event.step + 1}/{max(event.steps, event.step + 1)} · NFE {nfe:.4g} · {meter.speed:,.0f} tokens/s"
    phases = {phase for film in films for phase in film.phase}
    if event.committed.drafts is not None:
        phases |= {DRAFT, REJECTED}
    legend = [Text(f"  ● {phase}", style) for phase, style in STYLES.items() if phase in phases]
    return Group(*parts, Text.assemble((status, "dim"), *legend))


def draw(film: Film, tokenizer: Tokenizer, columns: int, now: int) -> Text:
    """One row; the tokens of pass `now` are bright."""
    text, line = Text(no_wrap=True), 0
    for span in layout(pieces(tokenizer, film), columns):
        style = STYLES[film.phase[span.token]]
        if film.when[span.token] == UNDECIDED:
            style = STYLES[DRAFT] if span.token in film.drafts else "dim"
        elif film.when[span.token] == now:
            style = (STYLES[REJECTED] if span.token in film.rejected else style) + " bold reverse"
        text.append("\n" * (span.line - line))
        text.append(span.text, style)
        line = span.line
    text.highlight_words([BREAK], "dim")
    return text
