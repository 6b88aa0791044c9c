"""The sampling loops: each takes a complete schedule, calls the network once per step, and yields what it committed.

With a `Deferred` network they also yield each pass, and are sent its logits (passes.py).
Tokens stay in the order of the schedule throughout. There is no generator state.

Shapes: B batch, L length, K steps, m masks and c clean tokens fed at a step, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import order
from ..core.order import Schedule
from ..core.query import Queries
from ..core.randomness import Randomness
from ..core.visibility import HIDDEN, Visibility, full, hide
from ..net.cache import KVCache
from ..net.denoiser import Rows
from ..net.protocol import Network
from .chooser import Chooser
from .feeds import Even, Ragged, capacity, labels, places, prefix_rank
from .passes import Deferred, call
from .request import Request, Step


def picked(
    net: Network,
    choose: Chooser,
    row: Tensor,
    at: Tensor,
    real: Tensor | None,
    tokens: Tensor,
    position: Tensor,
    visibility: Visibility,
    out: Rows,
    cache: KVCache | None = None,
) -> Generator[Any, Tensor, Tensor]:
    """The tokens at positions `at` of `row`, both int [R] or [B, m], drawn from the logits of one pass; see `call`.

    real: bool; those where it is False mean nothing. None: all are real.
    """
    drawing = choose.drawing(row.flatten(), at.flatten(), tokens.device) if isinstance(net, Deferred) else None
    found = yield from call(net, tokens, position, visibility, out, cache, drawing=drawing)
    if drawing is not None:
        return found.view(at.shape)
    logits = found.flatten(0, -2)
    if choose.guide is None or real is None:
        return choose(logits, row.flatten(), at.flatten()).view(at.shape)
    token = torch.zeros(at.shape, dtype=torch.long, device=logits.device)
    token[real.to(logits.device)] = choose(logits[real.flatten().to(logits.device)], row[real], at[real])
    return token


def row_of(at: Tensor) -> Tensor:
    """The row of each of the positions int [B, m]."""
    return torch.arange(len(at))[:, None].expand_as(at)


def any_order_plan(
    system: str, samplers: Mapping[str, tuple[str, ...]], request: Request, rng: Randomness, alpha_0: float
) -> Schedule:
    """The schedule of a system that denoises in any order; by default first-hitting, or ancestral with num_steps."""
    options = request.options
    stepwise = options.num_steps is not None and "ancestral" in samplers
    default = "ancestral" if stepwise else "first_hitting"
    sampler = request.choose_sampler(system, samplers, default)
    given, valid, given_order = request.given, request.valid, options.given_order
    alpha_0 = alpha_0 if options.alpha_0 is None else options.alpha_0
    if sampler == "order" and request.order is None:
        raise ValueError("sampler order needs order, a permutation of the positions")
    if sampler == "speculative" and request.order is not None and options.alpha_0 is not None:
        raise ValueError("sampler speculative takes either alpha_0, which draws the order, or order")
    if request.order is not None:
        return order.user_order(given, valid, rng, request.order, given_order)
    if sampler == "block":
        if options.parallelism is None:
            raise ValueError("sampler block needs parallelism, the number of tokens drawn together")
        return order.blocks(given, valid, rng, options.parallelism, given_order)
    if sampler == "left_to_right":
        return order.ancestral(given, valid, rng, 0.0, None, given_order)
    if sampler in ("first_hitting", "speculative"):
        return order.ancestral(given, valid, rng, alpha_0, None, given_order)
    own = valid.sum(1, keepdim=True)  # T of each row is its own length, whatever is batched with it
    steps = own if options.num_steps is None else options.num_steps
    return order.ancestral(given, valid, rng, alpha_0, steps, given_order)


def ordered(
    net: Network,
    x: Tensor,
    schedule: Schedule,
    choose: Chooser,
    hide_masks: bool = False,
    prefix: bool = False,
    cache: KVCache | None = None,
    shift: bool = False,
) -> Iterator[Step]:
    """Eso-LM (B): step k feeds the clean tokens of step k-1 and the masks of step k, and commits only the former.

    x [B, L] holds the given tokens at their positions. prefix: the given tokens see each other (variant A). shift:
    shifted queries take the place of masks, and x begins with a start token.
    """
    queries = Queries.of(schedule.sigma, choose.mask_id, shift, padded=True)
    alike = bool((schedule.sizes == schedule.sizes[:1]).all() and (schedule.given == schedule.given[:1]).all())
    passes = (Even if alike else Ragged)(x, schedule, queries, hide_masks, prefix)
    if cache is None:
        cache = net.new_cache(len(x), capacity(schedule))
    for k in range(int(schedule.nfe.max())):
        fed = passes.feed(k)
        rows = Rows(slice(fed.num_clean, fed.tokens.shape[1]))
        asked = fed.tokens, fed.position, fed.visibility, rows, cache
        token = yield from picked(net, choose, row_of(fed.at), fed.at, fed.drawn, *asked)
        passes.write(k, token, cache)
        yield Step(fed.at, token, fed.drawn)


def prefix_ordered(
    net: Network, x: Tensor, schedule: Schedule, choose: Chooser, hide_masks: bool, shift: bool = False
) -> Iterator[Step]:
    """Eso-LM (A): without a cache while clean tokens still see new ones; cached once the sequential phase begins."""
    length = x.shape[1]
    tokens = x.clone()
    queries = Queries.of(schedule.sigma, choose.mask_id, shift, padded=True)
    diffusion = schedule.diffusion[:, None]
    step = torch.arange(schedule.sizes.shape[1])
    sizes = torch.where(step < diffusion, schedule.sizes, 0)
    starts = schedule.starts
    for k in range(int(diffusion.max())):
        size, start = sizes[:, k], torch.where(sizes[:, k] > 0, starts[:, k], 0)
        clean = places(torch.zeros_like(start), start, int(start.max()), length)
        masks = places(start, size, int(size.max()), length)
        asked = queries.ask(tokens.gather(1, schedule.sigma.to(x.device)), masks, start[:, None])
        rank = functools.partial(prefix_rank, start[:, None])
        seen = labels(clean, masks, length, rank, hide_masks, asked.copies, x.device)
        position = queries.sigma.gather(1, clean)
        fed = torch.cat([tokens.gather(1, position.to(x.device)), asked.tokens], 1)
        position = torch.cat([position, asked.position], 1).to(x.device)
        at, drawn = queries.sigma.gather(1, masks), masks < length
        rows = Rows(slice(clean.shape[1], fed.shape[1]))
        token = yield from picked(net, choose, row_of(at), at, drawn, fed, position, seen, rows)
        _write(tokens, at, token, drawn)
        yield Step(at, token, drawn)
    # The sequential phase, with everything so far given.
    rest = (step + diffusion).clamp_max(schedule.sizes.shape[1] - 1)
    left = torch.where(step + diffusion < schedule.sizes.shape[1], schedule.sizes.gather(1, rest), 0)
    left = left[:, : int((left > 0).sum(1).max())]
    if left.shape[1]:
        given = schedule.given + sizes.sum(1)
        sequential = Schedule(schedule.sigma, left, given, torch.zeros_like(given))
        yield from ordered(net, tokens, sequential, choose, hide_masks, prefix=True, shift=shift)


def _write(tokens: Tensor, position: Tensor, token: Tensor, drawn: Tensor) -> None:
    """tokens[b, position] = token wherever drawn."""
    row, column = drawn.nonzero(as_tuple=True)
    tokens[row.to(tokens.device), position[row, column].to(tokens.device)] = token[drawn.to(token.device)]


def bidirectional(net: Network, x: Tensor, valid: Tensor, schedule: Schedule, choose: Chooser) -> Iterator[Step]:
    """MDLM: every step runs the whole sequence, and only the positions of the step get logits.

    A step that unmasks nothing has no entry in the schedule: it would repeat the prediction before it.
    """
    length = x.shape[1]
    clean = torch.arange(length) < schedule.given[:, None]
    known = torch.zeros_like(clean).scatter(1, schedule.sigma, clean)
    tokens = torch.where(known.to(x.device), x, choose.mask_id)
    position = torch.arange(length, device=x.device)[None]
    visibility = full(length, None if bool(valid.all()) else valid.to(x.device), x.device)
    sigma, starts = F.pad(schedule.sigma, (0, 1)), schedule.starts
    for k in range(int(schedule.nfe.max())):
        size = schedule.sizes[:, k]
        masks = places(starts[:, k], size, int(size.max()), length)
        at, drawn = sigma.gather(1, masks), masks < length
        row = torch.arange(len(x))[:, None].expand_as(at)[drawn]
        out = Rows(slice(0, length), (row * length + at[drawn]).to(x.device))
        chosen = yield from picked(net, choose, row, at[drawn], None, tokens, position, visibility, out)
        token = torch.zeros_like(at, device=x.device)
        token[drawn.to(x.device)] = chosen
        _write(tokens, at, token, drawn)
        yield Step(at, token, drawn)


def left_to_right(
    net: Network, x: Tensor, lengths: Tensor, prompt: Tensor, choose: Chooser, start_id: int
) -> Iterator[Step]:
    """AR: the prompt in one pass, then one token a pass, each predicted from the token before it.

    lengths, prompt: int [B], the number of all tokens and of the given ones, which come first.
    """
    batch, device = len(x), x.device
    before = F.pad(x, (1, 0), value=start_id)  # the token that predicts position i stands at i
    cache = net.new_cache(batch, before.shape[1] + 1)
    even = bool((prompt == prompt[0]).all() and (lengths == lengths[0]).all())
    begin, count = torch.zeros_like(prompt), (prompt + 1) * (prompt < lengths)
    done = torch.zeros_like(prompt)
    for at in (prompt + k for k in range(int((lengths - prompt).max()))):
        drawn, most = at < lengths, int(count.max())
        place = places(begin, count, most, HIDDEN)
        rank = place[: 1 if even else None].to(device)
        alone = torch.where(rank == HIDDEN, torch.arange(most, device=device), -1)
        labels = Visibility(rank, torch.where(rank == HIDDEN, -1, rank), alone)
        place = place.clamp_max(x.shape[1] - 1).to(device)
        last = torch.arange(batch) * most + (count - 1).clamp_min(0)
        rows = Rows(slice(0, most), last.to(device))
        position = at.clamp_max(x.shape[1] - 1)
        fed = before.gather(1, place)
        token = yield from picked(net, choose, torch.arange(batch), position, drawn, fed, place, labels, rows, cache)
        done = done + count
        cache.commit(most) if even else cache.commit(count.to(device), most, int(done.max()))
        before[drawn.nonzero()[:, 0].to(device), position[drawn].to(device) + 1] = token[drawn.to(device)]
        yield Step(position[:, None], token[:, None], drawn[:, None])
        begin, count = at + 1, (at + 1 < lengths).long()


def blockwise(
    net: Network, x: Tensor, valid: Tensor, schedule: Schedule, block_size: int, choose: Chooser
) -> Iterator[Step]:
    """BD3-LM: block by block, with a cache between blocks and the steps of the schedule inside.

    The first pass of a block also feeds the clean block before it and commits that.
    """
    batch, length = x.shape
    device = x.device
    step = schedule.step_of()
    tokens = torch.where((step < 0).to(device), x, choose.mask_id)
    cache = net.new_cache(batch, length + block_size)
    waiting = 0  # blocks that are clean and not yet committed
    for first in range(0, length, block_size):
        inside = step[:, first : first + block_size]
        when = inside - torch.where(inside < 0, HIDDEN, inside).amin(1, keepdim=True)
        at = torch.arange(first, first + block_size).expand(batch, -1)
        for now in range(int(when.max()) + 1):
            fed = slice(first - waiting * block_size, first + block_size)
            position = torch.arange(fed.start, fed.stop, device=device)[None]
            drawn = when == now
            row, column = drawn.nonzero(as_tuple=True)
            slots = fed.stop - fed.start
            rows = Rows(slice(0, slots), (row * slots + column + first - fed.start).to(device))
            labels = _block_labels(position // block_size, first // block_size)
            if not bool(valid.all()):
                labels = hide(labels, valid[:, fed].to(device))
            asked = tokens[:, fed], position.expand(batch, -1), labels, rows, cache
            chosen = yield from picked(net, choose, row, column + first, None, *asked)
            if waiting:
                cache.commit(waiting * block_size)
                waiting = 0
            token = torch.zeros_like(at).to(device)
            token[drawn.to(device)] = chosen
            _write(tokens, at, token, drawn)
            yield Step(at, token, drawn)
        waiting += 1


def _block_labels(number: Tensor, current: int) -> Visibility:
    """Clean blocks are block-causal; the current block of z sees them and itself, both ways."""
    z = number == current
    return Visibility(torch.where(z, HIDDEN, number), torch.where(z, current - 1, number), torch.where(z, 0, -1))
