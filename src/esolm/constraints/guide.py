"""Restricts the draws of a batch to tokens that can still be completed to a text that matches.

Shapes: B batch, L length, R draws, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .compile import Pattern
from .walk import Steps, Walk, lengths, spelled

FURTHER = 4
"""An error lists the lengths that fit up to this multiple of the one that does not."""


class NoMatch(ValueError):
    """No text of the length of a span matches its pattern."""


@dataclass(frozen=True, eq=False)
class PatternSpan:
    """Positions start .. stop - 1 of a row, whose text must match a pattern."""

    start: int
    stop: int
    pattern: Pattern
    steps: Steps
    pad: bool  # the text may end before `stop`; end-of-sequence tokens follow it

    @property
    def first_state(self) -> int:
        """The state before the first token of the span."""
        return self.steps.automaton.start if self.start else self.steps.automaton.text_start

    def walk(self, row: Sequence[int | None]) -> Walk:
        """The automaton along the tokens of a row, None where one is to be drawn. Raises ValueError if none fits."""
        automaton, kinds = self.steps.automaton, list[int | None]()
        for token in row[self.start : self.stop]:
            kinds.append(None if token is None else int(automaton.class_of[token]))
        walk = Walk(self.steps, kinds, self.first_state, automaton.accepting(self.pad))
        if not walk.possible:
            raise NoMatch(self._why(kinds))
        return walk

    def fitting(self, most: int) -> list[int]:
        """The numbers of tokens, 1 to `most`, that this span could have if all of them were drawn."""
        return [n for n in lengths(self.steps, self.first_state, self.pad, most) if n]

    def _why(self, kinds: Sequence[int | None]) -> str:
        n = self.stop - self.start
        most = max(FURTHER * n, 64)
        found = self.fitting(most)
        if n in found:
            return f"no text of {n} tokens with the given ones among them matches {self.pattern}: change what is given"
        fits = f"{spelled(found)} tokens can" if found else "its texts are longer, or the vocabulary cannot spell them"
        if found and found == [*range(found[0], most + 1)]:  # padding fills up what is longer
            fits = f"{found[0]} tokens or more can"
        remedy = "Change the length (max_tokens in the server) or tokens_per_blank"
        return f"no text of {n} tokens matches {self.pattern}: {fits}. {remedy}"


class Guide:
    """The walks of a batch: what may be drawn next, and what was drawn."""

    def __init__(self, limits: Sequence[Sequence[PatternSpan]], rows: Sequence[Sequence[int | None]]) -> None:
        """rows: the tokens of each row, None where one is to be drawn. Raises ValueError if no text matches."""
        self.walks = [[(span, span.walk(row)) for span in spans] for spans, row in zip(limits, rows, strict=True)]
        self.log_q = np.zeros(len(self.walks))  # of the tokens that were drawn

    def copy(self) -> Guide:
        """The same guide, to go on with separately."""
        found = object.__new__(Guide)
        found.walks = [[(span, walk.copy()) for span, walk in walks] for walks in self.walks]
        found.log_q = self.log_q.copy()
        return found

    def _at(self, row: int, position: int) -> tuple[PatternSpan, Walk] | None:
        return next((each for each in self.walks[row] if each[0].start <= position < each[0].stop), None)

    def fits(self, row: int, position: int, token: int) -> bool:
        """Whether a token can stand at a position."""
        found = self._at(row, position)
        if found is None:
            return True
        span, walk = found
        return bool(walk.classes(position - span.start).bits[span.steps.automaton.class_of[token]])

    def allowed(self, row: Tensor, position: Tensor, vocabulary: int) -> Tensor:
        """The tokens that can stand at each position, bool [R, V]; row, position int [R]."""
        masks = np.ones((len(row), vocabulary), bool)
        for i, (r, p) in enumerate(zip(row.tolist(), position.tolist(), strict=True)):
            if (found := self._at(r, p)) is not None:
                span, walk = found
                classes, class_of = walk.classes(p - span.start).bits, span.steps.automaton.class_of[:vocabulary]
                masks[i, : len(class_of)] = classes[class_of]
                masks[i, len(class_of) :] = False
        return torch.from_numpy(masks)

    def commit(self, row: Tensor, position: Tensor, token: Tensor) -> None:
        """Fix tokens that were drawn; all int [R]."""
        for r, p, t in zip(row.tolist(), position.tolist(), token.tolist(), strict=True):
            if (found := self._at(r, p)) is not None:
                span, walk = found
                walk.commit(p - span.start, int(span.steps.automaton.class_of[t]))
                assert walk.possible, "a token was drawn that cannot be completed"

    @property
    def finished(self) -> bool:
        """Whether every token of every span was drawn by this guide."""
        return all(None not in walk.known for walks in self.walks for _, walk in walks)


class Limits:
    """The spans of each row of a request, and the guide of its last run."""

    def __init__(self, spans: Sequence[Sequence[PatternSpan]]) -> None:
        self.spans = spans
        self.guide: Guide | None = None

    def begin(self, x: Tensor, given: Tensor) -> Guide:
        """A new guide for a run; x int, given bool [B, L]. Raises ValueError if no text matches."""
        pairs = zip(x.tolist(), given.tolist(), strict=True)
        rows = [[t if g else None for t, g in zip(*pair, strict=True)] for pair in pairs]
        self.guide = Guide(self.spans, rows)
        return self.guide

    def log_q(self, given_order: str) -> list[float]:
        """The log-probability of what was drawn so far, of each row; NaN if the order of the given tokens is random."""
        if self.guide is None or given_order != "ascending":
            return [np.nan] * len(self.spans)
        return self.guide.log_q.tolist()

    def check(self, system: str) -> None:
        """Raise ValueError if the run that has ended did not ask its guide for every token."""
        if self.guide is None or not self.guide.finished:
            raise ValueError(f"{system} draws tokens without a Chooser, so that regex and json_schema cannot hold")
