"""The sampling loops: each takes a complete schedule, calls the network once per step, and yields what it committed.

With a `Deferred` network they also yield each pass, and are sent its logits (passes.py).
Tokens stay in the order of the schedule throughout. There is no generator state.

Shapes: B batch, L length, K steps, m masks and c clean tokens fed at a step, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import order
from ..core.order import Schedule
from ..core.query import Queries
from ..core.randomness import Randomness
from ..core.visibility import HIDDEN, Visibility, full, hide, hide_copies
from ..net.cache import KVCache
from ..net.denoiser import Rows
from ..net.protocol import Network
from .chooser import Chooser
from .passes import call
from .request import Request, Step


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


def places(begin: Tensor, count: Tensor, most: int, pad: int, even: bool = False) -> Tensor:
    """Places begin, begin + 1, ... of each row, int [B, most]; `pad` after the row's own count, unless even."""
    offset = torch.arange(most)
    if even:
        return begin[:, None] + offset
    return torch.where(offset < count[:, None], begin[:, None] + offset, pad)


def capacity(schedule: Schedule) -> int:
    """Slots that a cache needs for a schedule: all places, and those that one pass writes after them."""
    most = int(schedule.sizes.max())
    return schedule.sigma.shape[1] + most + max(most, int(schedule.given.max()))


def _prefix_rank(num_clean: Tensor | int, place: Tensor) -> Tensor:
    """Variant A's rank: the first num_clean places [B, 1] see each other; 1 gives the place itself, variant B."""
    return (place - num_clean + 1).clamp_min(0)


def _labels(
    clean: Tensor,
    masks: Tensor,
    pad: int,
    rank: Callable[[Tensor], Tensor],
    hide_masks: bool,
    copies: Tensor | None,
    device: torch.device,
    even: bool = False,
) -> Visibility:
    """The sampling pattern: causal in the order. hide_masks: a mask sees the clean tokens and itself only.

    copies: bool, of the masks; nobody sees them. even: no place is padding.
    """
    place = torch.cat([clean, masks], 1)
    if even and not hide_masks:
        ranks = rank(place)
        found = hide_copies(Visibility(ranks, ranks, torch.full_like(place, -1)), copies, clean.shape[1])
        return Visibility(found.rank.to(device), found.horizon.to(device), found.clique.to(device))
    slot = torch.arange(place.shape[1]).expand_as(place)
    real = place < pad
    ranks = torch.where(real, rank(place), HIDDEN)
    horizon = torch.where(real, rank(place), -1)
    clique = torch.where(real, -1, slot)
    if hide_masks:
        num_clean = clean.shape[1]
        is_mask = slot >= num_clean
        ranks = torch.where(is_mask, HIDDEN, ranks)
        first = rank(masks[:, :1]) - 1
        horizon = torch.where(is_mask & real, first, horizon)
        clique = torch.where(is_mask, slot, clique)
    found = hide_copies(Visibility(ranks, horizon, clique), copies, clean.shape[1])
    return Visibility(found.rank.to(device), found.horizon.to(device), found.clique.to(device))


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
    batch, length = x.shape
    device = x.device
    queries = Queries.of(schedule.sigma, choose.mask_id, shift, padded=True)
    tokens = F.pad(x.cpu().gather(1, schedule.sigma), (0, 1), value=choose.mask_id).to(device)
    even = bool((schedule.sizes == schedule.sizes[:1]).all() and (schedule.given == schedule.given[:1]).all())
    begin, count = torch.zeros_like(schedule.given), schedule.given
    starts = schedule.starts
    lengths = torch.zeros_like(count)
    if cache is None:
        cache = net.new_cache(batch, capacity(schedule))
    rank = functools.partial(_prefix_rank, schedule.given[: 1 if even else None, None] if prefix else 1)
    for k in range(int(schedule.nfe.max())):
        size = schedule.sizes[:, k]
        most = int(count.max())
        clean = places(begin, count, most, length, even)
        masks = places(starts[:, k], size, int(size.max()), length, even)
        asked = queries.ask(tokens, masks, starts[:, k, None])
        rows = slice(0, 1) if even else slice(None)
        labels = _labels(clean[rows], masks[rows], length, rank, hide_masks, one_row(asked.copies), device, even)
        position = torch.cat([queries.sigma.gather(1, clean), asked.position], 1)
        fed = torch.cat([tokens.gather(1, clean.to(device)), asked.tokens], 1)
        logits = yield from call(net, fed, position.to(device), labels, Rows(slice(most, fed.shape[1])), cache)
        lengths = lengths + count
        cache.commit(most) if even else cache.commit(count.to(device), most, int(lengths.max()))
        at, drawn = queries.sigma.gather(1, masks), masks < length
        token = choose.grid(logits, at, drawn)
        tokens.scatter_(1, masks.to(device), token)
        yield Step(at, token, drawn)
        begin, count = starts[:, k], size


def one_row(copies: Tensor | None) -> Tensor | None:
    """Copies, bool [B, M], as one row if all rows are alike: then a mask needs no batch dimension."""
    return copies[:1] if copies is not None and bool((copies == copies[:1]).all()) else copies


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
        rank = functools.partial(_prefix_rank, start[:, None])
        labels = _labels(clean, masks, length, rank, hide_masks, asked.copies, x.device)
        position = queries.sigma.gather(1, clean)
        fed = torch.cat([tokens.gather(1, position.to(x.device)), asked.tokens], 1)
        position = torch.cat([position, asked.position], 1).to(x.device)
        logits = yield from call(net, fed, position, labels, Rows(slice(clean.shape[1], fed.shape[1])))
        at, drawn = queries.sigma.gather(1, masks), masks < length
        token = choose.grid(logits, at, drawn)
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
        chosen = choose((yield from call(net, tokens, position, visibility, out)), row, at[drawn])
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
        logits = yield from call(net, before.gather(1, place), place, labels, rows, cache)
        done = done + count
        cache.commit(most) if even else cache.commit(count.to(device), most, int(done.max()))
        position = at.clamp_max(x.shape[1] - 1)
        token = choose.grid(logits[:, None], position[:, None], drawn[:, None])[:, 0]
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
            logits = yield from call(net, tokens[:, fed], position.expand(batch, -1), labels, rows, cache)
            if waiting:
                cache.commit(waiting * block_size)
                waiting = 0
            token = torch.zeros_like(at).to(device)
            token[drawn.to(device)] = choose(logits, row, column + first)
            _write(tokens, at, token, drawn)
            yield Step(at, token, drawn)
        waiting += 1


def _block_labels(number: Tensor, current: int) -> Visibility:
    """Clean blocks are block-causal; the current block of z sees them and itself, both ways."""
    z = number == current
    return Visibility(torch.where(z, HIDDEN, number), torch.where(z, current - 1, number), torch.where(z, 0, -1))
