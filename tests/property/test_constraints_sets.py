"""The tokens that the automata allow are those of the sequences that match, found by trying every sequence."""

from __future__ import annotations

import random

import pytest

from esolm.constraints.automaton import Vocabulary
from esolm.constraints.guide import PatternSpan
from esolm.constraints.walk import Walk, lengths
from support.patterns import Language

PLAIN = Vocabulary((b"a", b"b", b"ab", b"ba", None, None), 4, False, "plain")
SPACED = Vocabulary((b" ", b"a", b" a", b" ab", b"b", None, None), 5, True, "spaced")
EURO = Vocabulary((b"\xe2", b"\x82", b"\xac", b"\xe2\x82", "€a".encode(), b"a", None), 6, False, "bytes of UTF-8")
NO_END = Vocabulary((b"a", b"b", b"aab", None), None, False, "without EOS")
CASES = [
    (PLAIN, "a|ab"), (PLAIN, "(ab)*"), (PLAIN, "a*?b"), (PLAIN, "(a|ab)(b|ba)?a*"), (PLAIN, "[ab]{3,5}"),
    (PLAIN, "(?:a|b)*a(?:a|b){2}"), (PLAIN, ""), (PLAIN, "(ab|ba)+|a{7}"), (SPACED, "a( a)*"), (SPACED, " a+"),
    (SPACED, "(a| )*b"), (SPACED, " *"), (EURO, "€*"), (EURO, "a.a?"), (EURO, ".{1,2}"), (NO_END, "a+b"),
    (NO_END, "(aab)*"), (PLAIN, "^b+a$"),
]  # fmt: skip
LENGTH = 4


def tokens(walk: Walk, span: PatternSpan, position: int) -> set[int]:
    classes = walk.classes(position).bits
    return {i for i, kind in enumerate(span.steps.automaton.class_of) if classes[kind]}


@pytest.mark.parametrize(("vocabulary", "regex"), CASES, ids=lambda case: getattr(case, "sha256", case))
@pytest.mark.parametrize("pad", [True, False])
def test_every_position_in_every_order(vocabulary: Vocabulary, regex: str, pad: bool) -> None:
    """Sequences drawn token by token in random orders: before each draw, the sets of all positions, and those of a walk
    that begins anew."""
    dice = random.Random(7)
    for begin in (0, 3):
        language = Language(vocabulary, regex, pad and vocabulary.eos_id is not None, first=begin == 0)
        span, count = language.span(begin, begin + LENGTH), len(language.members(LENGTH))
        if not count:
            with pytest.raises(ValueError, match="tokens"):
                span.walk([None] * (begin + LENGTH))
            continue
        for _ in range(4):
            row: list[int | None] = [None] * LENGTH
            walk = span.walk([0] * begin + row)
            for position in dice.sample(range(LENGTH), LENGTH):
                anew = span.walk([0] * begin + row)
                for i in range(LENGTH):
                    if row[i] is None:
                        assert tokens(walk, span, i) == tokens(anew, span, i) == language.allowed(row, i)
                row[position] = dice.choice(sorted(tokens(walk, span, position)))
                before = walk.copy()
                walk.commit(position, int(span.steps.automaton.class_of[row[position]]))
                assert before.known[position] is None
            assert language.matches([t for t in row if t is not None])


@pytest.mark.parametrize(("vocabulary", "regex"), CASES, ids=lambda case: getattr(case, "sha256", case))
def test_lengths(vocabulary: Vocabulary, regex: str) -> None:
    for pad in (False, vocabulary.eos_id is not None):
        language = Language(vocabulary, regex, pad)
        found = lengths(language.span(0, 1).steps, language.span(0, 1).first_state, pad, LENGTH)
        assert found == [n for n in range(LENGTH + 1) if language.members(n)]


def test_given_tokens_that_cannot_match_are_named_as_such() -> None:
    span = Language(PLAIN, "(ab)*", False).span(0, 3)
    with pytest.raises(ValueError, match="given"):
        span.walk([1, None, None])
    with pytest.raises(ValueError, match="4 to"):
        Language(PLAIN, "[ab]{8,16}", False).span(0, 3).walk([None] * 3)
