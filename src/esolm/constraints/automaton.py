"""Automata over tokens: those over bytes, with every token as one step.

Tokens that lead from every state to the same state are one class, so that tables have a column for each class and not
for each token. Class 0 holds what is never allowed: special tokens, and tokens that no text of the language contains.

Shapes: S states, K classes, V vocabulary, E edges between states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_ENTRIES = 1 << 25
"""Largest table of states times functions or classes."""

Bits = NDArray[np.bool_]
Ints = NDArray[np.int32]


class TooLarge(ValueError):
    """An automaton would exceed its limits."""


@dataclass(frozen=True)
class Vocabulary:
    """The text of each token."""

    pieces: Sequence[bytes | None]  # by id; None is never part of a text
    eos_id: int | None
    strips: bool  # a text loses the space that its first token begins with, as with Llama's tokenizers
    sha256: str


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """An automaton over bytes; state S is the dead one."""

    table: Ints  # [S, 256]
    accepts: Bits  # [S]
    start: int


@dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton over tokens. State S is dead, state S - 1 has read an end-of-sequence token."""

    table: Ints  # [S + 1, K]
    accepts: Bits  # [S + 1]: the text may end here
    start: int
    text_start: int  # the start of a span that begins the text
    class_of: Ints  # [V]

    @property
    def states(self) -> int:
        """Number of states, without the dead one."""
        return len(self.table) - 1

    @functools.cached_property
    def edges(self) -> tuple[NDArray[np.int64], Ints]:
        """The different successors of each state: where those of a state begin in the second array, [S + 2] and [E]."""
        ordered = np.sort(self.table, 1)
        fresh = np.ones(ordered.shape, bool)
        fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        return np.concatenate([[0], fresh.sum(1).cumsum()]), ordered[fresh]

    def accepting(self, pad: bool) -> Bits:
        """Where a span may end, [S + 1]; pad: also after end-of-sequence tokens behind the text."""
        found = self.accepts.copy()
        found[self.states - 1] = pad
        return found

    def check(self) -> None:
        """Raise ValueError unless the arrays fit together, as after reading a file."""
        rows, classes = self.table.shape
        fits = (
            self.table.dtype == self.class_of.dtype == np.int32
            and self.accepts.shape == (rows,)
            and self.accepts.dtype == bool
            and self.class_of.ndim == 1
            and classes > 0
            and min(self.start, self.text_start) >= 0
            and max(self.start, self.text_start) < rows
        )
        if not fits or not _within(self.table, rows) or not _within(self.class_of, classes):
            raise ValueError("the arrays of an automaton do not fit together")


def _within(values: Ints, most: int) -> bool:
    return values.size > 0 and int(values.min()) >= 0 and int(values.max()) < most


class _Functions:
    """What texts do to states: each different map from states to states once, and how a byte continues it."""

    def __init__(self, table: Ints, most: int = MOST_ENTRIES) -> None:
        states = len(table)
        self.table = np.vstack([table, np.full((1, 256), states, np.int32)])
        self.most = most
        columns, self.byte_class = np.unique(self.table, axis=1, return_inverse=True)
        self.columns = np.ascontiguousarray(columns.T)
        self.byte_class = self.byte_class.reshape(-1).tolist()
        identity = np.arange(states + 1, dtype=np.int32)
        self.maps, self.number = [identity], {identity.tobytes(): 0}
        self.dead = self._add(np.full(states + 1, states, np.int32))
        self.next: dict[tuple[int, int], int] = {}

    def _add(self, found: Ints) -> int:
        key = found.tobytes()
        number = self.number.get(key)
        if number is None:
            if len(self.maps) * len(found) > self.most:
                raise TooLarge(f"tokens act in more than {len(self.maps)} ways on its {len(found) - 1} states")
            number = self.number[key] = len(self.maps)
            self.maps.append(found)
        return number

    def after(self, function: int, byte: int) -> int:
        """The function of a text and one more byte."""
        key = (function, self.byte_class[byte])
        found = self.next.get(key)
        if found is None:
            found = self.next[key] = self._add(self.columns[key[1]][self.maps[function]])
        return found

    def of(self, pieces: Sequence[bytes | None]) -> list[int]:
        """The function of each text; texts that begin alike share the work."""
        found = [self.dead] * len(pieces)
        before, path = b"", [0]
        for piece, i in sorted((piece, i) for i, piece in enumerate(pieces) if piece):
            common = 0
            for a, b in zip(before, piece):
                if a != b or common + 1 >= len(path):
                    break
                common += 1
            del path[common + 1 :]
            for byte in piece[common:]:
                path.append(self.after(path[-1], byte))
                if path[-1] == self.dead:
                    break
            found[i] = path[-1] if len(path) == len(piece) + 1 else self.dead
            before = piece[: len(path) - 1]
        return found


def lift(bytewise: ByteAutomaton, vocabulary: Vocabulary) -> Automaton:
    """The automaton over the tokens of a vocabulary. Raises TooLarge."""
    pieces = list(vocabulary.pieces)
    if vocabulary.eos_id is not None:
        pieces[vocabulary.eos_id] = None
    functions = _Functions(bytewise.table)
    number = functions.of(pieces)
    states, start = len(bytewise.table), bytewise.start
    first = [functions.maps[f][start] for f in number]  # where a token leads at the start of a text
    if vocabulary.strips:
        bare = [piece[1:] if piece and piece[:1] == b" " else None for piece in pieces]
        for i, f in enumerate(functions.of(bare)):
            if bare[i] is not None:
                first[i] = functions.maps[f][start] if bare[i] else start
    # Rows: the states over bytes, the start of a text, the state behind EOS, and the dead one.
    text_start, ended, dead = states, states + 1, states + 2
    kinds: dict[tuple[int, int], int] = {(functions.dead, states): 0}
    class_of = np.array([kinds.setdefault(key, len(kinds)) for key in zip(number, map(int, first))], np.int32)
    if len(kinds) * (states + 3) > MOST_ENTRIES:
        raise TooLarge(f"its automaton has {states} states and {len(kinds)} kinds of tokens")
    table = np.full((states + 3, len(kinds) + 1), dead, np.int32)
    accepts = np.zeros(states + 3, bool)
    accepts[:states] = bytewise.accepts
    accepts[text_start] = start < states and bytewise.accepts[start]
    for (function, begin), kind in kinds.items():
        column = functions.maps[function][:states]
        table[:states, kind] = np.where(column == states, dead, column)
        table[text_start, kind] = dead if begin == states else begin
    if vocabulary.eos_id is not None:
        class_of[vocabulary.eos_id] = len(kinds)
        table[accepts, len(kinds)] = ended
        table[ended, len(kinds)] = ended
    return Automaton(table, accepts, dead if start == states else start, text_start, class_of)
