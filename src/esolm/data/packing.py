"""Packing documents into rows of equal length.

Shapes: R rows, L length. A packing is a generator over chunks that carries at most one row from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

PACKINGS = ("wrap", "cls", "pad", "single", "conditional")
CONTINUOUS = ("wrap", "cls")  # rows are cut from one stream; in the others a row is a document


class Chunk(NamedTuple):
    """Encoded documents: their ids, each prompt before its text, and the number of tokens and bytes of each."""

    ids: np.ndarray  # [tokens]
    texts: np.ndarray  # [documents] tokens in the text
    prompts: np.ndarray  # [documents] tokens in the prompt
    sizes: np.ndarray  # [documents] UTF-8 bytes in the text


class PackedRows(NamedTuple):
    """PackedRows and, per row, the number of leading tokens that are valid (`pad`) or given (`conditional`)."""

    tokens: np.ndarray  # [R, L]
    counts: np.ndarray | None = None  # [R]


@dataclass
class PackingTotals:
    """Totals over the documents of a split, updated while packing."""

    documents: int = 0
    skipped: int = 0  # documents that could not be packed
    tokens: int = 0  # scored tokens in the rows
    dropped: int = 0  # tokens that were cut off
    bytes: float = 0  # UTF-8 bytes of the text in the rows


Packing = Callable[[Iterable[Chunk], PackingTotals], Iterator[PackedRows]]


def packing(
    name: str,
    length: int,
    eos_id: int | None,
    bos_id: int | None,
    target_length: int | None,
    num_eos: int | None = None,
) -> Packing:
    """Return the packing called `name`.

    For the conditional packing, target_length: tokens reserved for a target and its EOS; None: prompts are not cut.
    num_eos: EOS tokens that are scored after a target; None: all.
    """
    if name not in PACKINGS:
        raise ValueError(f"no packing {name!r}: choose one of {', '.join(PACKINGS)}")
    if length < 4:
        raise ValueError(f"length is {length}: it must be at least 4")
    if name == "conditional" and target_length is not None and not 1 < target_length <= length:
        raise ValueError(f"target_length is {target_length}: it must be at least 2 and at most length, {length}")
    if eos_id is None or bos_id is None:
        raise ValueError(
            f"packing {name!r} needs an EOS token, which this tokenizer does not have: choose another tokenizer"
        )
    if name == "conditional":
        prompt_length = length if target_length is None else length - target_length
        return partial(conditional, length=length, eos=eos_id, prompt_length=prompt_length, num_eos=num_eos)
    if name == "cls":
        return partial(cls, length=length, bos=bos_id)
    return partial({"wrap": wrap, "pad": pad, "single": single}[name], length=length, eos=eos_id)


def wrap(chunks: Iterable[Chunk], totals: PackingTotals, length: int, eos: int) -> Iterator[PackedRows]:
    """Join all documents, each followed by EOS, and cut the stream into rows; drop an incomplete last row."""
    left, kept, size = np.empty(0, np.int64), 0, 0
    for chunk in chunks:
        totals.documents += len(chunk.texts)
        size += int(chunk.sizes.sum())
        stream = np.concatenate([left, np.insert(chunk.ids, np.cumsum(chunk.texts), eos)])
        full = len(stream) // length * length
        kept += full
        left = stream[full:]
        totals.tokens += full
        yield PackedRows(stream[:full].reshape(-1, length))
    totals.dropped = len(left)
    totals.bytes = size * kept / max(kept + len(left), 1)


def cls(chunks: Iterable[Chunk], totals: PackingTotals, length: int, bos: int) -> Iterator[PackedRows]:
    """Pack as `wrap` with [CLS] instead of EOS, and add [CLS] at the start and end of every row."""
    for rows in wrap(chunks, totals, length - 2, bos):
        totals.tokens += 2 * len(rows.tokens)
        yield PackedRows(np.pad(rows.tokens, ((0, 0), (1, 1)), constant_values=bos))


def pad(chunks: Iterable[Chunk], totals: PackingTotals, length: int, eos: int) -> Iterator[PackedRows]:
    """Put one document and EOS in each row and pad; a document that is too long is truncated and has no EOS."""
    for chunk in chunks:
        tokens = np.full((len(chunk.texts), length), eos, np.int64)
        counts = np.minimum(chunk.texts + 1, length)
        for row, ids in zip(tokens, np.split(chunk.ids, np.cumsum(chunk.texts)[:-1])):
            row[: len(ids)] = ids[:length]
        cut = (chunk.texts + 1 - counts).astype(np.int64)
        totals.documents += len(tokens)
        totals.tokens += int(counts.sum())
        totals.dropped += int(cut.sum())
        totals.bytes += float((chunk.sizes * (counts / (chunk.texts + 1))).sum())
        yield PackedRows(tokens, counts)


def single(chunks: Iterable[Chunk], totals: PackingTotals, length: int, eos: int) -> Iterator[PackedRows]:
    """Put one document in each row, then EOS to the end, all scored, so that a model learns where texts end."""
    for rows in conditional(chunks, totals, length, eos, 0):
        yield PackedRows(rows.tokens)


def conditional(
    chunks: Iterable[Chunk],
    totals: PackingTotals,
    length: int,
    eos: int,
    prompt_length: int,
    num_eos: int | None = None,
) -> Iterator[PackedRows]:
    """Put the last `prompt_length` tokens of a prompt, its target, and EOS to the end in each row.

    How much of a prompt is kept does not depend on its target, which is unknown when sampling. A target that does not
    fit with one EOS is skipped, because a truncated one would teach a wrong end. The loader turns all but the first
    `num_eos` EOS into padding.
    """
    for chunk in chunks:
        rows, given = [], []
        ends = np.cumsum(chunk.texts + chunk.prompts)
        for end, text, prompt, size in zip(ends, chunk.texts, chunk.prompts, chunk.sizes):
            start = end - text
            kept = min(prompt, prompt_length)
            totals.documents += 1
            totals.dropped += int(prompt - kept)
            if kept + text + 1 > length:
                totals.skipped += 1
                continue
            row = np.full(length, eos, np.int64)
            row[: kept + text] = chunk.ids[start - kept : end]
            rows.append(row)
            given.append(kept)
            totals.tokens += int(length - kept if num_eos is None else text + min(num_eos, length - kept - text))
            totals.bytes += int(size)
        yield PackedRows(np.array(rows, np.int64).reshape(-1, length), np.array(given, np.int64))
