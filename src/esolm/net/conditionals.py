"""The conditionals of an order: all in one two-stream pass, or one pass for each token.

Shapes: B batch, L length, M slots of the z half, N network input, R scored rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core import order
from ..core.batch import Batch
from ..core.order import Schedule
from ..core.query import Queries
from ..core.visibility import (
    HIDDEN,
    Inner,
    Visibility,
    causal,
    full,
    hide_copies,
    prefix,
    sorted_two_stream,
    two_stream,
)
from .denoiser import Rows
from .head import Score, tempered
from .packed import Call, NatsCall, together
from .protocol import Forward


def order_nats(
    net: Forward,
    x: Tensor,
    sigma: Tensor,
    scored: Tensor,
    mask_id: int,
    valid: Tensor | None = None,
    num_clean: Tensor | None = None,
    shift: bool = False,
) -> Tensor:
    """-log p(x^sigma(l) | x^sigma(<l)) of the scored tokens, in one two-stream pass: nats [B, L] in natural order.

    The scored positions must be the last valid ones of sigma; padding comes after them. Differentiable.
    num_clean [B]: Eso-LM (A), whose first num_clean tokens of the order see each other. shift: shifted queries, of
    texts that begin with a start token.
    """
    call, place = order_call(x, sigma, scored, mask_id, valid, num_clean, shift)
    return place(*together(net, [call]))


def order_call(
    x: Tensor,
    sigma: Tensor,
    scored: Tensor,
    mask_id: int,
    valid: Tensor | None = None,
    num_clean: Tensor | None = None,
    shift: bool = False,
) -> NatsCall:
    """The network call of `order_nats`.

    Queries see the clean tokens before them in the order, and themselves unless they are copies.
    """
    batch, length = x.shape
    sorted_scored = scored.gather(1, sigma)
    ends = torch.full((batch,), length, device=x.device) if valid is None else valid.sum(1)
    place = torch.arange(length, device=x.device)
    first = torch.where(sorted_scored, place, length).amin(1)
    num_z = bucket(int((ends - first).max()), length)
    if valid is None:
        z_place = place[length - num_z :].expand(batch, -1)
        visibility = sorted_two_stream(length, num_z, num_clean, x.device)
    else:
        z_place = (ends[:, None] - num_z + place[:num_z]).clamp_min(0)
        x_rank = place[None] if num_clean is None else prefix(place[None], num_clean).rank
        visibility = two_stream(x_rank, z_place, place[None])
    clean = x.gather(1, sigma)
    asked = Queries.of(sigma, mask_id, shift).ask(clean, z_place, z_place)
    z_position = sigma.gather(1, z_place)
    wanted = sorted_scored.gather(1, z_place)
    if valid is not None:  # clamped places would score a token twice
        wanted &= ends[:, None] - num_z + place[:num_z] >= 0
    call = Call(
        torch.cat([asked.tokens, clean], 1),
        torch.cat([asked.position, sigma], 1),
        hide_copies(visibility, asked.copies),
        Rows(slice(0, num_z), wanted.flatten().nonzero()[:, 0]),
        Score(x.gather(1, z_position)[wanted], mask_id),
    )
    return NatsCall(call, functools.partial(place_nats, rows=wanted, position=z_position, length=length))


def schedule_nats(
    net: Forward,
    x: Tensor,
    schedule: Schedule,
    mask_id: int,
    hide_masks: bool = False,
    shift: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """-log p of each drawn token as `sampling.loops.ordered` draws it, in one pass: nats [B, L] in natural order.

    A query sees the clean tokens of earlier steps and, unless hide_masks, the queries of its own step that come before
    it in the order. Zero at given tokens and padding. Differentiable. shift: as in `order_nats`.
    """
    length, device = x.shape[1], x.device
    if int(schedule.sizes.max()) <= 1:  # nobody shares a step
        if temperature == 1:  # the kernels of `order_nats` apply
            sigma, scored = schedule.sigma.to(device), schedule.step_of().to(device) >= 0
            return order_nats(net, x, sigma, scored, mask_id, _valid(schedule, device), shift=shift)
        hide_masks = True
    num_z = bucket(int((schedule.lengths - schedule.given).max()), length)
    z_place = schedule.given[:, None] + torch.arange(num_z)
    wanted = z_place < schedule.lengths[:, None]
    z_place = z_place.clamp_max(length - 1)
    begin = torch.where(wanted, schedule.begins().gather(1, z_place), 0)
    num_x = bucket(int(begin.max()), length)  # the tokens of the last step are not seen
    sigma, z_place, begin, wanted = (t.to(device) for t in (schedule.sigma, z_place, begin, wanted))
    clean = x.gather(1, sigma)
    asked = Queries.of(sigma, mask_id, shift).ask(clean, z_place, begin)
    visibility = _stepwise(z_place, begin, wanted, num_x, hide_masks, asked.copies)
    z_position = sigma.gather(1, z_place)
    nats = net(
        torch.cat([asked.tokens, clean[:, :num_x]], 1),
        torch.cat([asked.position, sigma[:, :num_x]], 1),
        visibility,
        out=Rows(slice(0, num_z), wanted.flatten().nonzero()[:, 0]),
        score=tempered(x.gather(1, z_position)[wanted], mask_id, temperature),
    )
    return place_nats(nats, wanted, z_position, length)


def _valid(schedule: Schedule, device: torch.device) -> Tensor | None:
    """Which positions are no padding, bool [B, L]; None if all of them."""
    inside = torch.arange(schedule.sigma.shape[1]) < schedule.lengths[:, None]
    return None if bool(inside.all()) else torch.zeros_like(inside).scatter(1, schedule.sigma, inside).to(device)


def _stepwise(
    z_place: Tensor, begin: Tensor, wanted: Tensor, num_x: int, hide_masks: bool, copies: Tensor | None
) -> Visibility:
    """Queries, int [B, M], of steps that begin at the place `begin`, and clean tokens at the places 0 .. num_x - 1."""
    slot = torch.arange(z_place.shape[1], device=z_place.device).expand_as(z_place)
    place = torch.arange(num_x, device=z_place.device).expand(len(z_place), -1)
    copies = torch.zeros_like(wanted) if copies is None else copies & wanted
    none = torch.full_like(place, -1)
    rank = torch.cat([torch.full_like(slot, HIDDEN), place], 1)
    horizon = torch.cat([torch.where(wanted, begin - 1, -1), place], 1)
    alone = HIDDEN + slot
    if hide_masks:
        return Visibility(rank, horizon, torch.cat([torch.where(copies, -1, alone), none], 1))
    clique = torch.cat([torch.where(wanted, begin, alone), none], 1)
    inner = Inner(torch.cat([torch.where(copies, HIDDEN, z_place), place], 1), torch.cat([z_place, place], 1))
    return Visibility(rank, horizon, clique, inner=inner)


def shifted_logits(
    net: Forward, x: Tensor, sigma: Tensor, num_clean: Tensor, mask_id: int, prefixed: bool, hide_masks: bool
) -> Tensor:
    """Logits of shifted queries for all positions but that of the start token, [B, L - 1, V], in the order of sigma.

    The first num_clean [B] places of the order are known. Queries for these see what comes before them; the others see
    all that is known and, unless hide_masks, the queries before them that hold a mask. prefixed: Eso-LM (A).
    """
    place = torch.arange(x.shape[1], device=x.device).expand_as(x)
    known = place < num_clean[:, None]
    asking, told = place[:, 1:], known[:, 1:]
    rank = prefix(place, num_clean).rank if prefixed else place
    clean = x.gather(1, sigma)
    asked = Queries.of(sigma, mask_id, True).ask(clean, asking, torch.minimum(asking, num_clean[:, None]))
    z_rank, z_horizon = torch.full_like(asking, HIDDEN), rank.gather(1, num_clean[:, None] - 1).expand_as(asking)
    if not hide_masks:
        z_rank, z_horizon = torch.where(told, HIDDEN, rank[:, 1:]), rank[:, 1:]
    visibility = Visibility(
        rank=torch.cat([z_rank, torch.where(known, rank, HIDDEN)], 1),
        horizon=torch.cat([torch.where(told, rank[:, :-1], z_horizon), rank], 1),
        clique=torch.cat([asking, torch.full_like(place, -1)], 1),
    )
    tokens = torch.cat([asked.tokens, torch.where(known, clean, mask_id)], 1)
    position = torch.cat([asked.position, sigma], 1)
    return net(tokens, position, hide_copies(visibility, asked.copies), out=Rows(slice(0, asking.shape[1])))


def next_logits(net: Forward, batch: Batch, start_id: int) -> Tensor:
    """Logits [B, L, V] of each token given those to its left, by a causal pass over the text after a start token."""
    x, valid, _ = batch
    length = x.shape[1]
    position = torch.arange(length, device=x.device)[None]
    # Padding comes after all that is known, whatever stands there.
    sigma = order.sort(order.groups(torch.zeros_like(x, dtype=torch.bool), valid, None), position / length)
    before = torch.cat([x.new_full((len(x), 1), start_id), x.gather(1, sigma)[:, :-1]], 1)
    return unsorted(net(before, sigma, causal(length, x.device)), sigma)


def bucket(rows: int, most: int, size: int = 8) -> int:
    """Round rows up to a multiple of `size`, between 1 and `most`, so that training sees few shapes."""
    return min(max(-(-rows // size), 1) * size, most)


def bidirectional_nats(
    net: Forward,
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
    if not scored.any():
        return torch.zeros(x.shape, device=x.device)
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
        nats.append(net(tokens, position, seen, out=out, score=Score(x[rows, columns], mask_id)))
    return place_nats(torch.cat(nats), scored, position.expand_as(x), length)


def bidirectional_schedule_nats(
    net: Forward, x: Tensor, schedule: Schedule, mask_id: int, temperature: float = 1.0
) -> Tensor:
    """-log p of each drawn token as `sampling.loops.bidirectional` draws it, [B, L]: one row for each step of each
    text, all in one pass."""
    length, device = x.shape[1], x.device
    valid = _valid(schedule, device)
    row, number = (schedule.sizes > 0).nonzero(as_tuple=True)
    step = schedule.step_of()[row]
    drawn, before = ((step == number[:, None]).to(device), (step < number[:, None]).to(device))
    row = row.to(device)
    tokens = torch.where(before, x[row], mask_id)
    seen = full(length, None if valid is None else valid[row], device)
    position = torch.arange(length, device=device)[None]
    out = Rows(slice(0, length), drawn.flatten().nonzero()[:, 0])
    nats = net(tokens, position, seen, out=out, score=tempered(x[row][drawn], mask_id, temperature))
    index = (row[:, None] * length + position)[drawn]
    return nats.new_zeros(x.numel()).index_copy(0, index, nats).view(x.shape)


def place_nats(nats: Tensor, rows: Tensor, position: Tensor, length: int) -> Tensor:
    """Nats [R] of the rows, bool [B, N], put at their positions, int [B, N]: [B, L]."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None].expand_as(rows)
    flat = (batch * length + position)[rows]
    return nats.new_zeros(rows.shape[0] * length).index_copy(0, flat, nats).unflatten(0, (-1, length))


def unsorted(logits: Tensor, sigma: Tensor) -> Tensor:
    """Logits [B, L, V] in the order of sigma, put back at their positions."""
    return torch.empty_like(logits).scatter_(1, sigma[..., None].expand_as(logits), logits)
