"""Any-order likelihood: one pass per order where attention is causal in the order, L passes where it is not.

Shapes: B batch, L length, M slots of the z half, K orders.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import order
from .net.denoiser import Denoiser, Rows
from .noise import scored_tokens
from .randomness import Randomness
from .terms import token_nats
from .visibility import full, prefix, sorted_two_stream, two_stream

OrderNats = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""x, sigma, scored, valid -> nats [B, L] under the order."""


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
    tokens of the order see each other. Differentiable.
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


def bidirectional_nats(
    net: Denoiser,
    x: Tensor,
    sigma: Tensor,
    scored: Tensor,
    mask_id: int,
    valid: Tensor | None = None,
    batch_size: int = 64,
) -> Tensor:
    """The same for a network that sees everything both ways: one pass for each scored token, in batches.

    The pass of step l keeps the tokens of sigma(<l), masks the others and scores the position sigma(l).
    """
    length = x.shape[1]
    step = order.inverse(sigma)
    row, column = scored.nonzero(as_tuple=True)
    position = torch.arange(length, device=x.device)[None]
    nats = []
    for part in range(0, len(row), batch_size):
        rows, columns = row[part : part + batch_size], column[part : part + batch_size]
        clean = step[rows] < step[rows, columns][:, None]
        tokens = torch.where(clean, x[rows], mask_id)
        seen = full(length, None if valid is None else valid[rows], x.device)
        out = Rows(slice(0, length), torch.arange(len(rows), device=x.device) * length + columns)
        nats.append(token_nats(net(tokens, position, seen, out=out), x[rows, columns], mask_id))
    return place_nats(torch.cat(nats), scored, position.expand_as(x), length)


def place_nats(nats: Tensor, rows: Tensor, position: Tensor, length: int) -> Tensor:
    """Nats [R] of the rows, bool [B, N], put at their positions, int [B, N]: [B, L]."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None].expand_as(rows)
    flat = (batch * length + position)[rows]
    return nats.new_zeros(rows.shape[0] * length).index_copy(0, flat, nats).unflatten(0, (-1, length))


def draw_orders(
    x: Tensor,
    alpha_0: float,
    rng: Randomness,
    number: int,
    antithetic: bool,
    valid: Tensor | None = None,
    given: Tensor | None = None,
    given_order: str = "random",
) -> Tensor:
    """Order number `number` of each example, sigma ~ P_L^alpha_0, int [B, L]; examples and numbers are independent.

    antithetic: an odd number has the diffusion part of the even one before it, reversed; the mean over orders is the
    same, and the two are negatively correlated.
    """
    examples, length = rng.examples(len(x)), x.shape[1]
    rng = rng.at("orders", number // 2 if antithetic else number)
    u, clean = (rng.at(name).uniform(examples, length).to(x.device) for name in ("order", "mask"))
    if antithetic and number % 2:
        u = torch.where(given, u, 1 - u) if given is not None else 1 - u
    if given is not None and given_order == "ascending":
        u = torch.where(given, torch.arange(length, device=x.device) / length, u)
    return order.draw(alpha_0, u, clean, valid, given)


def log_weights(
    nats_of: OrderNats,
    x: Tensor,
    alpha_0: float,
    rng: Randomness,
    numbers: range,
    antithetic: bool = False,
    valid: Tensor | None = None,
    given: Tensor | None = None,
    given_order: str = "random",
    rows: int = 64,
) -> Tensor:
    """log p(x | sigma_k) of the scored tokens for the orders `numbers`, float64 [B, K], `rows` sequences a pass."""
    scored = scored_tokens(x, valid, given)
    per_pass = max(1, rows // len(x))
    columns = []
    for first in range(numbers.start, numbers.stop, per_pass):
        some = range(first, min(first + per_pass, numbers.stop))
        sigma = torch.cat([draw_orders(x, alpha_0, rng, k, antithetic, valid, given, given_order) for k in some])
        copies = len(some), 1
        with torch.no_grad():
            padding = None if valid is None else valid.repeat(copies)
            nats = nats_of(x.repeat(copies), sigma, scored.repeat(copies), padding)
        columns.append(-nats.double().sum(1).view(len(some), len(x)).T)
    return torch.cat(columns, 1).cpu()
