"""Eso-LM in an order that it chooses as it goes, with the exact KV cache.

Each pass feeds a mask for every candidate (the first `window` undecided positions), keeps the surest tokens, and
appends them to the order, surest first. The next pass feeds them as clean tokens, causal in this order, and commits
their keys and values, which never change afterwards: nothing is approximate. A candidate sees the clean tokens and
itself, so its distribution is the conditional that one token at a time would have, whatever else is in the window.

The order depends on the tokens. The likelihood of the text under this order, p(x | sigma), is therefore not the
probability of the sample: sigma itself says something about x.

Shapes: B batch, L length, C candidates, m kept tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.order import Schedule
from ..core.visibility import Visibility, hide_copies
from ..net.denoiser import Rows
from ..net.protocol import Network
from .chooser import Chooser
from .confidence import NEVER, Rule, packed, write
from .feeds import one_row, places
from .passes import call
from .request import Step
from .speculative import labels


def dynamic(
    net: Network,
    x: Tensor,
    schedule: Schedule,
    choose: Chooser,
    rule: Rule,
    window: int | None = None,
    shift: bool = False,
) -> Iterator[Step]:
    """Eso-LM (B): the tokens of the schedule's steps in the order of confidence.

    x [B, L] holds the given tokens at their positions, which the schedule orders. shift: shifted queries take the place
    of masks, and x begins with a start token, which is given.
    """
    batch, length = x.shape
    device = x.device
    undecided = schedule.step_of() >= 0
    known = torch.zeros_like(undecided).scatter(1, schedule.sigma, torch.arange(length) < schedule.given[:, None])
    tokens = torch.where(known.to(device), x, choose.mask_id)
    number = torch.arange(length)
    clean = torch.where(number < schedule.given[:, None], schedule.sigma, NEVER)[:, : int(schedule.given.max())]
    widest = min(window or length, int(undecided.sum(1).max()))
    cache = net.new_cache(batch, length + max(widest, int(schedule.given.max())) + widest)
    cached = torch.zeros(batch, dtype=torch.long)
    for k in range(int(schedule.sizes.sum(1).max())):
        live = undecided.any(1)
        if not bool(live.any()):
            return
        at = packed(undecided & (undecided.long().cumsum(1) <= widest))
        count, asked = (clean < NEVER).sum(1) * live, (at < NEVER).sum(1)
        most = int(count.max())
        query = at.clamp_max(length - 1)
        fed, copies = torch.full(at.shape, choose.mask_id, device=device), None
        if shift:
            query = (query - 1).clamp_min(0)
            copies = known.gather(1, query) & (at < NEVER)
            fed = torch.where(copies.to(device), tokens.gather(1, query.to(device)), fed)
        seen = _seen(cached, count, asked, copies, device)
        position = torch.cat([clean[:, :most].clamp_max(length - 1), query], 1).to(device)
        fed = torch.cat([tokens.gather(1, position[:, :most]), fed], 1)
        index = (at < NEVER).flatten().nonzero()[:, 0].to(device)
        out = Rows(slice(most, most + at.shape[1]), index)
        logits = yield from call(net, fed, position, seen, out, cache)
        cached = cached + count
        if bool((count == most).all()):
            cache.commit(most)
        else:
            cache.commit(count.to(device), most, int(cached.max()))
        size = schedule.sizes[:, min(k, schedule.sizes.shape[1] - 1)]
        step = rule.step(choose, logits, at, size, k, count + asked)
        write(tokens, step)
        row, column = step.drawn.nonzero(as_tuple=True)
        undecided[row, step.position[row, column]] = False
        known[row, step.position[row, column]] = True
        clean = torch.where(step.drawn, step.position, NEVER)
        yield step


def _seen(cached: Tensor, count: Tensor, asked: Tensor, copies: Tensor | None, device: torch.device) -> Visibility:
    """Clean tokens are causal in the order; a candidate sees them and itself. All int [B]; copies bool [B, C]."""
    end = cached + count
    even = bool((cached == cached[0]).all() and (count == count[0]).all() and (asked == asked[0]).all())
    rows = slice(0, 1) if even else slice(None)
    clean = places(cached, count, int(count.max()), NEVER)
    masks = places(end, asked, int(asked.max()), NEVER)
    found = hide_copies(labels(clean[rows], masks[rows], end[rows], NEVER), one_row(copies), clean.shape[1])
    return Visibility(found.rank.to(device), found.horizon.to(device), found.clique.to(device))
