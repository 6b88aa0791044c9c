"""Writing encoded chunks, from which an interrupted run resumes, and the shards packed from them."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .chat import ChatFormat
from .detokenize import detokenize
from .documents import Document
from .manifest import Shard, Split
from .packing import Chunk, PackedRows, Packing, PackingTotals
from .tokenizer import Tokenizer

_SHARD = 1 << 26  # tokens per shard, at least


def encode(tokenizer: Tokenizer, detokenizer: str | None, separator: str, documents: Sequence[Document]) -> Chunk:
    """Encode documents; the separator is appended to each prompt."""
    texts = [detokenize(d.text, detokenizer) for d in documents]
    prompts = ["" if d.prompt is None else detokenize(d.prompt, detokenizer) + separator for d in documents]
    return chunk(tokenizer.encode_batch(prompts), tokenizer.encode_batch(texts), texts)


def encode_chats(chat: ChatFormat, documents: Sequence[Document]) -> Chunk:
    """Encode answers and the messages before them by the chat template."""
    pairs = chat.pairs([(json.loads(d.prompt or "[]"), d.text) for d in documents])
    return chunk([head for head, _ in pairs], [ids for _, ids in pairs], [d.text for d in documents])


def chunk(heads: Sequence[list[int]], ids: Sequence[list[int]], texts: Sequence[str]) -> Chunk:
    """Return encoded documents: the ids of each prompt and text, and the text itself."""
    flat = [np.array(part, np.uint32) for pair in zip(heads, ids) for part in pair if part]
    return Chunk(
        ids=np.concatenate(flat) if flat else np.empty(0, np.uint32),
        texts=np.array([len(i) for i in ids]),
        prompts=np.array([len(i) for i in heads]),
        sizes=np.array([len(text.encode()) for text in texts]),
    )


def save_chunk(path: Path, chunk: Chunk) -> None:
    """Write a chunk atomically."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **chunk._asdict())
    os.replace(part, path)


def load_chunks(paths: Iterable[Path]) -> Iterator[Chunk]:
    """Load chunks one at a time; raise ValueError for a damaged file."""
    for path in paths:
        try:
            with np.load(path) as arrays:
                chunk = Chunk(**arrays)
        except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove the folder {path.parent} and prepare again"
            ) from error
        yield chunk


def write_split(folder: Path, name: str, chunks: Iterable[Chunk], packing: Packing, dtype: np.dtype) -> Split:
    """Pack the chunks of a split and write its shards."""
    totals = PackingTotals()
    shards: list[Shard] = []
    rows = (rows for rows in packing(chunks, totals) if len(rows.tokens))
    for first in rows:
        shards.append(_write_shard(folder, f"{name}-{len(shards):05d}.bin", first, rows, dtype))
    sequences, size = sum(shard.sequences for shard in shards), round(totals.bytes)
    return Split(totals.documents, totals.skipped, sequences, totals.tokens, totals.dropped, size, tuple(shards))


def _write_shard(folder: Path, name: str, first: PackedRows, rest: Iterator[PackedRows], dtype: np.dtype) -> Shard:
    """Write one shard: the block `first`, then whole blocks of `rest` until it has _SHARD tokens."""
    shard = Shard(name, 0, "")
    tokens, counts, sequences = hashlib.sha256(), hashlib.sha256(), 0
    rows: PackedRows | None = first
    with (folder / name).open("wb") as file:
        heads = None if first.counts is None else (folder / shard.count_file).open("wb")
        while rows is not None:
            sequences += len(rows.tokens)
            _append(file, tokens, rows.tokens.astype(dtype))
            if heads is not None and rows.counts is not None:
                _append(heads, counts, rows.counts.astype("<u4"))
            rows = next(rest, None) if sequences * first.tokens.shape[1] < _SHARD else None
        if heads is not None:
            heads.close()
    return Shard(name, sequences, tokens.hexdigest(), None if heads is None else counts.hexdigest())


def _append(file: BinaryIO, digest: hashlib._Hash, array: np.ndarray) -> None:
    data = array.tobytes()
    digest.update(data)
    file.write(data)
