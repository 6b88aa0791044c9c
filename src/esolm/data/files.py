"""Reading documents from text and JSON-lines files, as a stream."""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator
from itertools import chain, takewhile
from pathlib import Path
from types import ModuleType
from typing import IO

from .documents import Document, Reading

_PIECE = 1 << 14  # characters; files longer than four of these are cut into documents of about this size
_TEXT, _LINES, _JSON = (".txt", ".md"), (".smi",), (".jsonl",)
COMPRESSED = (".gz", ".zst")


def paths(spec: str) -> list[str]:
    """Split PATH[,PATH…] at its commas, unless the whole spec is an existing path or a glob with matches."""
    whole = Path(spec).expanduser()
    if "," not in spec or whole.exists() or (glob.has_magic(spec) and glob.glob(str(whole), recursive=True)):
        return [spec]
    return spec.split(",")


def expand(path: str) -> list[tuple[str, Path]]:
    """Return the files of a path, folder or glob, sorted by a name that does not depend on the machine."""
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


def read(path: Path, name: str, reading: Reading) -> Iterator[Document]:
    """Yield the non-empty documents of one file; `name` stands for the file in error messages."""
    kind = _kind(path)
    if reading.messages_field is not None and kind not in _JSON:
        raise ValueError(f"{name} is not {' or '.join(_JSON)}, which chats are read from: write one JSON record a line")
    prompt = None if reading.prompt_field is None else ""  # plain text has no prompt field: only the separator is given
    with _open(path) as file:
        try:
            if kind in _JSON:
                documents = (d for i, line in enumerate(file, 1) if line.strip() for d in _json(line, i, name, reading))
            elif reading.lines or kind in _LINES:
                documents = (Document(line if reading.newlines else line.rstrip("\n"), prompt) for line in file)
            elif reading.delimiter is not None:
                documents = (Document(text, prompt) for text in _delimited(file, name, reading.delimiter))
            else:
                documents = (Document(text, prompt) for text in _pieces(file))
            yield from (d for d in documents if d.text.strip())
        except UnicodeDecodeError as error:
            if _is_binary(path):
                raise ValueError(
                    f"{name} is not a text file: extract its text first, for example with pdftotext"
                ) from error
            raise ValueError(
                f"{name} is not UTF-8 text (byte 0x{error.object[error.start]:02x}): convert it, for example with "
                f"`iconv -f {_guessed_encoding(path)} -t UTF-8`"
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{name} is damaged or incomplete ({error}): get the file again") from error


def extra(module: str, name: str) -> ModuleType:
    """Import an optional dependency, or raise ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"this corpus needs {module}: pip install 'esolm[{name}]'") from error


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _open(path: Path) -> IO[str]:
    encoding = "utf-8-sig"  # without the byte-order mark that some editors write
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding)
    if path.suffix == ".zst":
        decompressor = extra("zstandard", "zstd").ZstdDecompressor()
        return io.TextIOWrapper(decompressor.stream_reader(path.open("rb"), read_across_frames=True), encoding=encoding)
    return path.open(encoding=encoding)


def _is_binary(path: Path) -> bool:
    if path.suffix in (".gz", ".zst"):
        return False
    with path.open("rb") as file:
        start = file.read(4096)
    return start.startswith(b"%PDF") or (b"\0" in start and start[:2] not in (b"\xff\xfe", b"\xfe\xff"))


def _guessed_encoding(path: Path) -> str:
    with path.open("rb") as file:
        return "UTF-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"


def _json(line: str, number: int, name: str, reading: Reading) -> Iterator[Document]:
    where = f"{name}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    for document in reading.record(record, where):
        if "\\u" in line:  # only an escape can write a lone surrogate, which UTF-8 cannot encode
            try:
                "".join(filter(None, document)).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{where} is not UTF-8 text ({error}): remove the unpaired surrogate") from error
        yield document


def _delimited(file: IO[str], name: str, delimiter: str) -> Iterator[str]:
    """Yield the stripped texts between the lines that are `delimiter`; raise ValueError if there is no such line."""
    held: list[str] = []
    found = False
    for line in file:
        if line.strip() != delimiter.strip():
            held.append(line)
            continue
        yield "".join(held).strip()
        held, found = [], True
    if not found:
        raise ValueError(f"{name} has no line {delimiter!r}: give the line that separates its documents as --delimiter")
    yield "".join(held).strip()


def _pieces(file: IO[str]) -> Iterator[str]:
    """Yield a short file whole; cut a long one at a blank line after _PIECE characters, at any line after twice that.

    Lines are read up to _PIECE characters at a time, so memory is bounded even for a file without line breaks.
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
