"""The texts that are scored: prepared data, files, folders and corpora as sequences of one length.

Shapes: n sequences, L length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.batch import Batch
from ..data import Document, Loader, Manifest, Tokenizer, corpora, detokenize
from ..data.documents import watched


@dataclass(frozen=True)
class Sequences:
    """Texts to score, cut to one length."""

    name: str
    batch: Batch  # on the CPU
    bytes: int  # UTF-8 bytes of the scored text

    def __len__(self) -> int:
        return len(self.batch.x)

    @property
    def tokens(self) -> Tensor:
        """Scored tokens of each sequence, float64 [n]."""
        return self.batch.scored.sum(1).double()

    @property
    def sha256(self) -> str:
        """A hash of all that is scored and seen."""
        digest = hashlib.sha256(repr(tuple(self.batch.x.shape)).encode())
        for part in self.batch:
            digest.update(b"none" if part is None else part.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def rows(self, index: Tensor, device: torch.device) -> Batch:
        """Some of the sequences, on a device."""
        return self.batch.rows(index).trimmed().to(device)


def read(
    spec: str,
    tokenizer: Tokenizer,
    trained_length: int,
    *,
    split: str = "valid",
    length: int | None = None,
    num_sequences: int | None = None,
    field: str = "text",
    detokenizer: str | None = None,
    lines: bool = False,
    newlines: bool = False,
    delimiter: str | None = None,
    eos: bool = True,
    frame: bool = False,
    advice: str | None = None,
) -> Sequences:
    """Read the first sequences of prepared data, of a file or folder of text, or of a corpus.

    length: tokens of a sequence, by default the training length. Files are read whole; corpora that have splits, and
    pydocs, by `split`. lines: each line of a text file is a text; newlines: with its line break. delimiter: the line
    that separates the texts of a file. eos: each text ends with EOS. frame: each sequence begins with BOS and ends with
    EOS, and the incomplete last one is dropped. advice: report lines that look like a forgotten delimiter, as `watched`
    does. Raises ValueError for data that another tokenizer prepared.
    """
    if num_sequences is not None and num_sequences < 1:
        raise ValueError(f"num_sequences is {num_sequences}; it must be at least 1")
    if (Path(spec) / "manifest.json").is_file():
        given = (field, detokenizer, lines, newlines, delimiter, eos, frame)
        if given != ("text", None, False, False, None, True, False):
            raise ValueError(
                f"{spec} is prepared data, read and packed already: leave field, detokenizer, lines, newlines, "
                "delimiter, eos and frame out"
            )
        return _prepared(spec, tokenizer, trained_length, split, length, num_sequences)
    length = trained_length if length is None else length
    if length < (least := 3 if frame else 1):
        raise ValueError(f"length is {length}; it must be at least {least}")
    if newlines and not lines:
        raise ValueError("newlines keeps the line breaks of texts that are lines: add --lines, or leave it out")
    corpus = corpora.corpus(spec, corpora.Reading(field, lines=lines, newlines=newlines, delimiter=delimiter))
    rules = detokenize.known(detokenizer) or corpus.detokenizer
    texts = watched((d.text for d in _documents(corpus, split)), spec, advice if delimiter is None else None)
    documents = (detokenize.detokenize(text, rules) for text in texts)
    inner = length - 2 if frame else length
    ids, size = _stream(documents, tokenizer, None if num_sequences is None else num_sequences * inner, eos)
    if not len(ids):
        raise ValueError(f"there is no text in {spec!r}: nothing to score")
    if frame:
        return _framed(spec, ids, tokenizer, inner)
    missing = -len(ids) % length
    x = torch.from_numpy(np.pad(ids, (0, missing))).view(-1, length)
    valid = None if not missing else (torch.arange(x.numel()) < len(ids)).view_as(x)
    return Sequences(spec, Batch(x, valid), size)


def _framed(spec: str, ids: np.ndarray, tokenizer: Tokenizer, inner: int) -> Sequences:
    """Sequences of `inner` ids between BOS and EOS; an incomplete last one is dropped."""
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise ValueError(f"frame needs BOS and EOS, and tokenizer {tokenizer.name} has none: leave it out")
    full = len(ids) // inner
    if not full:
        raise ValueError(f"{spec!r} has {len(ids)} tokens, fewer than one sequence: give a shorter --length")
    x = torch.from_numpy(ids[: full * inner]).view(full, inner)
    ends = [torch.full((full, 1), id) for id in (tokenizer.bos_id, tokenizer.eos_id)]
    return Sequences(spec, Batch(torch.cat([ends[0], x, ends[1]], 1)), _bytes(x.flatten(), tokenizer))


def _prepared(
    folder: str, tokenizer: Tokenizer, trained: int, split: str, length: int | None, limit: int | None
) -> Sequences:
    manifest = Manifest.load(folder)
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise ValueError(
            f"{folder} was made by tokenizer {manifest.tokenizer} ({manifest.tokenizer_sha256[:12]}), the model has "
            f"{tokenizer.name} ({tokenizer.sha256[:12]}): prepare it with the run as --tokenizer"
        )
    if length is not None and length != manifest.length:
        raise ValueError(f"length is {length}, and {folder} was prepared with {manifest.length}: prepare it again")
    if length is None and manifest.length > trained:
        long = manifest.length
        raise ValueError(f"{folder} has sequences of {long}, the model was trained on {trained}: give --length {long}")
    loader = Loader(folder, split, 256, shuffle=False)
    count = loader.sequences if limit is None else min(limit, loader.sequences)
    batches = [loader.batch(step) for step in range(-(-count // 256))]
    valid, given = (None if parts[0] is None else torch.cat(parts)[:count] for parts in list(zip(*batches))[1:])
    batch, whole = Batch(torch.cat([b.x for b in batches])[:count], valid, given), manifest.splits[split]
    size = whole.bytes if count == whole.sequences else _bytes(batch.x[batch.scored], tokenizer)
    return Sequences(folder, batch, size)


def _bytes(ids: Tensor, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of ids, without special tokens."""
    special = (tokenizer.mask_id, tokenizer.eos_id, tokenizer.bos_id)
    return len(tokenizer.decode(i for i in ids.tolist() if i not in special).encode())


def _documents(corpus: corpora.Corpus, split: str) -> Iterator[Document]:
    """The documents of a split: the corpus's own split, or one by content, or the whole file."""
    if split not in ("train", "valid"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'valid'")
    if corpus.name.startswith("text:"):
        return corpus.train()
    if corpus.valid is not None:
        return corpus.train() if split == "train" else corpus.valid()
    return (document for name, document in corpora.split(corpus, None, 0.05)() if name == split)


def _stream(texts: Iterable[str], tokenizer: Tokenizer, limit: int | None, eos: bool) -> tuple[np.ndarray, int]:
    """Up to `limit` ids of all texts, each with EOS at its end if `eos`, and the bytes of the text in them."""
    if eos and tokenizer.eos_id is None:
        raise ValueError(f"documents are joined by an end of text, and tokenizer {tokenizer.name} has none")
    found, held, size = [], 0, 0
    for text in texts:
        encoded = tokenizer.core.encode(text, add_special_tokens=False)
        ids = [*encoded.ids, tokenizer.eos_id] if eos else encoded.ids
        room = math.inf if limit is None else limit - held
        if len(ids) > room:
            ids = ids[: int(room)]
            text = text[: encoded.offsets[len(ids) - 1][1]]
        found.append(np.array(ids, np.int64))
        held += len(ids)
        size += len(text.encode())
        if held == limit:
            break
    return np.concatenate(found) if found else np.empty(0, np.int64), size
