"""Speculative sampling: draft a window of tokens, check all of them in the next pass, and keep exactly what one token
at a time would have drawn. docs/speculative.md has the method and the proof.

A place is an index into the denoising order. Rows with fewer places are padded with L.

Shapes: B batch, L length, C clean tokens, D drafts and M masks of a row in a pass, R of all rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.draw import inverse_cdf
from ..core.order import Schedule
from ..core.query import Queries
from ..core.visibility import HIDDEN, Visibility, hide_copies
from ..net.cache import KVCache
from ..net.denoiser import Rows
from ..net.protocol import Network
from .chooser import Chooser, restricted
from .feeds import one_row, places
from .passes import call
from .request import Drafts, Step

MOST = 24
"""Largest adaptive window."""
PRIOR, MEMORY = (2.0, 0.5), 0.85
"""Initial counts of accepted and rejected drafts, and their decay per pass."""


def draft(choose: Chooser, logits: Tensor, row: Tensor, position: Tensor) -> Tensor:
    """Tokens from the proposals q, int [R]; logits [R, V].

    A position uses the same uniform draw in every pass, so a q that hardly changed gives the same token again and the
    proposals after it still fit. Each draft is judged once, by the q it was last drawn from.
    """
    return choose(logits, row, position)


def guided_draft(choose: Chooser, logits: Tensor, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same, and with a guide the tokens that were allowed, bool [R, V].

    The drafts of a row fit each other. The guide itself learns only of those that are kept.
    """
    if choose.guide is None:
        return draft(choose, logits, row, position), None
    return dataclasses.replace(choose, guide=choose.guide.copy()).guided(logits, row, position)


def accept(p: Tensor, q: Tensor, token: Tensor, u: Tensor) -> Tensor:
    """With probability min(1, p(token) / q(token)), bool [R]; p, q [R, V], u float64 [R]."""
    p_x, q_x = (t.gather(1, token[:, None])[:, 0].to(u.dtype) for t in (p, q))
    return u * q_x < p_x


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The weights of a replacement: max(0, p - q) [R, V], or p where rounding leaves no weight."""
    rest = (p - q).clamp_min(0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def adapt(accepted: Tensor, rejected: Tensor) -> Tensor:
    """The adaptive window, int [B]: 2 + 0.6 of the recent ratio of accepted to rejected drafts.

    A window of w feeds about 3 w rows, each of which costs 0.07 (float32) to 0.14 (int8) of a native step of two rows;
    for such costs this is within 2 % (float32) to 8 % (int8) of the best window (docs/speculative.md).
    """
    return (2 + 0.6 * accepted / rejected).clamp_max(MOST).round().long()


def labels(clean: Tensor, masks: Tensor, end: Tensor, pad: int) -> Visibility:
    """Clean tokens are causal in the order. A mask sees itself and, up to `end` [B], the clean tokens before it.

    clean [B, C] and masks [B, M] are places.
    """
    place = torch.cat([clean, masks], 1)
    slot = torch.arange(place.shape[1]).expand_as(place)
    token, real = slot < clean.shape[1], place < pad
    horizon = torch.where(token, place, torch.minimum(place, end[:, None]) - 1)
    rank = torch.where(token & real, place, HIDDEN)
    return Visibility(rank, torch.where(real, horizon, -1), torch.where(token & real, -1, slot))


def speculative(
    net: Network, x: Tensor, schedule: Schedule, choose: Chooser, window: int | None = None, shift: bool = False
) -> Iterator[Step]:
    """Eso-LM (B): the tokens of the order one by one, each from its exact conditional, in fewer passes than tokens.

    A pass feeds the newest verified token, drafts behind it, a mask in the place of each draft that sees what comes
    before, and masks in the next places that see all drafts. window: tokens drafted ahead of a pass, including the one
    that is certain, so 1 is the ordinary sampler; None adapts it for each row.
    """
    (batch, length), device = x.shape, x.device
    queries = Queries.of(schedule.sigma, choose.mask_id, shift, padded=True)
    sigma = queries.sigma
    tokens = F.pad(x.cpu().gather(1, schedule.sigma), (0, 1), value=choose.mask_id).to(device)
    total = schedule.given + schedule.sizes.sum(1)
    hits, misses = (torch.full(total.shape, count, dtype=torch.float64) for count in PRIOR)
    width = adapt(hits, misses) if window is None else torch.full_like(total, min(window, length))
    most = min(MOST if window is None else window, length)
    cache = net.new_cache(batch, length + int(schedule.given.max()) + 3 * most + 1)
    # Ends of three ranges of places: cached, verified, and proposed by the rows of `logits` at `where`.
    cached, known, proposed = torch.zeros_like(total), schedule.given, schedule.given
    logits, where = torch.empty(0, net.config.vocab_size, device=device), torch.zeros_like(sigma)
    while bool((live := known < total).any()):
        drafted = torch.minimum(proposed - known, width) * live
        end = known + drafted
        ahead = torch.minimum(total - end, width) * live
        drafts, clean = _run(known, drafted, length), _run(cached, (end - cached) * live, length)
        masks = torch.cat([drafts, _run(end, ahead, length)], 1)
        row, column = (drafts < length).nonzero(as_tuple=True)
        place, position = drafts[row, column], sigma[row, drafts[row, column]]
        q = logits[where[row, place].to(device)]
        guess, fits = guided_draft(choose, q, row, position)
        _write(tokens, row, place, guess)
        logits, where = yield from _forward(net, cache, tokens, queries, clean, masks, end)
        p = logits[where[row, place].to(device)]
        p, q = (choose.draw.probabilities(restricted(t, fits), choose.mask_id) for t in (p, q))
        kept = torch.zeros(drafts.shape, dtype=torch.bool)
        kept[row, column] = accept(p, q, guess, choose.uniform("accept", row, position, device)).cpu()
        accepted = kept.long().cumprod(1).sum(1)
        fed = (clean < length).sum(1) + (masks < length).sum(1)
        tried = Drafts(sigma.gather(1, drafts), tokens.gather(1, drafts.to(device)), drafts < length, accepted, fed)

        sure = (column < accepted[row]).nonzero()[:, 0]
        choose.commit(row[sure], position[sure], guess[sure.to(device)], p[sure.to(device)])
        at, rejected = known + accepted, accepted < drafted
        again, it = rejected.nonzero()[:, 0], (drafted.cumsum(0) - drafted + accepted)[rejected]
        number = choose.uniform("residual", again, position[it], device)
        other = inverse_cdf(residual(p[it.to(device)], q[it.to(device)]), number)
        _write(tokens, again, at[again], other)
        choose.commit(again, position[it], other, p[it.to(device)])
        exact = (live & ~rejected & (at < total)).nonzero()[:, 0]  # all drafts and the first proposal
        found = logits[where[exact, at[exact]].to(device)], exact, sigma[exact, at[exact]]
        _write(tokens, exact, at[exact], choose(*found))

        _commit(cache, (at - cached) * live, torch.where(live, at, cached))
        cached, proposed, before = torch.where(live, at, cached), end + ahead, known
        known = torch.minimum(at + 1, total)
        hits, misses = MEMORY * hits + accepted, MEMORY * misses + rejected
        width = width if window is not None else adapt(hits, misses)
        done = _run(before, known - before, length)
        yield Step(sigma.gather(1, done), tokens.gather(1, done.to(device)), done < length, tried)


def _forward(
    net: Network,
    cache: KVCache,
    tokens: Tensor,
    queries: Queries,
    clean: Tensor,
    masks: Tensor,
    end: Tensor,
) -> Generator[Any, Tensor, tuple[Tensor, Tensor]]:
    """One pass: the logits of the real masks [R, V], and by place which of them is a row's, int [B, L + 1]."""
    sigma = queries.sigma
    pad, device = sigma.shape[1] - 1, tokens.device
    asked = queries.ask(tokens, masks, torch.minimum(masks, end[:, None]))  # drafts count as known
    real = masks < pad
    even = bool((clean == clean[:1]).all() and (masks == masks[:1]).all())
    rows = slice(0, 1) if even else slice(None)
    seen = hide_copies(labels(clean[rows], masks[rows], end[rows], pad), one_row(asked.copies), clean.shape[1])
    seen = Visibility(seen.rank.to(device), seen.horizon.to(device), seen.clique.to(device))
    fed = torch.cat([tokens.gather(1, clean.to(device)), asked.tokens], 1)
    position = torch.cat([sigma.gather(1, clean), asked.position], 1)
    index = None if bool(real.all()) else real.flatten().nonzero()[:, 0].to(device)
    out = Rows(slice(clean.shape[1], fed.shape[1]), index)
    logits = yield from call(net, fed, position.to(device), seen, out, cache)
    number = (real.flatten().cumsum(0) - 1).view(masks.shape)
    where = torch.zeros_like(sigma).scatter_(1, masks, number)
    return logits.flatten(0, -2), where


def _run(begin: Tensor, count: Tensor, pad: int) -> Tensor:
    """The places begin, begin + 1, ... of each row."""
    return places(begin, count, int(count.max()), pad)


def _write(tokens: Tensor, row: Tensor, place: Tensor, value: Tensor) -> None:
    tokens[row.to(tokens.device), place.to(tokens.device)] = value


def _commit(cache: KVCache, count: Tensor, lengths: Tensor) -> None:
    """Keep the first `count` [B] slots of each row, which then has `lengths` [B] in all."""
    most = int(count.max())
    if bool((count == most).all()):
        cache.commit(most)
    else:
        cache.commit(count.to(cache.lengths.device), most, int(lengths.max()))
