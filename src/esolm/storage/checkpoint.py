"""Checkpoints: folders of safetensors and one JSON file, complete or absent, never pickle.

    checkpoints/step-00001000/{model,ema,optimizer}.safetensors, state.json

Several ranks write `shards/*.safetensors` instead of the three files, one each; `consolidate` merges them into
the three. A folder is written under a hidden name, synced, and renamed, so a folder named `step-*` is complete.
`state.json` holds the size and SHA-256 of the other files, so that damage is detected before anything is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .. import __version__
from ..net.config import with_defaults
from ..runtime import files as disk
from ..runtime.distributed import ALONE, Ranks, Shared
from ..runtime.dotted import differing
from ..systems import completed
from . import sharded

FORMAT = 1
STEMS = ("model", "ema", "optimizer")
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The folder name of a step."""
    return f"step-{step:08d}"


def list_steps(root: Path) -> list[int]:
    """The steps of the checkpoints in `root`, ascending."""
    found = (_NAME.fullmatch(p.name) for p in root.iterdir() if p.is_dir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def latest(root: Path) -> Path | None:
    """The folder of the last checkpoint in `root`, or None."""
    steps = list_steps(root)
    return root / name_of(steps[-1]) if steps else None


def best(root: Path) -> Path | None:
    """The folder of the checkpoint in `root` with the lowest validation metric, or None if none was validated."""
    metrics = {step: read_state(root / name_of(step)).get("metric") for step in list_steps(root)}
    scored = [(metric, step) for step, metric in metrics.items() if metric is not None]
    return root / name_of(min(scored)[1]) if scored else None


def save(
    root: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int
) -> Path:
    """Write one checkpoint, then delete the old ones except the last `keep` and the best.

    tensors: file stem -> tensors by name. state: the content of `state.json`, with `identity` (what must match on
    loading) and `metric` (the validation loss at this step, or None). Raises ValueError if it cannot be written, and
    then leaves nothing behind.
    """
    partial = _begin(root, step)
    with _writing(root, step):
        partial.mkdir(parents=True)
        files = {f"{stem}.safetensors": _write(partial / f"{stem}.safetensors", t) for stem, t in tensors.items()}
        return _end(root, step, state, files, keep)


class Saver:
    """Writes the checkpoints of a run; with several ranks, in the background of training."""

    def __init__(self, root: Path, keep: int, ranks: Ranks = ALONE) -> None:
        self.root, self.keep, self.ranks, self.writers = root, keep, ranks, ranks.aside()
        self.pool = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """See `save`; with several ranks the folder exists only after `wait`."""
        if self.ranks.world == 1:
            return save(self.root, step, tensors, state, self.keep)
        self.wait()
        partial = self.ranks.once(lambda: _begin(self.root, step))
        flat = {f"{stem}/{name}": t for stem, part in tensors.items() for name, t in part.items()}
        writing = sharded.write(partial / sharded.FOLDER, flat, self.writers.group)
        self.pending = self.pool.submit(self._finish, writing, step, dict(state))
        return self.root / name_of(step)

    def _finish(self, writing: Future, step: int, state: Mapping[str, Any]) -> None:
        folder = _partial(self.root, step) / sharded.FOLDER

        def own() -> dict[str, Any]:
            with _writing(self.root, step, tidy=False):  # other ranks may still be writing
                sharded.finish(writing)
                paths = sharded.own_files(folder, self.ranks.rank)
                return {f"{sharded.FOLDER}/{path.name}": _describe(path) for path in paths}

        def close() -> None:
            with _writing(self.root, step):
                _end(self.root, step, {**state, "processes": self.ranks.world}, files, self.keep)

        try:
            parts = self.writers.gathered(self.writers.everywhere(own))
        except Shared:
            if self.ranks.rank == 0:
                shutil.rmtree(folder.parent, ignore_errors=True)
            raise
        files = {name: about for part in parts for name, about in part.items()}
        self.writers.once(close)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raises its error, if any."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        self.pool.shutdown(wait=error is None)


def _partial(root: Path, step: int) -> Path:
    return root / f".{name_of(step)}.partial"


def _begin(root: Path, step: int) -> Path:
    """The hidden folder, which does not exist yet, to write the checkpoint of a step in."""
    if (final := root / name_of(step)).exists():
        raise ValueError(f"{final} exists already and is not overwritten: move it away first")
    clean(root)
    return _partial(root, step)


def _end(root: Path, step: int, state: Mapping[str, Any], files: Mapping[str, Any], keep: int) -> Path:
    """Write `state.json`, rename the complete folder, and delete old checkpoints."""
    partial, final = _partial(root, step), root / name_of(step)
    record = {"format": FORMAT, "version": __version__, "step": step, **state, "files": files}
    disk.write_json(partial / "state.json", record)
    os.rename(partial, final)
    disk.sync(root)
    _prune(root, keep)
    return final


@contextmanager
def _writing(root: Path, step: int, tidy: bool = True) -> Iterator[None]:
    """Turn errors of the disk into ValueError, and remove the partial folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if tidy:
            shutil.rmtree(_partial(root, step), ignore_errors=True)
        why, denied = getattr(error, "strerror", None) or error, isinstance(error, PermissionError)
        raise ValueError(
            f"could not write checkpoint {root / name_of(step)}: {why}. Nothing was overwritten; the last complete "
            f"checkpoint is {latest(root) or 'none'}. {f'Make {root} writable' if denied else 'Free disk space'} and "
            "run the same command again"
        ) from error


def read(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint; raises ValueError unless its files exist with the recorded sizes."""
    found = read_state(folder)
    for name in found["files"]:
        _check_size(folder, name, found["files"])
    return found


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, whose other files may be damaged."""
    path = folder / "state.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not an esolm checkpoint: it has no state.json")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        files, found = state["files"], state["format"]
        _ = [entry["bytes"] for entry in files.values()]
    except OSError as error:
        raise disk.unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"state.json cannot be read ({error!r})") from error
    if found != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {found!r}; this version of esolm reads format {FORMAT}")
    return state


def _check_size(folder: Path, name: str, files: Mapping[str, Any]) -> None:
    if not (folder / name).is_file():
        raise _damaged(folder, f"{name} is missing", name)
    if (actual := (folder / name).stat().st_size) != (size := files[name]["bytes"]):
        raise _damaged(folder, f"{name} has {actual} bytes of {size}", name)


def load(folder: Path, stem: str, device: str = "cpu") -> dict[str, Tensor]:
    """Load the tensors of `model`, `ema` or `optimizer` of a checkpoint, after a check of the hash."""
    if is_sharded(folder):
        verify(folder)
        tensors = {name: torch.empty(shape, device=device) for name, shape in shapes(folder, stem).items()}
        fill(folder, stem, tensors)
        return tensors
    verify(folder, [_file(folder, stem)])
    return load_file(folder / _file(folder, stem), device=device)


def is_sharded(folder: Path) -> bool:
    """Whether several ranks wrote the checkpoint, each its shard."""
    return all(name.startswith(f"{sharded.FOLDER}/") for name in read_state(folder)["files"])


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Check the named files of a checkpoint, or all, against their sizes and hashes."""
    files = read_state(folder)["files"]
    for name in files if names is None else names:
        _check_size(folder, name, files)
        if disk.sha256(folder / name) != files[name]["sha256"]:
            raise _damaged(folder, f"{name} does not have the SHA-256 that state.json records", name)


def shapes(folder: Path, stem: str) -> dict[str, torch.Size]:
    """The global shapes of the tensors of one stem, from the headers of the files."""
    if is_sharded(folder):
        found = sharded.shapes(folder / sharded.FOLDER)
        return {name.removeprefix(f"{stem}/"): s for name, s in found.items() if name.startswith(f"{stem}/")}
    with safe_open(folder / _file(folder, stem), "pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def fill(folder: Path, stem: str, tensors: Mapping[str, Tensor], alone: bool = True) -> None:
    """Load the tensors of one stem into `tensors`, in place; each rank reads its part of a sharded tensor."""
    if is_sharded(folder):
        sharded.fill(folder / sharded.FOLDER, {f"{stem}/{name}": t for name, t in tensors.items()}, alone)
    else:
        sharded.fill_from_file(folder / _file(folder, stem), tensors)


def consolidate(folder: Path) -> Path:
    """Merge the shards of a checkpoint into the three files of a single process, then remove the shards."""
    if not is_sharded(folder):
        return folder
    state = read(folder)
    tensors = {stem: load(folder, stem) for stem in STEMS}
    files = {f"{stem}.safetensors": _write(folder / f"{stem}.safetensors", t) for stem, t in tensors.items()}
    disk.write_json(folder / "state.json", {**state, "files": files})
    shutil.rmtree(folder / sharded.FOLDER)
    return folder


def _file(folder: Path, stem: str) -> str:
    name, files = f"{stem}.safetensors", read_state(folder)["files"]
    if name not in files:
        raise ValueError(f"{folder} has no {name}: it holds {', '.join(sorted(files))}")
    return name


def check_identity(folder: Path, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ValueError, naming what differs, unless the checkpoint belongs to this network, system and data."""
    stored = dict(state.get("identity", {}))
    if "net" in stored:  # stored before some fields existed
        known = identity.get("net", {})
        stored["net"] = {**{k: v for k, v in with_defaults({}).items() if k in known}, **stored["net"]}
    wrong = [
        f"{key} is {theirs!r} there and {mine!r} here"
        for key, (theirs, mine) in differing(completed(stored, identity), identity).items()
    ]
    if wrong:
        raise ValueError(f"{folder} belongs to another run: {'; '.join(wrong)}. Nothing was changed")


def clean(root: Path) -> None:
    """Remove folders that a killed process left half written or half deleted."""
    for folder in [*root.glob(".step-*.partial"), *root.glob(".step-*.old")]:
        shutil.rmtree(folder)


def _prune(root: Path, keep: int) -> None:
    # Rename before deleting, so that a kill here leaves no partial checkpoint under a valid name.
    steps = list_steps(root)
    stay = {name_of(step) for step in steps[-keep:]}
    if (top := best(root)) is not None:
        stay.add(top.name)
    for name in {name_of(step) for step in steps} - stay:
        os.rename(root / name, root / f".{name}.old")
        shutil.rmtree(root / f".{name}.old")


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    disk.save_tensors(path, tensors)
    return _describe(path)


def _describe(path: Path) -> dict[str, Any]:
    disk.sync(path)
    return {"bytes": path.stat().st_size, "sha256": disk.sha256(path)}


def _damaged(folder: Path, what: str, file: str = "") -> ValueError:
    others = [name_of(step) for step in list_steps(folder.parent) if folder.name != name_of(step)]
    advice = "the run has no other checkpoint: start again with another --run"
    if others:
        advice = f"move it away to resume from {others[-1]}"
    elif file == "optimizer.safetensors":
        advice += f", or from its weights with --init {folder.parent.parent} --run NEW"
    return ValueError(f"checkpoint {folder} is damaged: {what}. Nothing was changed; {advice}")
