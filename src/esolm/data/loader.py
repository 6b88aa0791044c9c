"""Batches as a pure function of the step: nothing to save, nothing to restore.

Shapes: B rows here, L length, n sequences of the split.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from ..core.batch import Batch
from ..core.randomness import fold
from .manifest import Manifest, Split
from .permutation import permute


class Loader:
    """The sequences of a split in a random order for each epoch, or in their own.

    Example g = step·batch_size + row belongs to epoch g // n and has place g mod n in the epoch's permutation, so that
    every sequence comes once in every epoch, whatever the batch size, and micro-batches and ranks tile a batch.
    """

    def __init__(
        self, folder: str | Path, split: str = "train", batch_size: int = 32, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.manifest = Manifest.load(folder)
        if split not in self.manifest.splits:
            raise ValueError(f"no split {split!r} in {folder}: choose one of {', '.join(self.manifest.splits)}")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
        self.split, self.batch_size, self.seed, self.shuffle = split, batch_size, seed, shuffle

    @property
    def sequences(self) -> int:
        """The number of sequences in the split."""
        return self._split.sequences

    def __len__(self) -> int:
        """Batches in one pass; without shuffling a last partial one counts."""
        if self.shuffle:
            return max(1, self.sequences // self.batch_size)
        return -(-self.sequences // self.batch_size)

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """Rows first … first + count of the global batch `step`; all that follow `first`, for count None."""
        last = self.batch_size if count is None else first + count
        if step < 0 or not 0 <= first <= last <= self.batch_size:
            raise ValueError(
                f"no rows {first} to {last} of step {step}: a batch has {self.batch_size} and steps count from 0"
            )
        if not self.shuffle and step >= len(self):
            raise ValueError(f"no step {step}: one pass without shuffling has {len(self)}")
        rows, counts = self._rows(self._places(step * self.batch_size + np.arange(first, last)))
        x = torch.from_numpy(rows)
        if counts is None:
            return Batch(x)
        head = torch.arange(x.shape[1]) < torch.from_numpy(counts)[:, None]
        return Batch(x, None, head) if self.manifest.packing == "conditional" else Batch(x, head, None)

    @property
    def _split(self) -> Split:
        return self.manifest.splits[self.split]

    def _places(self, examples: np.ndarray) -> np.ndarray:
        """Which sequence each global example is, int64 [B]."""
        n = self.sequences
        if not self.shuffle:
            return examples[examples < n]
        epochs = examples // n
        places = np.empty_like(examples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permute(examples[here] % n, n, fold(fold(self.seed, "data"), int(epoch)))
        return places

    @cached_property
    def _maps(self) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """The shards, mapped and not read."""
        folder, length = self.manifest.folder, self.manifest.length
        return [
            (
                np.memmap(folder / s.file, self.manifest.dtype, "r", shape=(s.sequences, length)),
                None if s.count_sha256 is None else np.memmap(folder / s.count_file, "<u4", "r"),
            )
            for s in self._split.shards
        ]

    def _rows(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The rows int64 [B, L] and counts int64 [B] at the given places of the split."""
        starts = np.cumsum([0, *(s.sequences for s in self._split.shards)])
        shard = np.searchsorted(starts, places, side="right") - 1
        rows = np.empty((len(places), self.manifest.length), np.int64)
        counts = None if self._maps[0][1] is None else np.empty(len(places), np.int64)
        for s in np.unique(shard):
            here = shard == s
            tokens, heads = self._maps[s]
            rows[here] = tokens[places[here] - starts[s]]
            if counts is not None and heads is not None:
                counts[here] = heads[places[here] - starts[s]]
        return rows, counts
