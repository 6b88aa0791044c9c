"""`Batch`: token ids, and which of them are valid or given; one type from the loader to the loss.

Shapes: B batch, L length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Some sequences. None stands for a mask that says nothing: no padding, no given tokens."""

    x: Tensor  # int [B, L]
    valid: Tensor | None = None  # bool [B, L]; padding is neither seen nor scored
    given: Tensor | None = None  # bool [B, L]; given tokens are seen and not scored

    @property
    def scored(self) -> Tensor:
        """The tokens that the loss is about: valid and not given, bool [B, L]."""
        scored = torch.ones_like(self.x, dtype=torch.bool) if self.valid is None else self.valid
        return scored if self.given is None else scored & ~self.given

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        return Batch(*(None if t is None else t.to(device) for t in self))  # type: ignore[arg-type]

    def rows(self, index: Tensor) -> Batch:
        """Some rows, by index or by a bool mask."""
        return Batch(*(None if t is None else t[index.to(t.device)] for t in self))  # type: ignore[arg-type]

    def repeat(self, copies: int) -> Batch:
        """The batch `copies` times, one copy after another."""
        return Batch(*(None if t is None else t.repeat(copies, 1) for t in self))  # type: ignore[arg-type]

    def cropped(self) -> Batch:
        """The batch without the columns at the end that are padding in every row."""
        if self.valid is None:
            return self
        width = int(self.valid.any(0).nonzero().max()) + 1 if bool(self.valid.any()) else 0
        return Batch(*(None if t is None else t[:, :width] for t in self))  # type: ignore[arg-type]

    def by_length(self) -> list[tuple[Tensor, Batch]]:
        """Batches without padding, each of rows of one length, with the indices of the rows; all rows as they are if
        padding stands anywhere but on the right. Rows without a token are left out."""
        if self.valid is None or bool((self.valid[:, 1:] & ~self.valid[:, :-1]).any()):
            return [(torch.arange(len(self.x), device=self.x.device), self)]
        lengths, found = self.valid.sum(1), list[tuple[Tensor, Batch]]()
        for length in lengths.unique().tolist():
            if length:
                rows = (lengths == length).nonzero()[:, 0]
                given = None if self.given is None else self.given[rows, :length]
                found.append((rows, Batch(self.x[rows, :length], None, given)))
        return found

    def trimmed(self) -> Batch:
        """The same batch with None in place of masks that say nothing."""
        valid = None if self.valid is None or bool(self.valid.all()) else self.valid
        given = None if self.given is None or not bool(self.given.any()) else self.given
        return Batch(self.x, valid, given)
