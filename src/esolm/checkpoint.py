"""Checkpoints: folders of safetensors and one JSON file, complete or absent, never pickle.

    checkpoints/step-00001000/{model,ema,optimizer}.safetensors, state.json

A folder is written under a hidden name, synced, and renamed: a name that matches `step-*` is a whole checkpoint.
`state.json` holds the size and the SHA-256 of the other files, so that damage is found before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import __version__
from .nested import differing

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The folder name of a step."""
    return f"step-{step:08d}"


def list_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint under root, ascending."""
    found = (_NAME.fullmatch(p.name) for p in root.iterdir() if p.is_dir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def latest(root: Path) -> Path | None:
    """The folder of the last checkpoint under root, if there is one."""
    steps = list_steps(root)
    return root / name_of(steps[-1]) if steps else None


def best(root: Path) -> Path | None:
    """The folder of the checkpoint with the lowest validation metric under root, if any was validated."""
    scored = [(metric, step) for step in list_steps(root) if (metric := _metric(root / name_of(step))) is not None]
    return root / name_of(min(scored)[1]) if scored else None


def save(
    root: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int
) -> Path:
    """Write one checkpoint and then drop the old ones, all but the last `keep` and the best.

    tensors: file stem -> flat tensors by name. state: what JSON holds, with `identity` (what must match on loading)
    and `metric` (the validation loss at this step, or None). Raises ValueError and leaves no trace if the disk refuses.
    """
    final = root / name_of(step)
    if final.exists():
        raise ValueError(f"{final} exists already: a checkpoint is never overwritten; move it away first")
    clean(root)
    partial = root / f".{final.name}.partial"
    try:
        partial.mkdir(parents=True)
        files = {f"{stem}.safetensors": _write(partial / f"{stem}.safetensors", t) for stem, t in tensors.items()}
        record = {"format": FORMAT, "version": __version__, "step": step, **state, "files": files}
        _write_text(partial / "state.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
        _sync(partial)
        os.rename(partial, final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        before = latest(root)
        raise ValueError(
            f"could not write checkpoint {final}: {error}. Nothing was overwritten; the last complete checkpoint is "
            f"{before or 'none'}. Make room on the disk and run the same command again"
        ) from error
    _prune(root, keep)
    return final


def read(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint after a check that its files are there and have their sizes."""
    path = folder / "state.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a checkpoint of esolm: it has no state.json")
    try:
        state = json.loads(path.read_text())
        files, found = state["files"], state["format"]
        sizes = {name: entry["bytes"] for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"state.json cannot be read ({error!r})") from error
    if found != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {found!r}, this version of esolm reads {FORMAT}")
    for name, size in sizes.items():
        if not (folder / name).is_file():
            raise _damaged(folder, f"{name} is missing")
        if (actual := (folder / name).stat().st_size) != size:
            raise _damaged(folder, f"{name} has {actual} bytes of {size}")
    return state


def load(folder: Path, stem: str, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of one file (`model`, `ema`, `optimizer`) of a checkpoint, checked against their hash."""
    files = read(folder)["files"]
    name = f"{stem}.safetensors"
    if name not in files:
        raise ValueError(f"{folder} has no {name}: it holds {', '.join(sorted(files))}")
    if _digest(folder / name) != files[name]["sha256"]:
        raise _damaged(folder, f"{name} does not have the SHA-256 that state.json records")
    return load_file(folder / name, device=device)


def check_identity(folder: Path, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ValueError, naming what differs, unless the checkpoint belongs to this network, system and data."""
    wrong = [
        f"{key} is {theirs!r} there and {mine!r} here"
        for key, (theirs, mine) in differing(state.get("identity", {}), identity).items()
    ]
    if wrong:
        raise ValueError(f"{folder} is of another run: {'; '.join(wrong)}. Nothing was changed")


def clean(root: Path) -> None:
    """Remove what a killed process left half written or half removed."""
    for folder in [*root.glob(".step-*.partial"), *root.glob(".step-*.old")]:
        shutil.rmtree(folder)


def _metric(folder: Path) -> float | None:
    return read(folder).get("metric")


def _prune(root: Path, keep: int) -> None:
    # A folder loses its valid name before its files, so that a kill here leaves no partial checkpoint.
    steps = list_steps(root)
    stay = {name_of(step) for step in steps[-keep:]}
    if (top := best(root)) is not None:
        stay.add(top.name)
    for name in {name_of(step) for step in steps} - stay:
        os.rename(root / name, root / f".{name}.old")
        shutil.rmtree(root / f".{name}.old")


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, path)
    _sync(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _damaged(folder: Path, what: str) -> ValueError:
    others = [name_of(step) for step in list_steps(folder.parent) if folder.name != name_of(step)]
    advice = f"move it away to go on from {others[-1]}" if others else "there is no other checkpoint beside it"
    return ValueError(f"checkpoint {folder} is damaged: {what}. Nothing was changed; {advice}")
