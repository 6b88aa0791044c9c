"""Files that are complete or absent: atomic writes, tensors, hashes, and JSON lines."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that is synced and renamed to it when the block ends, and removed on an error."""
    with making(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (partial, str(partial)):
            raise unwritable(path, error) from error
        raise
    sync(path.parent)


def write(path: Path, content: str | bytes) -> None:
    """Write the whole file, in UTF-8, or leave what was there."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Any, indent: int = 1, sort_keys: bool = False) -> None:
    """Write JSON atomically; raises ValueError for NaN and infinity, which JSON does not have."""
    write(path, json.dumps(content, indent=indent, sort_keys=sort_keys, allow_nan=False) + "\n")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically, with the permissions of any other new file."""
    with replacing(path) as partial:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = partial.stat().st_mode  # as the umask says; safetensors makes its files readable by the owner only
        copies = {name: t.detach().contiguous().cpu() for name, t in tensors.items()}
        try:
            save_file(copies, partial, None if metadata is None else dict(metadata))
        except SafetensorError as error:  # a full disk
            raise OSError(f"cannot write {path}: {error}") from error
        partial.chmod(mode)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside `path` that takes its place when the block ends, and is removed on an error."""
    partial, old = (path.parent / f".{path.name}.{word}" for word in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    made = [parent for parent in path.parents if not parent.exists()]
    with making(path):
        partial.mkdir(parents=True)
    try:
        yield partial
        for file in (*partial.rglob("*"), partial):
            sync(file)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)  # left by a process that was killed at the end of this function
            os.rename(path, old)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # another process may have put something there
            for parent in made:
                parent.rmdir()
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    if os.name == "nt":  # which can sync neither folders nor files that are open for reading
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def unreadable(path: Path, error: OSError) -> ValueError:
    """An error that says why a file cannot be read, and what to do."""
    advice = "check its permissions" if isinstance(error, PermissionError) else "check the path and the disk"
    return ValueError(f"{path} cannot be read: {error.strerror or error}; {advice}")


def unwritable(path: Path, error: OSError) -> OSError:
    """An error of the same class that says why a file or folder cannot be made, and what to do."""
    there = next(parent for parent in path.absolute().parents if parent.exists())
    parent = next((parent for parent in path.parents if parent.absolute() == there), there)  # as it was given
    why = error.strerror or str(error)
    if path.is_dir():
        why = "it is a folder"
    elif not parent.is_dir():
        why = f"{parent} is a file"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):  # /proc has no place for new files
        why = f"the folder {parent} is not writable"
    return type(error)(f"cannot write {path}: {why}; choose another place")


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Give errors of making `path`, or what becomes it, its name and advice."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def check_keys(path: Path, given: Mapping[str, Any], cls: type[Any], group: str = "") -> None:
    """Raise ValueError if a group of keys in a JSON file has one that is no field of the dataclass."""
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := [f"{group}{key}" for key in given if key not in known]:
        raise ValueError(
            f"{path} has the unknown key {unknown[0]}: it was changed, or written by a newer esolm than {__version__}; "
            "remove the key or update esolm"
        )


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number, from 1, and the object of each line that is not blank.

    Only a newline ends a line: str.splitlines would also split at a U+2028 inside a text. Raises ValueError that names
    the line unless it is a JSON object in UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _record(line, f"line {number} of {path}")
    except OSError as error:
        raise unreadable(path, error) from error


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is JSON of type {type(record).__name__}; it must be an object")
    return record
