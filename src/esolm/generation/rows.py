"""Prompts, and texts with blanks, as rows of tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..data import Tokenizer

Row = list[int | None]
"""The tokens of a sample: given ids, and None where a token is to be drawn."""
BLANK = "____"
MOST_TOKENS = 4096
"""The longest blank that a range may name."""

Size = int | str
"""Tokens of a blank: a number, or a range such as 1-12."""


@dataclass(frozen=True)
class Blanked:
    """A text cut at its blanks."""

    pieces: list[list[int]]  # tokens before, between and behind the blanks
    leads: list[str]  # the space that was before each blank and belongs to what fills it

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str, blank: str) -> Blanked:
        """Cut a text. Raises ValueError if it has no blank."""
        parts = re.split(f"{BLANK}_*", text) if blank == BLANK else text.split(blank)
        leads = [""] * (len(parts) - 1)
        if tokenizer.spaced:  # the space before a blank is part of the word that fills it
            leads = [" " if part.endswith(" ") else "" for part in parts[:-1]]
            parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
        if not leads:
            raise ValueError(f"the text has no blank: mark what is to be filled in with {blank!r}")
        return cls([tokenizer.encode(parts[0]), *map(tokenizer.encode_after, parts[1:])], leads)

    def row(self, sizes: Sequence[int]) -> Row:
        """The tokens, with None for those of the blanks, of which each has its size."""
        row = Row(self.pieces[0])
        for size, piece in zip(sizes, self.pieces[1:], strict=True):
            row += [*[None] * size, *piece]
        return row

    def spans(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Where each blank starts and stops."""
        found, at = [], 0
        for size, piece in zip(sizes, self.pieces, strict=False):
            at += len(piece)
            found.append((at, at + size))
            at += size
        return found

    def candidates(self, tokens_per_blank: Size | Sequence[Size]) -> list[list[int]]:
        """The sizes that each blank may have. Raises ValueError."""
        blanks = len(self.leads)
        one = isinstance(tokens_per_blank, int | str)
        given: list[Size] = [tokens_per_blank] * blanks if one else list(tokens_per_blank)  # type: ignore
        found = [_range(size) for size in given]
        if len(found) != blanks or any(min(sizes) < 1 for sizes in found):
            raise ValueError(
                f"tokens_per_blank is {given}; the text has {blanks} blanks: give a number for all, such as 4, a "
                'range such as "1-12", or a list with one of these for each blank; each has at least one token'
            )
        return found


def _range(size: Size) -> list[int]:
    """The numbers of 8, "8" or "1-12"."""
    if isinstance(size, int):
        return [size]
    found = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", str(size))
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not least <= most <= MOST_TOKENS:
        raise ValueError(f"tokens_per_blank is {size!r}; it must be a number of tokens, or a range such as 1-12")
    return [*range(least, most + 1)]


def runs(row: Sequence[int | None]) -> list[tuple[int, int]]:
    """Where each run of tokens to be drawn starts and stops."""
    found: list[tuple[int, int]] = []
    for i, token in enumerate(row):
        if token is None:
            found[-1:] = [(found[-1][0], i + 1)] if found and found[-1][1] == i else [*found[-1:], (i, i + 1)]
    return found


def prompted(
    tokenizer: Tokenizer,
    usual: int,
    prompt: str | Sequence[str] | None,
    num_samples: int | None,
    length: int | None,
    tokens: Sequence[Sequence[int | None]] | None,
) -> tuple[list[Row], int]:
    """The different rows to sample, which repeat in turn, and the number of samples; as in `LanguageModel.sample`.

    usual: the length if none is given. Raises ValueError.
    """
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
    if tokens is not None:
        if prompt is not None or length is not None:
            raise ValueError("give either tokens, or prompt and length")
        if num_samples not in (None, len(tokens)):
            raise ValueError(f"num_samples is {num_samples}; there are {len(tokens)} rows of tokens: leave it out")
        return [list(row) for row in tokens], len(tokens)
    if not (prompt is None or isinstance(prompt, str | Sequence)):
        raise ValueError(f"prompt is {prompt!r}; it must be a text or several. For a number write num_samples=…")
    length = usual if length is None else length
    if length < 1:
        raise ValueError(f"length is {length}; it must be at least 1")
    prompts = [prompt or ""] if prompt is None or isinstance(prompt, str) else list(prompt)
    total = len(prompts) if num_samples is None else num_samples
    if len(prompts) not in (1, total):
        raise ValueError(f"{len(prompts)} prompts for {total} samples: give one prompt, or one for each sample")
    encoded = [tokenizer.encode(text) for text in prompts]
    if (longest := max(map(len, encoded), default=0)) > length:
        raise ValueError(f"the prompt has {longest} tokens and length is {length}: shorten it, or raise length")
    return [[*ids, *[None] * (length - len(ids))] for ids in encoded], total
