"""The attention pattern as data.

Query i attends to key j iff rank[j] <= horizon[i], or both carry the same non-negative clique. Inside a clique everyone
sees everyone, unless the pattern has inner labels: then the same rule holds again, inner.rank[j] <= inner.horizon[i].

Shapes: B batch, N network input, P cached, L length, M slots of the z half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN = 2**30
"""The rank of a key that no horizon includes."""

Kind = Literal["full", "causal", "two_stream", "two_stream_prefix", "block", "labels"]


class Inner(NamedTuple):
    """Which members of a clique see each other."""

    rank: Tensor  # int [B|1, N]
    horizon: Tensor  # int [B|1, N]


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """Labels of N slots; `kind`, `num_z` and `block_size` only select a kernel and never change the pattern."""

    rank: Tensor  # int [B|1, N]  the step at which this key becomes visible; HIDDEN = never by order
    horizon: Tensor  # int [B|1, N]  the last rank that this query sees
    clique: Tensor  # int [B|1, N]  equal ids see each other; -1 = none
    kind: Kind = "labels"
    num_z: int = 0  # slots of the z half, which comes first, in the kinds with two halves
    block_size: int = 0  # of kind "block"
    inner: Inner | None = None  # of kind "labels", without a cache

    def dense(self, span: slice | None = None) -> Tensor:
        """The boolean mask, [B|1, 1, N, N], or only its query rows in `span`; the reference for every kernel."""
        rows = span or slice(None)
        horizon, mine = self.horizon[:, rows, None], self.clique[:, rows, None]
        together = (self.clique[:, None] == mine) & (mine >= 0)
        if self.inner is not None:
            together = together & (self.inner.rank[:, None] <= self.inner.horizon[:, rows, None])
        return ((self.rank[:, None] <= horizon) | together)[:, None]

    def flex(self) -> Any:
        """FlexAttention's block mask of the same pattern, per row if the labels are."""
        from torch.nn.attention.flex_attention import create_block_mask

        rank, horizon, clique = torch.broadcast_tensors(self.rank, self.horizon, self.clique)
        inner = None if self.inner is None else tuple(t.expand_as(rank) for t in self.inner)
        one = rank.shape[0] == 1

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            row = b * 0 if one else b
            together = (clique[row, i] >= 0) & (clique[row, i] == clique[row, j])
            if inner is not None:
                together = together & (inner[0][row, j] <= inner[1][row, i])
            return (rank[row, j] <= horizon[row, i]) | together

        slots = rank.shape[1]
        return create_block_mask(seen, None if one else rank.shape[0], None, slots, slots, device=str(rank.device))


class Part(NamedTuple):
    """One of several inputs that are packed into a row."""

    batch: int
    visibility: Visibility
    asked: slice  # the query rows that get logits


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Several inputs of different shapes, flattened and concatenated into one row; they do not see each other."""

    parts: tuple[Part, ...]


def _none(rank: Tensor) -> Tensor:
    return torch.full_like(rank, -1)


def hide(visibility: Visibility, valid: Tensor) -> Visibility:
    """The same pattern, in which slots that are not valid, bool [B, N], see only themselves and are seen only by
    themselves."""
    rank, horizon, clique = (t.expand_as(valid) for t in (visibility.rank, visibility.horizon, visibility.clique))
    alone = HIDDEN + torch.arange(valid.shape[1], device=valid.device)
    return replace(
        visibility,
        rank=torch.where(valid, rank, HIDDEN),
        horizon=torch.where(valid, horizon, -1),
        clique=torch.where(valid, clique, alone),
        kind="labels",
    )


def full(length: int, valid: Tensor | None = None, device: torch.device | None = None) -> Visibility:
    """Bidirectional (MDLM)."""
    rank = torch.zeros(1, length, dtype=torch.long, device=device)
    visibility = Visibility(rank, rank, _none(rank), "full")
    return visibility if valid is None else hide(visibility, valid)


def causal(length: int, device: torch.device | None = None) -> Visibility:
    """Slot i sees slots 0..i: AR, and Eso-LM (B) on tokens sorted by sigma. Padding, sorted last, is not seen."""
    rank = torch.arange(length, device=device)[None]
    return Visibility(rank, rank, _none(rank), "causal")


def by_order(sigma_inv: Tensor) -> Visibility:
    """Eso-LM (B)'s diffusion pattern in natural order, A_ij = 0 iff sigma_inv(i) >= sigma_inv(j). [B, L]"""
    return Visibility(sigma_inv, sigma_inv, _none(sigma_inv))


def prefix(order: Tensor, num_clean: Tensor) -> Visibility:
    """Eso-LM (A)'s diffusion pattern: the first num_clean [B] of the order see each other, the rest are causal.

    order [B|1, L]: the index of each slot in the order (arange for sorted tokens).
    """
    rank = (order - num_clean[:, None] + 1).clamp_min(0)
    return Visibility(rank, rank, _none(rank))


def two_stream(x_rank: Tensor, z_order: Tensor, x_order: Tensor, kind: Kind = "labels") -> Visibility:
    """Mask queries z, then clean tokens x: a z slot sees itself and the x slots before it in the order.

    x_rank [B|1, L]: what x slots see of each other (the order itself for (B), the prefix rank for (A)).
    z_order [B|1, M] and x_order [B|1, L]: indices in the order. No other slot sees a z slot.
    """
    rows = max(x_rank.shape[0], z_order.shape[0])
    x_rank, z_order = x_rank.expand(rows, -1), z_order.expand(rows, -1)
    # A z slot sees up to the x_rank of the token before it in the order.
    by_place = torch.zeros_like(x_rank).scatter(1, x_order.expand(rows, -1), x_rank)
    before = by_place.gather(1, (z_order - 1).clamp_min(0))
    horizon = torch.where(z_order > 0, before, -1)
    num_z = z_order.shape[1]
    mine = torch.arange(num_z, device=x_rank.device).expand(rows, -1)
    return Visibility(
        rank=torch.cat([torch.full_like(z_order, HIDDEN), x_rank], 1),
        horizon=torch.cat([horizon, x_rank], 1),
        clique=torch.cat([mine, _none(x_rank)], 1),
        kind=kind,
        num_z=num_z,
    )


def sorted_two_stream(length: int, num_z: int, num_clean: Tensor | None = None, device: Any = None) -> Visibility:
    """The two-stream pattern on tokens sorted by sigma: z holds the last num_z positions of the order, x all of them.

    Every row has the same labels, so no mask with a batch dimension is needed. num_clean [B] gives Eso-LM (A), whose
    clean x see each other; its z slots at clean positions are padding, which is neither seen nor scored, and the only
    rows in which a kernel may deviate from the labels.
    Raises ValueError unless 1 <= num_z <= length.
    """
    if not 1 <= num_z <= length:
        raise ValueError(f"num_z is {num_z}; it must be between 1 and the length {length}")
    order = torch.arange(length, device=device)[None]
    z_order = order[:, length - num_z :]
    if num_clean is None:
        return two_stream(order, z_order, order, "two_stream")
    return two_stream(prefix(order, num_clean).rank, z_order, order, "two_stream_prefix")


def block(length: int, block_size: int, device: torch.device | None = None) -> Visibility:
    """BD3-LM's training pattern over z then x: z sees its own block of z and earlier blocks of x; x is block-causal."""
    number = torch.arange(length, device=device)[None] // block_size
    return Visibility(
        rank=torch.cat([torch.full_like(number, HIDDEN), number], 1),
        horizon=torch.cat([number - 1, number], 1),
        clique=torch.cat([number, _none(number)], 1),
        kind="block",
        num_z=length,
        block_size=block_size,
    )


def hide_masks(visibility: Visibility, masked: Tensor, num_clean: Tensor) -> Visibility:
    """The pattern in which a mask sees the clean tokens and itself; masked bool [B, N], masks last; num_clean [B]."""
    place = visibility.rank.expand_as(masked)
    rank = torch.where(masked, HIDDEN, place)
    horizon = torch.where(masked, num_clean[:, None] - 1, place)
    return Visibility(rank, horizon, torch.where(masked, place, -1))


def hide_copies(visibility: Visibility, copies: Tensor | None, first: int = 0) -> Visibility:
    """The same pattern, in which nobody sees a copy, not even the copy itself; it sees what it did.

    copies: bool [B|1, M], of the slots from `first` on; None for none.
    """
    if copies is None:
        return visibility
    end = first + copies.shape[1]
    copies = F.pad(copies, (first, visibility.rank.shape[1] - end))
    clique = torch.where(copies, -1, visibility.clique)
    if visibility.kind in ("two_stream", "two_stream_prefix") and end <= visibility.num_z:  # z has no rank to hide
        return replace(visibility, clique=clique)
    rank = torch.where(copies, HIDDEN, visibility.rank)
    rank, horizon, clique = (t.contiguous() for t in torch.broadcast_tensors(rank, visibility.horizon, clique))
    return Visibility(rank, horizon, clique)
