"""A loss is a sum of named terms, each a mean over tokens, in nats.

Shapes: B batch, L length, R scored rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Term(NamedTuple):
    """Weighted nats of the tokens that this term scores; its mean is over `valid`, all the tokens that it bounds."""

    name: str
    nats: Tensor  # [B', L], zero where nothing is scored
    valid: Tensor  # bool [B', L]


def token_nats(logits: Tensor, target: Tensor, mask_id: int) -> Tensor:
    """-log p(target) with the mask id excluded from the vocabulary: logits [R, V], target [R] -> nats [R].

    Overwrites the mask column of the logits in place, which saves a copy of the largest tensor of a step.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide[:, mask_id] = float("-inf")
    return F.cross_entropy(wide, target, reduction="none")


def without_id(values: Tensor, id: int | None, fill: float = float("-inf")) -> Tensor:
    """A copy of logits [..., V] in at least float32, with `fill` for one id; None: for none."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if id is None:
        return values
    return values.masked_fill(torch.arange(values.shape[-1], device=values.device) == id, fill)


def total(terms: Iterable[Term], counts: Mapping[str, float]) -> Tensor:
    """The loss: the sum of each term's nats divided by its number of tokens (in training, of the global batch)."""
    return torch.stack([term.nats.sum() / max(counts[term.name], 1) for term in terms]).sum()
