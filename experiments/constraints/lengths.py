"""Blanks of unknown length: python lengths.py TEXT_FILE [SENTENCES] > lengths.json

A span of 1 to 8 tokens is cut out of held-out sentences. How often the true length and the true words are recovered:
with the length chosen by likelihood, with fixed lengths, and by left-to-right generation that sees only what comes
before and ends where the text goes on as it should.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from typing import Any

import torch

import esolm
from esolm.generation.rows import BLANK

MOST, FIXED = 8, (1, 2, 4, 8)
GREEDY: dict[str, Any] = {"temperature": 0.0}


def sentences(path: str, number: int, lm: Any) -> list[tuple[str, str, str, int]]:
    """(before, cut out, behind, tokens) of random spans of words with at most MOST tokens."""
    with open(path, encoding="utf-8") as file:
        text = file.read(20_000_000)
    dice, found = random.Random(0), list[tuple[str, str, str, int]]()
    every = [s for s in re.split(r"(?<=[.!?])\s+|<\|endoftext\|>", text) if 8 <= len(s.split()) <= 24 and s.isascii()]
    dice.shuffle(every)
    for sentence in every:
        words = sentence.split()
        count = dice.randint(1, 6)
        first = dice.randint(1, len(words) - count - 1)
        before, cut, behind = (
            " ".join(words[a:b]) for a, b in ((0, first), (first, first + count), (first + count, None))
        )
        tokens = len(lm.tokenizer.encode(f"{before} {cut}")) - len(lm.tokenizer.encode(before))
        if tokens <= MOST:
            found.append((before, cut, behind, tokens))
        if len(found) == number:
            break
    return found


def filled(lm: Any, before: str, behind: str, tokens: Any, **options: Any) -> str:
    """What stands between the two parts."""
    text = lm.infill(f"{before} {BLANK} {behind}", tokens_per_blank=tokens, **GREEDY, **options).texts[0]
    return text[len(before) : len(text) - len(behind)].strip()


def left_to_right(lm: Any, before: str, behind: str) -> str:
    """The words up to the first one of `behind`, or all, generated from what comes before."""
    length = len(lm.tokenizer.encode(before)) + MOST + 2
    text = lm.sample(before, length=length, sampler="left_to_right", **GREEDY).texts[0][len(before) :]
    head, stop, _ = text.partition(f" {behind.split()[0]}")
    return head.strip() if stop else text.strip()


def main(path: str, number: int) -> dict[str, Any]:
    """Shares of recovered lengths and words, and the likelihood of the true length."""
    lm = esolm.load("stories")
    cases = sentences(path, number, lm)
    names = ["by likelihood", *(f"{n} tokens" for n in FIXED), "true length", "left to right"]
    right, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    length = {"best": 0, "within one": 0, "probability of the truth": 0.0, "uniform": 1 / MOST}
    for number_done, (before, cut, behind, tokens) in enumerate(cases, 1):
        found = lm.blank_lengths(f"{before} {BLANK} {behind}", f"1-{MOST}")
        length["best"] += found.best == (tokens,)
        length["within one"] += abs(found.best[0] - tokens) <= 1
        length["probability of the truth"] += float(found.probabilities[tokens - 1])
        ways = [("by likelihood", f"1-{MOST}", {"length_choice": "best"}), ("true length", tokens, {})]
        for name, size, more in [*ways, *((f"{n} tokens", n, {}) for n in FIXED)]:
            begin = time.process_time()
            right[name] += filled(lm, before, behind, size, **more) == cut
            seconds[name] += time.process_time() - begin
        begin = time.process_time()
        right["left to right"] += left_to_right(lm, before, behind) == cut
        seconds["left to right"] += time.process_time() - begin
        if number_done % 50 == 0:
            print(number_done, right, length, file=sys.stderr, flush=True)
    n = len(cases)
    return {
        "sentences": n,
        "length": {name: round(value / n, 4) if name != "uniform" else value for name, value in length.items()},
        "words": {name: round(value / n, 4) for name, value in right.items()},
        "cpu_ms": {name: round(1000 * value / n, 1) for name, value in seconds.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 500), indent=1))
