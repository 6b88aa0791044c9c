"""Any-order likelihood in one pass.

Shapes: B batch, L length, M slots of the z half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .net.denoiser import Denoiser, Rows
from .terms import token_nats
from .visibility import prefix, sorted_two_stream, two_stream


def order_nats(
    net: Denoiser,
    x: Tensor,
    sigma: Tensor,
    scored: Tensor,
    mask_id: int,
    valid: Tensor | None = None,
    num_clean: Tensor | None = None,
) -> Tensor:
    """-log p(x^sigma(l) | x^sigma(<l)) of the scored tokens, in one two-stream pass: nats [B, L] in natural order.

    The scored positions must be the last valid ones of sigma, up to fill; padding comes after them. Mask queries see
    the clean tokens before them in the order, and themselves. num_clean [B]: Eso-LM (A), whose first num_clean
    tokens of the order see each other.
    """
    batch, length = x.shape
    sorted_scored = scored.gather(1, sigma)
    ends = torch.full((batch,), length, device=x.device) if valid is None else valid.sum(1)
    place = torch.arange(length, device=x.device)
    first = torch.where(sorted_scored, place, length).amin(1)
    num_z = max(int((ends - first).max()), 1)
    if valid is None:
        z_place = place[length - num_z :].expand(batch, -1)
        visibility = sorted_two_stream(length, num_z, num_clean, x.device)
    else:
        z_place = (ends[:, None] - num_z + place[:num_z]).clamp_min(0)
        x_rank = place[None] if num_clean is None else prefix(place[None], num_clean).rank
        visibility = two_stream(x_rank, z_place, place[None])
    masks = torch.full((batch, num_z), mask_id, device=x.device)
    tokens = torch.cat([masks, x.gather(1, sigma)], 1)
    z_position = sigma.gather(1, z_place)
    wanted = sorted_scored.gather(1, z_place)
    if valid is not None:  # clamped places would score a token twice
        wanted &= ends[:, None] - num_z + place[:num_z] >= 0
    logits = net(
        tokens,
        torch.cat([z_position, sigma], 1),
        visibility,
        out=Rows(slice(0, num_z), wanted.flatten().nonzero()[:, 0]),
    )
    nats = token_nats(logits, x.gather(1, z_position)[wanted], mask_id)
    return place_nats(nats, wanted, z_position, length)


def place_nats(nats: Tensor, rows: Tensor, position: Tensor, length: int) -> Tensor:
    """Nats [R] of the rows, bool [B, N], put at their positions, int [B, N]: [B, L]."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None].expand_as(rows)
    flat = (batch * length + position)[rows]
    return nats.new_zeros(rows.shape[0] * length).index_copy(0, flat, nats).unflatten(0, (-1, length))
