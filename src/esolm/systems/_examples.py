"""Rows of a batch and terms of a loss before the network has run, for systems that deal examples to several terms.

Shapes: B batch, L length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..core import order
from ..core.batch import Batch
from ..core.float64 import to_device
from ..core.randomness import Randomness
from ..net.packed import Call


class Examples(NamedTuple):
    """Some rows of a batch with their global indices."""

    batch: Batch
    number: Tensor

    def take(self, rows: Tensor) -> Examples:
        """The rows where bool [B] is true."""
        return Examples(self.batch.rows(rows), self.number[rows])

    def uniform(self, rng: Randomness, name: str) -> Tensor:
        """Uniforms of these examples for one purpose, [B, L]."""
        x = self.batch.x
        return to_device(rng.at(name).uniform(self.number, x.shape[1]), x.device)

    def order_key(self, rng: Randomness) -> Tensor:
        """Sort keys within a group, [B, L]: random, but ascending among the given tokens, as in sampling."""
        return order.left_to_right(self.uniform(rng, "order"), self.batch.given)

    def num_clean(self, masked: Tensor) -> Tensor:
        """Tokens that are seen from the start, [B]."""
        return (~masked if self.batch.valid is None else ~masked & self.batch.valid).sum(1)


class PendingTerm(NamedTuple):
    """A term whose network call has not run yet; the calls of both terms run in one pass."""

    name: str
    call: Call
    place: Callable[[Tensor], Tensor]  # nats of the scored rows -> [B, L]
    scored: Tensor


def check_share(share: float, total: int) -> None:
    """Raise ValueError if a batch of `total` examples cannot be divided between two terms, the first with `share`."""
    if 0 < share < 1 and total < (least := math.ceil(max(1 / share, 1 / (1 - share)))):
        raise ValueError(f"a batch of {total} is too small for both terms at kappa {share}: use at least {least}")
