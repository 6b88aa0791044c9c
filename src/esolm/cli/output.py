"""The file of `--out`: JSON lines that are written as they are made, so that an interrupted command can resume.

Lines go to FILE.partial, and the request that they belong to is in FILE.request. The finished file is FILE alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..runtime import files


def check_writable(path: Path, option: str, force: bool = True) -> None:
    """Raise ValueError, before any work is done, if `path` cannot be written or must not be replaced."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give the name of a file")
    if path.exists() and not (force and path.is_file()):
        raise ValueError(f"{path} already exists: choose another {option}, or add --force to replace it")
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent} for {option} {path}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write {option} {path}: the folder {path.parent} is not writable")


class SampleFile:
    """The samples of one request, in order; `done` of them are on the disk."""

    def __init__(self, path: Path, request: Mapping[str, Any], force: bool = False) -> None:
        """Open FILE.partial, and keep its samples if they belong to the same request.

        Raises ValueError if they belong to another; with force, discards them.
        """
        self.path, self.partial = path, partial_of(path)
        self._request = path.with_name(f"{path.name}.request")
        self.done = size = 0
        wanted = json.loads(json.dumps(dict(request)))
        if self.partial.exists() and (other := self._differing(wanted)) and not force:
            raise ValueError(
                f"{self.partial} holds samples of another request ({other}): give the same options to resume, choose "
                "another --out, or add --force to discard them"
            )
        if self.partial.exists() and not other:
            with self.partial.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):  # otherwise it was cut off
                        self.done, size = self.done + 1, size + len(line)
        else:
            files.write_json(self._request, wanted)
        self._file = self.partial.open("r+b" if self.partial.exists() else "wb")
        self._file.truncate(size)
        self._file.seek(size)

    def _differing(self, request: Mapping[str, Any]) -> str:
        """The options that differ from those of the samples on the disk."""
        try:
            there = json.loads(self._request.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return f"{self._request.name} is missing"
        names = sorted(k for k in {*there, *request} if there.get(k) != request.get(k))
        return ", ".join(f"{name} was {there.get(name)!r} and is {request.get(name)!r}" for name in names)

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line for each record, and wait until they are on the disk."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done += len(lines)

    def finish(self) -> None:
        """Rename FILE.partial to FILE."""
        self._file.close()
        os.replace(self.partial, self.path)
        self._request.unlink(missing_ok=True)
        print(f"wrote {self.path}", file=sys.stderr)


def partial_of(path: Path) -> Path:
    """Where the lines of an unfinished file are."""
    return path.with_name(f"{path.name}.partial")
