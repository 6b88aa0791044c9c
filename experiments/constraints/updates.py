"""Cost of keeping the allowed tokens up to date, by the size of the vocabulary: python updates.py > updates.json

A sentence of 40 tokens is drawn in random order from random vocabularies of letters and words; times are CPU time of
one committed token, and of the mask over the vocabulary for one draw.
"""

from __future__ import annotations

import json
import random
import time

from esolm.constraints.automaton import Vocabulary
from esolm.constraints.compile import Pattern, compiled
from esolm.constraints.guide import PatternSpan

REGEX, LENGTH, TEXTS = "[A-Z][a-z]*( [a-z]+){3,12}[.!?]", 40, 20


def vocabulary(size: int) -> Vocabulary:
    """Letters, punctuation, and random words with and without a space before them."""
    dice, letters = random.Random(size), "abcdefghijklmnopqrstuvwxyz"
    pieces = {*letters, *letters.upper(), *" .!?,0"}
    while len(pieces) < size:
        pieces.add(dice.choice(["", " "]) + "".join(dice.choices(letters, k=dice.randint(2, 8))))
    return Vocabulary([piece.encode() for piece in sorted(pieces)], None, False, f"random {size}")


def main() -> list[dict[str, float]]:
    """One record for each size."""
    found, pattern = [], Pattern.of(REGEX, None)
    for size in (1_000, 10_000, 100_000):
        words, dice = vocabulary(size), random.Random(0)
        begin = time.process_time()
        steps = compiled(pattern, words)
        compiling = time.process_time() - begin
        span, class_of = PatternSpan(0, LENGTH, pattern, steps, False), steps.automaton.class_of
        committing = masking = 0.0
        for text in range(TEXTS + 1):  # the first one fills the memory of sets
            walk, orders = span.walk([None] * LENGTH), dice.sample(range(LENGTH), LENGTH)
            for position in orders:
                kind = dice.choice(walk.classes(position).bits.nonzero()[0].tolist())
                begin = time.process_time()
                walk.commit(position, kind)
                committing += (time.process_time() - begin) * (text > 0)
            for position in orders:
                begin = time.process_time()
                walk.classes(position).bits[class_of]
                masking += (time.process_time() - begin) * (text > 0)
        found.append(
            {
                "vocabulary": size,
                "states": steps.automaton.states,
                "classes": steps.automaton.table.shape[1],
                "lift_s": round(compiling, 2),
                "commit_us": round(1e6 * committing / TEXTS / LENGTH, 1),
                "mask_us": round(1e6 * masking / TEXTS / LENGTH, 1),
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
