"""How the network is asked for a position: which token stands where, and what is known of its left neighbour.

A mask query is the mask token at the position itself. A shifted query asks as a left-to-right model was trained to
answer: its token is the left neighbour's, if that comes early enough in the order to be known, and the mask otherwise;
it stands at the neighbour's position. So that the first position has a neighbour too, a start token is prepended to the
text, as one more given token that comes first in every order.

A shifted query that repeats a known token is a copy: the clean token is visible beside it, and attention would count
its key twice. `hide_copies` in visibility.py therefore removes the keys of copies.

Shapes: B batch, L length, M queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .batch import Batch
from .order import Schedule, inverse


class Asked(NamedTuple):
    """The network's input for some queries."""

    tokens: Tensor  # int [B, M]
    position: Tensor  # int [B, M]
    copies: Tensor | None  # bool [B, M], on the device of the order: the token is that of the left neighbour


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """The queries of texts in the order sigma; its last column may be a place for padding, which is position 0."""

    sigma: Tensor  # int [B, L] or [B, L + 1]
    mask_id: int
    sigma_inv: Tensor | None = None  # int [B, L]; None: mask queries

    @classmethod
    def of(cls, sigma: Tensor, mask_id: int, shift: bool, padded: bool = False) -> Queries:
        """The queries of an order. shift: the text begins with a start token. padded: add a place for padding."""
        return cls(F.pad(sigma, (0, 1)) if padded else sigma, mask_id, inverse(sigma) if shift else None)

    def ask(self, tokens: Tensor, place: Tensor, known: Tensor) -> Asked:
        """Queries for the positions at `place`, int [B, M].

        tokens: int [B, L], in the order of sigma. known: int [B, M] or [B, 1]; the places before it are known.
        """
        position = self.sigma.gather(1, place)
        if self.sigma_inv is None:
            return Asked(torch.full(place.shape, self.mask_id, device=tokens.device), position, None)
        left = (position - 1).clamp_min(0)
        left_place = self.sigma_inv.gather(1, left)
        copies = (left_place < known) & (position > 0)
        found = tokens.gather(1, left_place.to(tokens.device))
        return Asked(torch.where(copies.to(tokens.device), found, self.mask_id), left, copies)


def prepend(batch: Batch, sigma: Tensor, start_id: int) -> tuple[Batch, Tensor]:
    """Texts and orders with a start token: position p of the text is p + 1, [B, L] -> [B, L + 1].

    The start token is given and comes first in the order. It stands directly before the first valid token, so that
    texts padded on the left are those without padding.
    """
    x, valid, given = batch
    slot = torch.zeros(len(x), 1, dtype=torch.long, device=x.device)
    if valid is not None:
        slot = valid.int().argmax(1, keepdim=True)
        valid = F.pad(valid, (1, 0)).scatter(1, slot, True)
    given = F.pad(torch.zeros_like(x, dtype=torch.bool) if given is None else given, (1, 0)).scatter(1, slot, True)
    rest = sigma + 1
    sigma = torch.cat([slot, torch.where(rest == slot, 0, rest)], 1)  # the padding at `slot` changes places with 0
    return Batch(F.pad(x, (1, 0)).scatter(1, slot, start_id), valid, given), sigma


def prepend_to_schedule(schedule: Schedule) -> Schedule:
    """The schedule of texts with a start token at position 0, one more given token."""
    return Schedule(F.pad(schedule.sigma + 1, (1, 0)), schedule.sizes, schedule.given + 1, schedule.diffusion)
