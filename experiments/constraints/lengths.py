"""Blanks of unknown length: python -m experiments.constraints.lengths VALID OUT [--model MODEL] [--number 500]

A span of 1 to 8 tokens is cut out of held-out sentences. How often the true length and the true words are recovered,
and how likely they are: with the length chosen by likelihood, with fixed lengths, by left-to-right generation that sees
only what comes before and ends where the text goes on as it should, and, with --padded, by a model that was trained
with EOS in blanks (padded.py). OUT is a file of JSON lines, one for each sentence; a second call goes on where it ends.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import esolm
from esolm.generation.rows import BLANK, Blanked

MOST, FIXED, ORDERS = 8, (1, 2, 4, 8), 8
GREEDY: dict[str, Any] = {"temperature": 0.0}


class Case(NamedTuple):
    """A sentence with a span cut out; tokens: those of the span."""

    before: str
    cut: str
    behind: str
    tokens: list[int]

    @property
    def text(self) -> str:
        return f"{self.before} {BLANK} {self.behind}"


def cut_out(sentence: str, dice: random.Random, tokenizer: Any) -> Case | None:
    """Cut out one to six words; None if they have more than MOST tokens."""
    words = sentence.split()
    count = dice.randint(1, 6)
    first = dice.randint(1, len(words) - count - 1)
    parts = (words[:first], words[first : first + count], words[first + count :])
    before, cut, behind = (" ".join(part) for part in parts)
    head = tokenizer.encode(before)
    whole = tokenizer.encode(f"{before} {cut}")
    tokens = whole[len(head) :]
    return Case(before, cut, behind, tokens) if whole[: len(head)] == head and len(tokens) <= MOST else None


def sentences(text: str) -> list[str]:
    """The sentences of eight to 24 words."""
    every = re.split(r"(?<=[.!?])\s+|<\|endoftext\|>", text)
    return [sentence for sentence in every if 8 <= len(sentence.split()) <= 24 and sentence.isascii()]


def cases(path: Path, number: int, tokenizer: Any) -> list[Case]:
    """Spans of random sentences."""
    dice, every = random.Random(0), sentences(path.read_text("utf-8"))
    dice.shuffle(every)
    found = (case for sentence in every if (case := cut_out(sentence, dice, tokenizer)) is not None)
    return [case for _, case in zip(range(number), found)]


def filled(lm: Any, case: Case, tokens: Any, **options: Any) -> str:
    """What stands between the two parts."""
    text = lm.infill(case.text, tokens_per_blank=tokens, **GREEDY, **options).texts[0]
    return text[len(case.before) : len(text) - len(case.behind)].strip()


def left_to_right(lm: Any, case: Case) -> str:
    """The words up to the first one of `behind`, or all, generated from what comes before."""
    length = len(lm.tokenizer.encode(case.before)) + MOST + 2
    text = lm.sample(case.before, length=length, sampler="left_to_right", **GREEDY).texts[0][len(case.before) :]
    head, stop, _ = text.partition(f" {case.behind.split()[0]}")
    return head.strip() if stop else text.strip()


def nats(lm: Any, case: Case, content: list[int]) -> float:
    """-log p of the tokens in the blank given the text around it and their number."""
    cut = Blanked.of(lm.tokenizer, case.text, BLANK)
    (start, stop), row = cut.spans([len(content)])[0], cut.row([len(content)])
    ids = [content[i - start] if token is None else token for i, token in enumerate(row)]
    given = [i for i in range(len(ids)) if not start <= i < stop]
    return -float(lm.log_prob(ids, given=given, num_orders=ORDERS, seed=0).total[0])


def usual(lm: Any, case: Case) -> dict[str, Any]:
    """One sentence, with the length by likelihood, fixed, known, and from left to right."""
    tokens, right, seconds = len(case.tokens), dict[str, bool](), dict[str, float]()
    ways: dict[str, Any] = {"by likelihood": lambda: filled(lm, case, f"1-{MOST}", length_choice="best")}
    ways |= {f"{n} tokens": lambda n=n: filled(lm, case, n) for n in FIXED}
    ways |= {"true length": lambda: filled(lm, case, tokens), "left to right": lambda: left_to_right(lm, case)}
    for name, way in ways.items():
        begin = time.process_time()
        right[name] = way() == case.cut
        seconds[name] = time.process_time() - begin
    lengths = lm.blank_lengths(case.text, f"1-{MOST}")
    log_length = float(lengths.probabilities[tokens - 1].log())
    known = nats(lm, case, case.tokens)
    after = -float(
        lm.log_prob(case.tokens, context=lm.tokenizer.encode(case.before), alpha_0=0.0, num_orders=1).total[0]
    )
    truth = {"by likelihood": known - log_length, "length": -log_length, "true length": known, "left to right": after}
    return {"right": right, "seconds": seconds, "tokens": tokens, "best": lengths.best[0], "nats": truth}


def with_eos(lm: Any, case: Case) -> dict[str, Any]:
    """One sentence, by a model that fills MOST tokens and ends what it writes in them with EOS."""
    eos, begin = lm.tokenizer.eos_id, time.process_time()
    cut = Blanked.of(lm.tokenizer, case.text, BLANK)
    start, stop = cut.spans([MOST])[0]
    drawn = lm.sample(tokens=[cut.row([MOST])], **GREEDY).tokens[0][start:stop]
    written = drawn[: drawn.index(eos)] if eos in drawn else drawn
    right = lm.tokenizer.decode(lm.tokenizer.encode(case.before) + written)[len(case.before) :].strip() == case.cut
    seconds, padded = time.process_time() - begin, case.tokens + [eos] * (MOST - len(case.tokens))
    return {
        "right": {"with EOS": right}, "seconds": {"with EOS": seconds}, "tokens": len(case.tokens),
        "best": len(written), "nats": {"with EOS": nats(lm, case, padded)},
    }  # fmt: skip


def summary(path: Path) -> dict[str, Any]:
    """Means over the sentences of a file, with standard errors."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]

    def mean(values: list[float]) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        return [round(found.mean().item(), 4), round(found.std().item() / len(found) ** 0.5, 4)]

    def means(part: str, scale: float = 1.0) -> dict[str, list[float]]:
        return {name: mean([scale * row[part][name] for row in rows]) for name in rows[0][part]}

    return {
        "sentences": len(rows),
        "length": {
            "right": mean([row["best"] == row["tokens"] for row in rows]),
            "within one": mean([abs(row["best"] - row["tokens"]) <= 1 for row in rows]),
        },
        "words": means("right"), "nats": means("nats"), "cpu_ms": means("seconds", 1000.0),
    }  # fmt: skip


def main() -> None:
    """Measure the sentences that are missing in the file, and print the summary."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("valid", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument("--model", default="stories")
    options.add_argument("--number", type=int, default=500)
    options.add_argument("--padded", action="store_true")
    found = options.parse_args()
    torch.set_num_threads(1)
    lm = esolm.load(found.model)
    measure = with_eos if found.padded else usual
    done = len(found.out.read_text().splitlines()) if found.out.exists() else 0
    with found.out.open("a") as file:
        for case in cases(found.valid, found.number, lm.tokenizer)[done:]:
            file.write(json.dumps(measure(lm, case)) + "\n")
            file.flush()
    print(json.dumps(summary(found.out), indent=1))


if __name__ == "__main__":
    main()
