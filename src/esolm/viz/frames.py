"""A row while it is denoised: when each token was committed, in which phase, and the text to show for it."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.cells import cell_len

from ..data import Tokenizer
from ..sampling.events import Event

GIVEN, DIFFUSION, SEQUENTIAL = "given", "diffusion", "left to right"
"""The phase that a token comes from."""
DRAFT, REJECTED = "draft", "rejected draft"
"""A draft that the last pass dropped unjudged, and a token that replaced a rejected draft."""
UNDECIDED = 1 << 30
DOT, END, BREAK = "·", "¶", "↵"
"""Signs for an undecided token, the end-of-sequence token, and a line break."""


@dataclass
class Film:
    """One row while it is denoised, by position."""

    ids: list[int]
    phase: list[str]
    when: list[int]  # the pass that set it to this token; -1 if given, UNDECIDED if not committed yet
    needed: list[int] = field(default_factory=list)  # the passes so far that this row needed
    drafts: dict[int, int] = field(default_factory=dict)  # dropped drafts of the last pass, by position
    rejected: set[int] = field(default_factory=set)  # positions where the last pass rejected a draft

    @property
    def passes(self) -> int:
        """Passes so far that this row needed."""
        return len(self.needed)

    @classmethod
    def start(cls, event: Event, row: int) -> Film:
        """The row before its first pass."""
        schedule = event.schedule
        length = int(schedule.lengths[row])
        step, diffusion = schedule.step_of()[row, :length].tolist(), int(schedule.diffusion[row])
        phase = [GIVEN if k < 0 else DIFFUSION if k < diffusion else SEQUENTIAL for k in step]
        return cls(event.tokens[row, :length].tolist(), phase, [-1 if k < 0 else UNDECIDED for k in step])

    @classmethod
    def replay(cls, ids: Sequence[int], steps: Sequence[Sequence[int]], diffusion: int | None = None) -> Film | None:
        """The film of a finished row from the positions of each step, of which the first `diffusion` are diffusion.

        None if the steps do not say when each token appeared: there are none, or a chain drew a position again.
        """
        film = cls([*ids], [GIVEN] * len(ids), [-1] * len(ids), [*range(len(steps))])
        for step, positions in enumerate(steps):
            for at in positions:
                if not 0 <= at < len(ids) or film.when[at] >= 0:
                    return None
                film.when[at] = step
                film.phase[at] = DIFFUSION if diffusion is None or step < diffusion else SEQUENTIAL
        return film if max(film.when, default=-1) >= 0 else None

    def add(self, event: Event, row: int) -> None:
        """Add the tokens that one more pass committed; a token that was drawn again and is the same is not new."""
        position, token, drawn = (part[row].tolist() for part in event.committed[:3])
        for at, token_id in ((p, t) for p, t, real in zip(position, token, drawn, strict=True) if real):
            if self.when[at] == UNDECIDED or self.ids[at] != token_id:
                self.ids[at], self.when[at] = token_id, event.step
        if bool(event.committed.needed[row]):
            self.needed.append(event.step)
        self.drafts, self.rejected = {}, set()
        if (tried := event.committed.drafts) is not None:
            real, kept = tried.drawn[row], int(tried.accepted[row])
            guesses = list(zip(tried.position[row][real].tolist(), tried.token[row].cpu()[real].tolist(), strict=True))
            self.rejected = {at for at, _ in guesses[kept : kept + 1]}
            self.drafts = dict(guesses[kept + 1 :])


@dataclass
class Meter:
    """Tokens generated so far, and the seconds that the model spent on them. In a chain, every step makes an equal
    share of the tokens that it draws again."""

    tokens: float = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def measure(self, events: Iterator[Event]) -> Iterator[Event]:
        """Pass events on and count them."""
        for event in events:
            self.seconds += event.seconds
            self.tokens += int(event.committed.drawn.sum()) / (event.steps if event.schedule.rewrites else 1)
            yield event


def record(events: Iterator[Event], films: list[Film]) -> Iterator[Event]:
    """Pass the events of one batch on; `films` gets a film of every row."""
    for event in events:
        if event.step == 0:
            films[:] = [Film.start(event, row) for row in range(len(event.tokens))]
        for row, film in enumerate(films):
            film.add(event, row)
        yield event


def pieces(tokenizer: Tokenizer, film: Film) -> list[str]:
    """The text to show for each token: a dot, a draft, or the token's part of the decided run around it.

    A run is decoded as a whole, so that a character whose bytes are in several tokens appears once, with the last.
    """
    ids, end = film.ids, tokenizer.eos_id
    decided = [when != UNDECIDED for when in film.when]
    shown = [END if known and token == end else DOT for known, token in zip(decided, ids, strict=True)]
    for inside, group in itertools.groupby(range(len(ids)), lambda at: decided[at] and ids[at] != end):
        if inside:
            run = list(group)
            shown[run[0] : run[-1] + 1] = [visible(text) for text in spell(tokenizer.decode, [ids[at] for at in run])]
    for at, token in film.drafts.items():
        shown[at] = END if token == end else visible(tokenizer.decode([token])) or DOT
    return shown


def spell(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it; joined, they are the text of all tokens."""
    texts: list[str] = []
    before = begin = 0  # the window to decode: the last decoded tokens, and those that are not decoded yet
    for at in range(len(ids)):
        text = decode(ids[before : at + 1])
        if text.endswith("\ufffd") and at + 1 < len(ids):  # perhaps the first bytes of a character
            texts.append("")
            continue
        texts.append(text[len(decode(ids[before:begin])) :])
        before, begin = begin, at + 1
    return texts


def visible(text: str) -> str:
    """The text with tabs as spaces, and control characters other than line breaks as U+FFFD."""
    text = text.replace("\r", "").expandtabs(4)
    return "".join(c if c == "\n" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in text)


class Span(NamedTuple):
    """The part of one token in one line of a text grid."""

    token: int
    line: int
    column: int
    text: str


def layout(texts: Sequence[str], columns: int) -> list[Span]:
    """Place tokens on a grid. Lines end at line breaks, which are shown as a sign, and between words."""
    spans: list[Span] = []
    line = column = 0
    for word in _words(texts):
        width = sum(cell_len(c) for c, _ in word)
        if column and column + width > columns and not word[0][0].isspace() and word[0][0] != BREAK:
            line, column = line + 1, 0
        for character, token in word:
            if character == "\n":
                line, column = line + 1, 0
                continue
            if column >= columns and character != BREAK:
                if character.isspace():
                    continue
                line, column = line + 1, 0
            last = spans[-1] if spans else None
            if last and last.token == token and last.line == line and last.column + cell_len(last.text) == column:
                spans[-1] = last._replace(text=last.text + character)
            else:
                spans.append(Span(token, line, column, character))
            column += cell_len(character)
    return spans


def _words(texts: Sequence[str]) -> Iterator[list[tuple[str, int]]]:
    """Characters that stay on one line, each with its token; a line break is a sign followed by the break."""
    characters = [(c, token) for token, text in enumerate(texts) for c in text]
    for kind, group in itertools.groupby(characters, lambda pair: pair[0] if pair[0] in "\n·" else pair[0].isspace()):
        word = list(group)
        if kind == "\n":
            yield [(BREAK, token) for _, token in word]
            yield word[-1:]
        elif kind == DOT:
            yield from ([dot] for dot in word)
        else:
            yield word
