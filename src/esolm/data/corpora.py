"""Corpora: a spec names a corpus, and a corpus streams the documents of each split.

Memory holds one document at a time and 8 bytes of hash for each held-out document, unless the split is by content.
"""

from __future__ import annotations

import glob
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..runtime.files import sha256
from . import files, pydocs
from .documents import Document, DocumentStream, Reading, SplitStream

SPECS = "PATH[,PATH…] of files, folders or globs, pydocs, lm1b[:PATH], openwebtext[:PATH], hf:NAME[,CONFIG]"
_LISTED = 32  # more source files than this are recorded as their number and one hash
_HUB = {"lm1b": "dvruette/lm1b", "openwebtext": "Skylion007/openwebtext"}
_LM1B_PARTS = {"train": "training-monolingual*/news.en-*", "valid": "heldout-monolingual*/news.en.heldout-*"}


@dataclass(frozen=True)
class Corpus:
    """The documents of each split; without `valid` and `holdout` the split is by content."""

    name: str
    sources: tuple[tuple[str, str], ...]  # file name, sha256
    train: DocumentStream
    valid: DocumentStream | None = None
    size: int | None = None  # bytes to read, for the progress bar
    packing: str = "wrap"
    detokenizer: str | None = None
    holdout: int | None = None  # the last N documents are the valid split


def corpus(spec: str, reading: Reading | None = None) -> Corpus:
    """Return the corpus that a spec names; a path is the same as text:PATH."""
    reading = reading or Reading()
    kind, _, rest = spec.partition(":")
    if reading.delimiter is not None and (spec in ("pydocs", "openwebtext") or kind in ("hf", "lm1b")):
        raise ValueError(f"a delimiter separates the documents of text files, and {spec} has none: omit it")
    if spec == "pydocs":
        sources = ((pydocs.name(), pydocs.sha256()),)
        return Corpus(pydocs.name(), sources, lambda: (Document(text) for text in pydocs.documents()))
    if kind == "text" and rest:
        return _files(kind, rest, reading)
    if kind == "hf" and rest:
        return _hub(kind, rest, reading)
    if kind == "lm1b":
        lines = Reading(field=reading.field, lines=True)
        found = _hub(kind, _HUB[kind], lines) if not rest else _lm1b(rest, lines)
        return replace(found, packing="cls", detokenizer="lm1b")
    if kind == "openwebtext":
        found = _files(kind, rest, reading) if rest else _hub(kind, _HUB[kind], reading)
        return replace(found, holdout=100_000)
    if Path(spec).expanduser().exists() or glob.has_magic(spec) or "," in spec:
        return _files("text", spec, reading)
    raise ValueError(f"no corpus, file or folder {spec!r}: give one of {SPECS}; a text itself goes into a file")


# Splits


def digest(document: Document, seed: int = 0) -> int:
    """Return 64 bits of hash of the group or the prompt, so that its targets stay together, or else of the text."""
    key = document.group or document.prompt or document.text
    hashed = hashlib.blake2b(key.encode(), digest_size=8, key=seed.to_bytes(8, "little", signed=True))
    return int.from_bytes(hashed.digest(), "little")


def split(corpus: Corpus, valid: Corpus | None, fraction: float, seed: int = 0) -> SplitStream:
    """Return a stream of ("train" or "valid", document).

    The valid split is the corpus `valid`, the corpus's own, its last `holdout` documents, or, by default, the documents
    whose hash falls into `fraction` of the range. In the first three cases train documents equal to a valid one are
    dropped.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"valid_fraction is {fraction}: it must lie between 0 and 1")
    given = valid.train if valid is not None else corpus.valid
    if given is not None:
        parts = {"train": corpus.train, "valid": given}
        return _without_held(lambda: ((name, d) for name, part in parts.items() for d in part()), given())
    if corpus.holdout is not None:
        return _split_last(corpus, corpus.holdout)
    border = int(fraction * 2.0**64)
    return lambda: (("valid" if digest(d, seed) < border else "train", d) for d in corpus.train())


def split_tail(corpus: Corpus, fraction: float, cut: bool) -> SplitStream:
    """Hold out the last `fraction` of the text of a corpus that has too few documents for a split by content.

    cut: cut the document that the border falls into, at the last paragraph break, line break or space before the
    border; otherwise hold it out whole.
    """
    total = sum(len(d.text) for d in corpus.train())
    if not total:
        raise ValueError(f"{corpus.name} is empty: give a corpus with text")
    border = min(total - 1, int((1 - fraction) * total))
    reach = min(border, total - border) // 2  # how far before the border a break is searched

    def sides() -> Iterator[tuple[str, Document]]:
        end = 0
        for d in corpus.train():
            start, end = end, end + len(d.text)
            if end <= border:
                yield "train", d
            elif start >= border or not cut:
                yield "valid", d
            else:
                place = _last_break(d.text, border - start, reach)
                parts = (("train", d.text[:place]), ("valid", d.text[place:]))
                yield from ((name, Document(text, d.prompt)) for name, text in parts if text.strip())

    return _without_held(sides, (d for name, d in sides() if name == "valid"))


def _last_break(text: str, end: int, reach: int) -> int:
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, max(0, end - reach), end)
        if found >= 0:
            return found + len(mark)
    return end


def _without_held(stream: SplitStream, valid: Iterable[Document]) -> SplitStream:
    """Drop train documents that are equal to a valid one."""
    held = {digest(d) for d in valid}
    return lambda: ((name, d) for name, d in stream() if name == "valid" or digest(d) not in held)


def _split_last(corpus: Corpus, holdout: int) -> SplitStream:
    """Hold out the last documents: one pass counts them and keeps the hashes of the last."""
    window: deque[int] = deque(maxlen=holdout)
    total = 0
    for document in corpus.train():
        window.append(digest(document))
        total += 1
    if total <= holdout:
        raise ValueError(f"{corpus.name} has {total} documents and holdout is {holdout}: hold out fewer")
    held = set(window)

    def stream() -> Iterator[tuple[str, Document]]:
        for i, d in enumerate(corpus.train()):
            if i >= total - holdout:
                yield "valid", d
            elif digest(d) not in held:
                yield "train", d

    return stream


# Sources


def _files(kind: str, spec: str, reading: Reading) -> Corpus:
    paths = files.paths(spec)
    found = [pair for path in paths for pair in files.expand(path)]
    size = sum(path.stat().st_size for _, path in found)
    if not size:
        raise ValueError(f"{', '.join(name for name, _ in found[:_LISTED])} is empty: give a file with text")
    sources = tuple((name, sha256(path)) for name, path in found)
    if len(sources) > _LISTED:
        sources = ((f"{len(sources)} files", hashlib.sha256(repr(sources).encode()).hexdigest()),)
    return Corpus(
        name=f"{kind}:" + ",".join(Path(path).name or Path(path).resolve().name for path in paths),
        sources=sources,
        train=lambda: (d for name, path in found for d in files.read(path, name, reading)),
        size=None if any(path.suffix in files.COMPRESSED for _, path in found) else size,
    )


def _lm1b(path: str, reading: Reading) -> Corpus:
    """The benchmark's own folder, which contains its splits, or other files with one sentence per line."""
    if not all(any(Path(path).glob(pattern)) for pattern in _LM1B_PARTS.values()):
        return _files("lm1b", path, reading)
    train, valid = (_files("lm1b", f"{path}/{pattern}", reading) for pattern in _LM1B_PARTS.values())
    both = train.sources + valid.sources
    return replace(train, name="lm1b", sources=both, valid=valid.train, size=(train.size or 0) + (valid.size or 0))


def _hub(kind: str, spec: str, reading: Reading) -> Corpus:
    """A dataset of the hub, or a local folder that `datasets` can load."""
    datasets = files.extra("datasets", "datasets")
    name, _, config = (spec, "", "") if Path(spec).exists() else spec.partition(",")
    saved = Path(name, "dataset_dict.json").is_file() or Path(name, "state.json").is_file()
    data = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config or None)
    parts = data if isinstance(data, dict) else {"train": data}
    if "train" not in parts:
        raise ValueError(f"{spec!r} has no split 'train': its splits are {', '.join(map(repr, parts))}")

    def documents(part: str) -> Iterator[Document]:
        for i, record in enumerate(parts[part]):
            yield from (d for d in reading.record(record, f"{name}, {part}, row {i}") if d.text.strip())

    valid = next((part for part in ("validation", "valid", "test") if part in parts), None)
    used = ["train"] if valid is None else ["train", valid]
    label = Path(name).name if Path(name).exists() else spec
    return Corpus(
        name=kind if kind != "hf" else f"hf:{label}",
        sources=tuple((f"{label}/{part}", str(parts[part]._fingerprint)) for part in used),
        train=lambda: documents("train"),
        valid=None if valid is None else lambda: documents(valid),
    )
