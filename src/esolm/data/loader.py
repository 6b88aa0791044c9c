"""Batches as a pure function of the step, so that the loader has no state to save.

Shapes: B rows, L length, n sequences in the split.
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
    """The sequences of a split, shuffled anew in each epoch or in file order.

    Example g = step·batch_size + row is number g mod n in the permutation of epoch g // n. So every sequence occurs
    once per epoch for any batch size, and micro-batches and ranks tile a batch.
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
        """The number of batches per epoch; without shuffling this includes an incomplete last one."""
        if self.shuffle:
            return max(1, self.sequences // self.batch_size)
        return -(-self.sequences // self.batch_size)

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """Return `count` rows of the global batch `step`, starting at row `first`; count None: all remaining rows."""
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
        if self.manifest.packing != "conditional":
            return Batch(x, head, None)
        num_eos = (self.manifest.request.get("conditional") or {}).get("num_eos")
        valid = None if num_eos is None else (~head & (x == self.manifest.eos_id)).cumsum(1) <= num_eos
        return Batch(x, valid, head)

    @property
    def _split(self) -> Split:
        return self.manifest.splits[self.split]

    def _places(self, examples: np.ndarray) -> np.ndarray:
        """The sequence number of each global example, int64 [B]."""
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
        """The memory-mapped shards."""
        folder, length = self.manifest.folder, self.manifest.length
        return [
            (
                np.memmap(folder / s.file, self.manifest.dtype, "r", shape=(s.sequences, length)),
                None if s.count_sha256 is None else np.memmap(folder / s.count_file, "<u4", "r"),
            )
            for s in self._split.shards
        ]

    def _rows(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The rows, int64 [B, L], and counts, int64 [B], of the given sequence numbers."""
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
