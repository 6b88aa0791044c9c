"""The work file of a long scoring run: log-weights on disk, so that the same command resumes and K can be raised."""

from __future__ import annotations

import glob
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from ..runtime import files
from ..runtime.distributed import ALONE, Ranks
from ..runtime.dotted import differing
from ..systems import completed

EVERY = 60.0
"""Seconds between two saves."""


class WorkFile:
    """The log-weights of one model, data and seed in a file that is replaced atomically.

    Each rank saves to its own part. The parts are merged at the end, or by the next command with any number of ranks.
    """

    def __init__(self, path: str | None, identity: dict[str, Any], ranks: Ranks = ALONE) -> None:
        self.path, self.identity, self.ranks = None if path is None else Path(path), identity, ranks
        self.matrices: dict[str, Tensor] = {}
        self.changed, self.saved = False, time.monotonic()
        for file in self.files():
            self._read(file)

    def files(self) -> list[Path]:
        """The file and its parts, as far as they exist."""
        if self.path is None:
            return []
        parts = sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*"))
        return [file for file in (self.path, *parts) if file.exists()]

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                theirs = json.loads((file.metadata() or {})["identity"])
                matrices = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a work file of esolm score ({error}): choose another --work") from error
        pairs = differing(completed(theirs, self.identity), self.identity).items()
        if pairs:
            other = "; ".join(f"{key} is {a!s:.12} there and {b!s:.12} here" for key, (a, b) in pairs)
            raise ValueError(f"{path} is of another model, data or seed: {other}. Choose another --work, or remove it")
        for key, matrix in matrices.items():
            self.matrices[key] = _united(self.matrices.get(key, matrix), matrix)

    def known(self, index: int) -> Tensor | None:
        """The log-weights of one corpus."""
        return self.matrices.get(str(index))

    def keeper(self, index: int) -> Callable[[Tensor], None]:
        """A function that takes the matrix of one corpus and saves at most once a minute."""

        def keep(matrix: Tensor) -> None:
            self.matrices[str(index)], self.changed = matrix, True
            if self.path is not None and time.monotonic() - self.saved >= EVERY:
                try:
                    self.save(self.own(self.path))
                except OSError as error:  # the disk may have room later, and the result is printed without the file
                    self.saved = time.monotonic()
                    print(f"{self.path} was not saved, and scoring goes on: {error}", file=sys.stderr)

        return keep

    def own(self, path: Path) -> Path:
        """The file of this rank."""
        return path if self.ranks.world == 1 else path.with_name(f"{path.name}.part-{self.ranks.rank}")

    def save(self, path: Path) -> None:
        """Save everything atomically."""
        files.save_tensors(path, self.matrices, {"identity": json.dumps(self.identity)})
        self.changed, self.saved = False, time.monotonic()

    def __enter__(self) -> WorkFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is None:
            return
        if error is not None:
            if self.changed:
                self.save(self.own(self.path))
        elif self.ranks.rank == 0:  # every rank has the whole matrix now
            parts = [file for file in self.files() if file != self.path]
            if self.changed or parts:
                self.save(self.path)
            for part in parts:
                part.unlink()


def _united(one: Tensor, other: Tensor) -> Tensor:
    """Two matrices merged, [n, K]; NaN is unknown."""
    width = max(one.shape[1], other.shape[1])
    one, other = (F.pad(t, (0, width - t.shape[1]), value=math.nan) for t in (one, other))
    return torch.where(one.isnan(), other, one)
