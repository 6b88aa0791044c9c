"""Documents to rows of equal length.

Shapes: R rows, L length. A packing is a generator over chunks that keeps at most one row between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PACKINGS = ("wrap", "cls", "pad", "single", "conditional")


class Chunk(NamedTuple):
    """Some encoded documents: the ids of all, prompt before text, and per document what is whose."""

    ids: np.ndarray  # [tokens]
    texts: np.ndarray  # [documents] tokens of the text
    prompts: np.ndarray  # [documents] tokens of the prompt
    sizes: np.ndarray  # [documents] UTF-8 bytes of the text


class Rows(NamedTuple):
    """Packed rows and, for `pad` the valid, for `conditional` the given tokens at the head of each."""

    tokens: np.ndarray  # [R, L]
    counts: np.ndarray | None = None  # [R]


@dataclass
class Tally:
    """What became of the documents of a split."""

    documents: int = 0
    skipped: int = 0  # documents that could not be packed
    tokens: int = 0  # in the rows, to be scored
    dropped: int = 0  # tokens cut off
    bytes: float = 0  # of the text in the rows


Packing = Callable[[Iterable[Chunk], Tally], Iterator[Rows]]


def packing(name: str, length: int, eos_id: int | None, bos_id: int | None, target_length: int) -> Packing:
    """The packing of that name."""
    if name not in PACKINGS:
        raise ValueError(f"no packing {name!r}: choose one of {', '.join(PACKINGS)}")
    if length < 4:
        raise ValueError(f"length is {length}: it must be at least 4")
    if name == "conditional" and not 1 < target_length <= length:
        raise ValueError(f"target_length is {target_length}: it must be at least 2 and at most length, {length}")
    if eos_id is None or bos_id is None:
        raise ValueError(f"packing {name!r} needs an end of text, which this tokenizer lacks: choose another")
    if name == "wrap":
        return lambda chunks, tally: wrap(chunks, tally, length, eos_id)
    if name == "cls":
        return lambda chunks, tally: cls(chunks, tally, length, bos_id)
    if name == "pad":
        return lambda chunks, tally: pad(chunks, tally, length, eos_id)
    if name == "single":
        return lambda chunks, tally: single(chunks, tally, length, eos_id)
    return lambda chunks, tally: conditional(chunks, tally, length, eos_id, length - target_length)


def wrap(chunks: Iterable[Chunk], tally: Tally, length: int, eos: int) -> Iterator[Rows]:
    """All documents as one stream, each ended by EOS, cut into rows; a last row that is not full is dropped."""
    left, kept, size = np.empty(0, np.int64), 0, 0
    for chunk in chunks:
        tally.documents += len(chunk.texts)
        size += int(chunk.sizes.sum())
        stream = np.concatenate([left, np.insert(chunk.ids, np.cumsum(chunk.texts), eos)])
        full = len(stream) // length * length
        kept += full
        left = stream[full:]
        tally.tokens += full
        yield Rows(stream[:full].reshape(-1, length))
    tally.dropped = len(left)
    tally.bytes = size * kept / max(kept + len(left), 1)


def cls(chunks: Iterable[Chunk], tally: Tally, length: int, bos: int) -> Iterator[Rows]:
    """As `wrap` with [CLS] for EOS, and [CLS] again as the first and the last token of every row."""
    for rows in wrap(chunks, tally, length - 2, bos):
        tally.tokens += 2 * len(rows.tokens)
        yield Rows(np.pad(rows.tokens, ((0, 0), (1, 1)), constant_values=bos))


def pad(chunks: Iterable[Chunk], tally: Tally, length: int, eos: int) -> Iterator[Rows]:
    """A document a row, ended by EOS and filled up; one too long is cut, and then has no EOS."""
    for chunk in chunks:
        tokens = np.full((len(chunk.texts), length), eos, np.int64)
        counts = np.minimum(chunk.texts + 1, length)
        for row, ids in zip(tokens, np.split(chunk.ids, np.cumsum(chunk.texts)[:-1])):
            row[: len(ids)] = ids[:length]
        cut = (chunk.texts + 1 - counts).astype(np.int64)
        tally.documents += len(tokens)
        tally.tokens += int(counts.sum())
        tally.dropped += int(cut.sum())
        tally.bytes += float((chunk.sizes * (counts / (chunk.texts + 1))).sum())
        yield Rows(tokens, counts)


def single(chunks: Iterable[Chunk], tally: Tally, length: int, eos: int) -> Iterator[Rows]:
    """A document a row, then EOS to the end, all scored, so that samples end themselves: a target without a prompt."""
    for rows in conditional(chunks, tally, length, eos, 0):
        yield Rows(rows.tokens)


def conditional(chunks: Iterable[Chunk], tally: Tally, length: int, eos: int, prompt_length: int) -> Iterator[Rows]:
    """A prompt and its target a row: the prompt's last `prompt_length` tokens, then the target, then EOS to the end.

    How much of a prompt is kept does not depend on its target, which is unknown when sampling. A target that does not
    fit with one EOS is skipped, because a cut one would teach a false end.
    """
    for chunk in chunks:
        rows, given = [], []
        ends = np.cumsum(chunk.texts + chunk.prompts)
        for end, text, prompt, size in zip(ends, chunk.texts, chunk.prompts, chunk.sizes):
            start = end - text
            kept = min(prompt, prompt_length)
            tally.documents += 1
            tally.dropped += int(prompt - kept)
            if kept + text + 1 > length:
                tally.skipped += 1
                continue
            row = np.full(length, eos, np.int64)
            row[: kept + text] = chunk.ids[start - kept : end]
            rows.append(row)
            given.append(kept)
            tally.tokens += int(length - kept)
            tally.bytes += int(size)
        yield Rows(np.array(rows, np.int64).reshape(-1, length), np.array(given, np.int64))
