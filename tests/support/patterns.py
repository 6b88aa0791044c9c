"""Patterns over a toy vocabulary, by trying every sequence: what the automata are compared with.

Shapes: V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esolm.constraints.automaton import Vocabulary
from esolm.constraints.compile import Pattern, compiled
from esolm.constraints.guide import PatternSpan
from esolm.core.draw import Draw
from support.naive import Naive, Plan, Tokens, decoded

Partial = Sequence[int | None]


@dataclass(frozen=True)
class Language:
    """The sequences of tokens whose text matches a regular expression, up to EOS tokens at the end if `pad`."""

    vocabulary: Vocabulary
    regex: str
    pad: bool = True
    first: bool = True  # the sequence begins the text
    memo: dict[Any, Any] = field(default_factory=dict)

    def text(self, tokens: Sequence[int]) -> str | None:
        """The text, or None if a special token stands in it."""
        ids = list(tokens)
        while self.pad and ids and ids[-1] == self.vocabulary.eos_id:
            ids.pop()
        pieces = [None if i == self.vocabulary.eos_id else self.vocabulary.pieces[i] for i in ids]
        if not all(pieces):
            return None
        joined = b"".join(piece for piece in pieces if piece)
        if self.vocabulary.strips and self.first and pieces:
            joined = joined.removeprefix(b" ")
        try:
            return joined.decode()
        except UnicodeDecodeError:
            return None

    def matches(self, tokens: Sequence[int]) -> bool:
        text = self.text(tokens)
        return text is not None and re.fullmatch(self.regex, text) is not None

    def members(self, length: int) -> list[Tokens]:
        """All of its sequences of this length."""
        if length not in self.memo:
            every = itertools.product(range(len(self.vocabulary.pieces)), repeat=length)
            self.memo[length] = [tokens for tokens in every if self.matches(tokens)]
        return self.memo[length]

    def allowed(self, partial: Partial, position: int) -> set[int]:
        """The tokens at a position of the members that agree with what is known."""
        key = (tuple(partial), position)
        if key not in self.memo:
            self.memo[key] = {
                member[position]
                for member in self.members(len(partial))
                if all(t is None or t == m for t, m in zip(partial, member, strict=True))
            }
        return self.memo[key]

    def span(self, start: int, stop: int) -> PatternSpan:
        """The span that a request has for it."""
        pattern = Pattern.of(self.regex, None)
        return PatternSpan(start, stop, pattern, compiled(pattern, self.vocabulary), self.pad)


@dataclass
class Matching(Naive):
    """The naive sampler, each token of a step restricted to what can be completed together with those before it."""

    language: Language = None  # type: ignore[assignment]
    draw: Draw = field(default_factory=Draw)

    def _from(self, plan: Plan, k: int, known: dict[int, int], p: float) -> Iterator[tuple[Tokens, float]]:
        length = len(plan.sigma)
        if k == len(plan.steps):
            yield tuple(known[i] for i in range(length)), p
            return
        clean = decoded(plan, k)
        sequential = clean[len(decoded(plan, min(k, plan.diffusion))) :]
        key = (clean, tuple(known[i] for i in clean), plan.steps[k], sequential, length)
        if key not in self.memo:
            self.memo[key] = self.logits(plan, k, known)
        logits = self.memo[key]
        # Blocks draw the tokens of a step from left to right, all others in the order of the schedule.
        now = sorted(plan.steps[k]) if self.kind.startswith("bd3lm") else plan.steps[k]

        def step(j: int, drawn: dict[int, int], chance: float) -> Iterator[tuple[Tokens, float]]:
            if j == len(plan.steps[k]):
                yield from self._from(plan, k + 1, drawn, chance)
                return
            position = now[j]
            fits = sorted(self.language.allowed([drawn.get(i) for i in range(length)], position))
            scores = logits[[plan.steps[k].index(position)]].clone()
            scores[:, [v for v in range(scores.shape[1]) if v not in fits]] = -math.inf
            table = self.draw.probabilities(scores, self.mask)[0].tolist()
            for v in fits:
                if table[v] > 0:
                    yield from step(j + 1, {**drawn, position: v}, chance * table[v])

        yield from step(0, dict(known), p)


def known_rows(known: Mapping[int, int], length: int) -> list[int | None]:
    """Tokens by position as a row."""
    return [known.get(i) for i in range(length)]
