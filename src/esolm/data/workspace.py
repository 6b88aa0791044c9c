"""The hidden folder beside the output in which `prepare` works, locked and resumable."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..runtime.files import making
from .manifest import FILE, Manifest

_REQUEST = "request.json"
_PATIENCE = 10.0  # seconds that a part waits while another part creates the folder


def finished(out: Path, request: dict[str, Any]) -> Manifest | None:
    """Return the manifest of a folder made by the same request, None if there is nothing yet.

    Raises ValueError if `out` contains anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / FILE).is_file():
        raise ValueError(f"{out} exists and is not prepared data: choose another folder")
    manifest = Manifest.load(out)
    if not _same(manifest.request, request):
        wanted = json.loads(json.dumps(request))
        other = [name for key in request for name in _differing(key, manifest.request.get(key), wanted[key])]
        raise ValueError(f"{out} was prepared with another {', '.join(other)}: choose another folder, or remove it")
    shutil.rmtree(_partial(out), ignore_errors=True)  # left behind by a process killed after the last rename
    print(f"{out} is already prepared: reused", file=sys.stderr)
    return manifest


@contextmanager
def working(out: Path, request: dict[str, Any], shared: bool = False) -> Iterator[Path]:
    """Lock and yield the folder beside `out`, with what an interrupted run of the same request left in it.

    shared: share the folder with other parts of the same request, and keep it afterwards.
    """
    work = _partial(out)
    with making(out):
        work.mkdir(parents=True, exist_ok=True)
    with _locked(work, request, shared, out):
        yield work
        if not shared:
            shutil.rmtree(work)


def _differing(key: str, old: Any, new: Any) -> list[str]:
    """The names of the options that differ; those that are kept together under one key by their own names."""
    if old == new:
        return []
    if key != "reading" or not (isinstance(old, dict) and isinstance(new, dict)):
        return [key]
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def _same(request: dict[str, Any], other: dict[str, Any]) -> bool:
    return json.dumps(request, sort_keys=True) == json.dumps(other, sort_keys=True)


def _partial(out: Path) -> Path:
    return out.absolute().parent / f".{out.name}.partial"


@contextmanager
def _locked(work: Path, request: dict[str, Any], shared: bool, out: Path) -> Iterator[None]:
    """Lock the folder, exclusively or together with other parts of the request, and claim it for the request."""
    try:
        import fcntl
    except ImportError:  # Windows: a second process in the same folder is not detected
        _claim(work, request)
        yield
        return
    lock = os.open(work, os.O_RDONLY)
    deadline = time.monotonic() + (_PATIENCE if shared else 0)
    try:
        while True:
            try:
                if shared:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if _claimed(work, request):
                        break
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _claim(work, request)
                if shared:
                    fcntl.flock(lock, fcntl.LOCK_SH)
                break
            except BlockingIOError as error:  # another part may be claiming the folder, which takes a moment
                fcntl.flock(lock, fcntl.LOCK_UN)
                if time.monotonic() >= deadline:
                    raise ValueError(f"another process is preparing {out}: wait for it to finish") from error
                time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def _claimed(work: Path, request: dict[str, Any]) -> bool:
    note = work / _REQUEST
    return note.is_file() and _same(json.loads(note.read_text(encoding="utf-8")), request)


def _claim(work: Path, request: dict[str, Any]) -> None:
    """Write the request into the folder, after removing what another request left there."""
    if _claimed(work, request):
        return
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (work / f"{_REQUEST}.part").write_text(json.dumps(request), encoding="utf-8")
    os.replace(work / f"{_REQUEST}.part", work / _REQUEST)
