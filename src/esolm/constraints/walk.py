"""An automaton along a partly known sequence of fixed length.

`forward[i]` holds the states that the first i tokens can lead to, `backward[i]` those from which the tokens from i on
can lead to an accepted end. A token fits position i iff it leads from a state in forward[i] to one in backward[i + 1]:
exactly then some completion of everything that is known holds it. A new token changes forward sets to its right and
backward sets to its left, up to the first that stays the same.

Shapes: S states, K classes, n positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .automaton import Automaton, Bits

MEMORY = 1 << 27
"""Bytes of remembered sets of one automaton, after which it forgets them."""


class States:
    """A set of states, or of classes."""

    __slots__ = ("bits", "key")

    def __init__(self, bits: Bits) -> None:
        self.bits, self.key = bits, np.packbits(bits).tobytes()

    def __bool__(self) -> bool:
        return bool(self.bits.any())


class Steps:
    """The steps of an automaton from sets of states to sets of states, each computed once."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self._known: dict[tuple[bytes, object], States] = {}
        self._most = max(256, MEMORY // (2 * len(automaton.table)))

    def _remember(self, states: States, way: object, compute: Callable[[Bits], Bits]) -> States:
        key = (states.key, way)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[key] = States(compute(states.bits))
        return found

    def forward(self, states: States, kind: int | None) -> States:
        """Where a token of class `kind`, or any token, leads from these states."""
        return self._remember(states, ("forward", kind), lambda bits: self._forward(bits, kind))

    def backward(self, states: States, kind: int | None) -> States:
        """From where a token of class `kind`, or any token, leads to these states."""
        return self._remember(states, ("backward", kind), lambda bits: self._backward(bits, kind))

    def classes(self, before: States, after: States) -> States:
        """The classes that lead from one set to the other, [K]."""
        return self._remember(before, after.key, lambda bits: self._classes(bits, after.bits))

    def _classes(self, before: Bits, after: Bits) -> Bits:
        return np.asarray(after[self.automaton.table[before]].any(0))

    def _forward(self, bits: Bits, kind: int | None) -> Bits:
        found, table = np.zeros_like(bits), self.automaton.table
        if kind is not None:
            found[table[bits, kind]] = True
        else:
            begins, targets = self.automaton.edges
            for state in bits.nonzero()[0]:
                found[targets[begins[state] : begins[state + 1]]] = True
        found[-1] = False
        return found

    def _backward(self, bits: Bits, kind: int | None) -> Bits:
        if kind is not None:
            return bits[self.automaton.table[:, kind]]
        begins, targets = self.automaton.edges
        return np.asarray(np.logical_or.reduceat(bits[targets], begins[:-1]))


class Walk:
    """The tokens that fit each of n positions."""

    def __init__(self, steps: Steps, known: Sequence[int | None], start: int, accepting: Bits) -> None:
        """known: the class of the token at each position, None where it is to be drawn."""
        self.steps, self.known = steps, list(known)
        first = np.zeros(len(accepting), bool)
        first[start] = start < len(accepting) - 1
        self.forward, self.backward = [States(first)], [States(accepting)]
        for kind in self.known:
            self.forward.append(steps.forward(self.forward[-1], kind))
        for kind in reversed(self.known):
            self.backward.append(steps.backward(self.backward[-1], kind))
        self.backward.reverse()

    @property
    def possible(self) -> bool:
        """Whether there is a completion."""
        return bool((self.forward[0].bits & self.backward[0].bits).any())

    def classes(self, position: int) -> States:
        """The classes of the tokens that fit a position, [K]."""
        return self.steps.classes(self.forward[position], self.backward[position + 1])

    def commit(self, position: int, kind: int) -> None:
        """Fix the class of a position."""
        self.known[position] = kind
        for i in range(position, len(self.known)):
            found = self.steps.forward(self.forward[i], self.known[i])
            if found.key == self.forward[i + 1].key:
                break
            self.forward[i + 1] = found
        for i in range(position, -1, -1):
            found = self.steps.backward(self.backward[i + 1], self.known[i])
            if found.key == self.backward[i].key:
                break
            self.backward[i] = found

    def copy(self) -> Walk:
        """The same walk, to go on with separately."""
        found = object.__new__(Walk)
        found.steps, found.known = self.steps, self.known.copy()
        found.forward, found.backward = self.forward.copy(), self.backward.copy()
        return found


def lengths(steps: Steps, start: int, pad: bool, most: int) -> list[int]:
    """The numbers of tokens, 0 to `most`, that some text of the language has."""
    found, states = [], States(steps.automaton.accepting(pad))
    for n in range(most + 1):
        if states.bits[start]:
            found.append(n)
        states = steps.backward(states, None)
    return found


def shortest(steps: Steps, start: int, accepting: Bits, parts: Sequence[int | Sequence[int]]) -> list[int] | None:
    """The least sizes of runs of unknown tokens, decided from left to right, with which some text is accepted.

    parts: the class of a known token, or the sizes, ascending, that a run may have. None if there is no such text.
    """
    ends = [States(accepting)]  # before the last part, the one before it, and so on
    for part in reversed(parts[1:]):
        if isinstance(part, int):
            ends.append(steps.backward(ends[-1], part))
            continue
        states, either = ends[-1], np.zeros_like(accepting)
        for n in range(1, max(part) + 1):
            states = steps.backward(states, None)
            either |= states.bits & (n in part)
        ends.append(States(either))
    begin = np.zeros_like(accepting)
    begin[start] = start < len(accepting) - 1
    states, found = States(begin), list[int]()
    for part in parts:
        end = ends.pop()
        if isinstance(part, int):
            states = steps.forward(states, part)
            continue
        for n in range(1, max(part) + 1):
            states = steps.forward(states, None)
            if n in part and (states.bits & end.bits).any():
                found.append(n)
                break
        else:
            return None
    return found if (states.bits & accepting).any() else None


def spelled(numbers: Sequence[int]) -> str:
    """Numbers as ranges: 1 to 3, 5, 8."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
