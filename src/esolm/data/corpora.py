"""Where documents come from: a spec names a corpus, a corpus is a stream of documents for each split.

Nothing is held in memory but the document at hand and, where a split is given outright, 8 bytes of hash for each
document of the valid split.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import io
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from . import pydocs

SPECS = "pydocs, text:PATH[,PATH…], lm1b[:PATH], openwebtext[:PATH], hf:NAME[,CONFIG]"
_PIECE = 1 << 14  # characters; longer files than four of these are cut into documents of about this size
_TEXT, _LINES, _JSON, _PACKED = (".txt", ".md"), (".smi",), (".jsonl",), (".gz", ".zst")
_LISTED = 32  # more sources than these are named by their number and one hash
_HUB = {"lm1b": "dvruette/lm1b", "openwebtext": "Skylion007/openwebtext"}
_LM1B_PARTS = {"train": "training-monolingual*/news.en-*", "valid": "heldout-monolingual*/news.en.heldout-*"}


class Document(NamedTuple):
    """A text and, for conditional data, the prompt that it answers."""

    text: str
    prompt: str | None = None


@dataclass(frozen=True)
class Reading:
    """How a record or a file becomes documents."""

    field: str = "text"
    prompt_field: str | None = None  # set for conditional data, whose text is in target_field
    target_field: str = "target"
    lines: bool = False

    def record(self, record: Any, where: str) -> Iterator[Document]:
        """The documents of one JSON record: a list of sentences is joined, a list of targets is one document each."""
        if self.prompt_field is None:
            yield Document(_joined(_value(record, self.field, where)))
            return
        prompt = _joined(_value(record, self.prompt_field, where))
        targets = _value(record, self.target_field, where)
        for target in [targets] if isinstance(targets, str) else targets:
            yield Document(target, prompt)


@dataclass(frozen=True)
class Corpus:
    """Documents for each split; without `valid` the split is made by content."""

    name: str
    sources: tuple[tuple[str, str], ...]  # file name, sha256
    train: Callable[[], Iterator[Document]]
    valid: Callable[[], Iterator[Document]] | None = None
    size: int | None = None  # bytes to read, for the progress bar
    packing: str = "wrap"
    detokenizer: str | None = None
    holdout: int | None = None  # the last so many documents are the valid split


def corpus(spec: str, reading: Reading | None = None) -> Corpus:
    """The corpus that a spec names."""
    reading = reading or Reading()
    kind, _, rest = spec.partition(":")
    if spec == "pydocs":
        return Corpus(
            name=pydocs.name(),
            sources=((pydocs.name(), pydocs.sha256()),),
            train=lambda: (Document(text) for text in pydocs.documents()),
        )
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
    raise ValueError(f"no corpus {spec!r}: choose one of {SPECS}")


def digest(document: Document, seed: int = 0) -> int:
    """64 bits of the content: of the prompt, where there is one, so that its targets stay together."""
    key = document.prompt or document.text
    hashed = hashlib.blake2b(key.encode(), digest_size=8, key=seed.to_bytes(8, "little", signed=True))
    return int.from_bytes(hashed.digest(), "little")


def split(
    corpus: Corpus, valid: Corpus | None, fraction: float, seed: int = 0
) -> Callable[[], Iterator[tuple[str, Document]]]:
    """A stream of (split, document), "train" or "valid", that may be started again and again.

    Where the valid documents are given outright, train documents equal to one of them are left out.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"valid_fraction is {fraction}: it must lie between 0 and 1")
    given = valid.train if valid is not None else corpus.valid
    if given is not None:
        held = {digest(document) for document in given()}
        return lambda: _outright(corpus.train, given, held)
    if corpus.holdout is not None:
        return _last(corpus, corpus.holdout)
    border = int(fraction * 2.0**64)
    return lambda: (("valid" if digest(d, seed) < border else "train", d) for d in corpus.train())


def _outright(
    train: Callable[[], Iterator[Document]], valid: Callable[[], Iterator[Document]], held: set[int]
) -> Iterator[tuple[str, Document]]:
    yield from (("train", d) for d in train() if digest(d) not in held)
    yield from (("valid", d) for d in valid())


def _last(corpus: Corpus, holdout: int) -> Callable[[], Iterator[tuple[str, Document]]]:
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


# Files


def _files(kind: str, paths: str, reading: Reading) -> Corpus:
    found = [pair for path in paths.split(",") for pair in _expand(path)]
    sources = tuple((name, _sha256(path)) for name, path in found)
    if len(sources) > _LISTED:
        sources = ((f"{len(sources)} files", hashlib.sha256(repr(sources).encode()).hexdigest()),)
    return Corpus(
        name=f"{kind}:" + ",".join(Path(path).name or Path(path).resolve().name for path in paths.split(",")),
        sources=sources,
        train=lambda: (d for name, path in found for d in _read(path, name, reading)),
        size=None if any(path.suffix in _PACKED for _, path in found) else sum(p.stat().st_size for _, p in found),
    )


def _lm1b(path: str, reading: Reading) -> Corpus:
    """The benchmark's own folder, which has its splits, or other files of a sentence a line."""
    if not all(any(Path(path).glob(pattern)) for pattern in _LM1B_PARTS.values()):
        return _files("lm1b", path, reading)
    train, valid = (_files("lm1b", f"{path}/{pattern}", reading) for pattern in _LM1B_PARTS.values())
    both = train.sources + valid.sources
    return replace(train, name="lm1b", sources=both, valid=valid.train, size=(train.size or 0) + (valid.size or 0))


def _expand(path: str) -> list[tuple[str, Path]]:
    """The files of a path, folder or glob, each with a name that does not depend on the machine, in its order."""
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.name, root)]
    if root.is_dir():
        kinds = (*_TEXT, *_LINES, *_JSON)
        files = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if _kind(p) in kinds and p.is_file()}
        what = f"no file of {', '.join(kinds)} (plain, .gz or .zst) in the folder {path!r}"
    else:
        fixed = Path(*takewhile(lambda part: not glob.has_magic(part), root.parts))
        matches = [Path(p) for p in glob.glob(str(root), recursive=True)]
        files = {p.relative_to(fixed).as_posix(): p for p in matches if p.is_file()}
        what = f"no file {path!r}"
    if not files:
        raise ValueError(f"{what}: give a file, a folder or a glob (in quotes)")
    return sorted(files.items())


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix


def _sha256(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()


def _read(path: Path, name: str, reading: Reading) -> Iterator[Document]:
    """The documents of one file, streamed; empty ones are left out."""
    kind = _kind(path)
    prompt = None if reading.prompt_field is None else ""  # of what has no fields: the separator alone is given
    with _open(path) as file:
        try:
            if kind in _JSON:
                documents = (d for i, line in enumerate(file, 1) if line.strip() for d in _json(line, i, name, reading))
            elif reading.lines or kind in _LINES:
                documents = (Document(line.rstrip("\n"), prompt) for line in file)
            else:
                documents = (Document(text, prompt) for text in _pieces(file))
            yield from (d for d in documents if d.text.strip())
        except UnicodeError as error:
            raise ValueError(f"{name} is not UTF-8 ({error}): convert it first") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{name} is damaged or incomplete ({error}): get it again") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".zst":
        return io.TextIOWrapper(
            _extra("zstandard", "zstd").ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True),
            encoding="utf-8",
        )
    return path.open(encoding="utf-8")


def _json(line: str, number: int, name: str, reading: Reading) -> Iterator[Document]:
    where = f"{name}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    for document in reading.record(record, where):
        if "\\u" in line:
            "".join(filter(None, document)).encode()  # a lone surrogate, which only an escape can write, is no text
        yield document


def _value(record: Any, field: str, where: str) -> str | list[str]:
    value = record.get(field) if isinstance(record, dict) else None
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return value
    fields = ", ".join(map(repr, record)) if isinstance(record, dict) else "none"
    raise ValueError(f"{where}: no text in field {field!r}; its fields are {fields}")


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _pieces(file: IO[str]) -> Iterator[str]:
    """A file as one document, or, if long, cut at a blank line after _PIECE characters, at any line after twice that.

    A line is read up to _PIECE characters at a time, so memory is bounded whatever the file holds.
    """
    lines = iter(lambda: file.readline(_PIECE), "")
    head: list[str] = []
    size = 0
    for line in lines:
        head.append(line)
        size += len(line)
        if size >= 4 * _PIECE:
            break
    else:
        yield "".join(head)
        return
    held: list[str] = []
    size = 0
    for line in chain(head, lines):
        held.append(line)
        size += len(line)
        if size >= 2 * _PIECE or (size >= _PIECE and not line.strip()):
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


# The hub


def _extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"this corpus needs {module}: pip install 'esolm[{extra}]'") from error


def _hub(kind: str, spec: str, reading: Reading) -> Corpus:
    """A dataset of the hub, or a folder that `datasets` can load."""
    datasets = _extra("datasets", "datasets")
    name, _, config = spec.partition(",")
    saved = Path(name, "dataset_dict.json").is_file() or Path(name, "state.json").is_file()
    data = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config or None)
    parts = data if isinstance(data, dict) else {"train": data}
    if "train" not in parts:
        raise ValueError(f"{spec!r} has no split 'train' but {', '.join(map(repr, parts))}")

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
