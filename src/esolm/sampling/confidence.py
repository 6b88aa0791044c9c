"""Samplers that choose positions by confidence: each pass draws a token for every candidate and keeps the surest.

Sampler `confidence` keeps a fixed number in each pass, `threshold` every token whose confidence reaches tau, and always
the surest. A token that is not kept is drawn anew in the next pass, with its own random numbers. `unmask` is the loop
of MDLM; dynamic.py has that of Eso-LM.

Shapes: B batch, L length, C candidates of a row, R of all rows, m kept tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import order
from ..core.float64 import wide
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.visibility import full
from ..net.denoiser import Rows
from ..net.protocol import Network
from .chooser import Chooser, restricted
from .options import SamplingOptions
from .passes import call
from .request import Candidates, Request, Step

SAMPLERS = ("confidence", "threshold")
TAU = 0.9
"""The default threshold, that of Fast-dLLM."""
TIE = 1e-5
"""Confidences that differ by less are equal. Without a prompt, all positions have the same distribution in the first
pass, and rounding would choose among them."""
NEVER = 1 << 30


def confidence(logits: Tensor, token: Tensor, mask_id: int, measure: str) -> Tensor:
    """How sure the model is of each token, [R] between 0 and 1; logits [R, V], token int [R].

    In the model's own distribution, without temperature, top_p and top_k, in float64. probability: of the token.
    entropy: exp(-entropy). margin: the likeliest token's probability minus that of the second.
    """
    logits = logits.to(wide(logits.device), copy=True)
    logits[:, mask_id] = -torch.inf
    log_p = logits.log_softmax(-1)
    if measure == "probability":
        return log_p.gather(1, token[:, None])[:, 0].exp()
    p = log_p.exp()
    if measure == "entropy":
        return torch.where(p > 0, p * log_p, 0).sum(-1).exp()
    best = p.topk(2).values
    return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class Rule:
    """Which candidates of a pass are kept."""

    measure: str = "probability"
    tau: float | None = None  # None: as many as the schedule says

    @classmethod
    def of(cls, options: SamplingOptions) -> Rule:
        """The rule of sampler confidence or threshold."""
        tau = None if options.sampler == "confidence" else TAU if options.tau is None else options.tau
        return cls(options.confidence or "probability", tau)

    def pick(self, confidence: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the kept candidates, surest first, and which of them are real: int and bool [B, m].

        confidence: [B, C], -inf at padding. size: int [B]. Of equal candidates the first is preferred.
        """
        value, group = grouped(confidence)
        column = group.argsort(dim=1, stable=True)
        value, number = value.gather(1, group).gather(1, column), torch.arange(value.shape[1])
        keep = number < size[:, None] if self.tau is None else (value >= self.tau) | (number == 0)
        keep = keep & (value > -torch.inf)
        most = int(keep.sum(1).max())
        return column[:, :most], keep[:, :most]

    def step(self, choose: Chooser, logits: Tensor, at: Tensor, size: Tensor, number: int, fed: Tensor) -> Step:
        """What pass `number` keeps; logits [R, V] of the candidates at `at`, int [B, C], padded with L."""
        row, column = (at < NEVER).nonzero(as_tuple=True)
        position = at[row, column]
        if choose.guide is not None:
            logits = restricted(logits, choose.allowed(row, position, logits.shape[1]))
        fresh = dataclasses.replace(choose, rng=choose.rng.at(number), guide=None)
        token = fresh(logits, row, position)
        drawn = torch.zeros_like(at, device=token.device)
        drawn[row.to(token.device), column.to(token.device)] = token
        sure = torch.full(at.shape, -torch.inf, dtype=torch.float64)
        sure[row, column] = confidence(logits, token, choose.mask_id, self.measure).cpu().double()
        best, kept = fitting(choose, at, drawn, *self.pick(sure, size))
        real = at < NEVER
        candidates = Candidates(torch.where(real, at, 0), real, sure, best, fed)
        return Step(candidates.position.gather(1, best), drawn.gather(1, best.to(token.device)), kept, None, candidates)


def fitting(choose: Chooser, at: Tensor, drawn: Tensor, best: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of the picked candidates those that fit each other, surest first; the others are drawn again in a later pass.

    at, drawn: positions and tokens of the candidates, int [B, C]; best, kept: as `Rule.pick` returns them.
    """
    if choose.guide is None:
        return best, kept
    kept = kept.clone()
    choose.guide.log_q[:] = np.nan  # the order says something about the tokens
    for row, column in kept.nonzero().tolist():
        position, token = int(at[row, best[row, column]]) - choose.prepended, int(drawn[row, best[row, column]])
        kept[row, column] = choose.guide.fits(row, position, token)
        if kept[row, column]:
            choose.guide.commit(*(torch.tensor([value]) for value in (row, position, token)))
    first = (~kept).long().argsort(dim=1, stable=True)
    most = int(kept.sum(1).max())
    return best.gather(1, first)[:, :most], kept.gather(1, first)[:, :most]


def grouped(confidence: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each group of equal confidences, falling, and the group of each candidate: both [B, C].

    Values are equal if a chain of steps of at most TIE joins them.
    """
    value, column = confidence.sort(dim=1, descending=True)
    apart = F.pad(value[:, :-1] - value[:, 1:] > TIE, (1, 0))
    number = apart.long().cumsum(1)
    most = torch.full_like(value, -torch.inf).scatter_reduce_(1, number, value, "amax")
    return most, torch.empty_like(column).scatter_(1, column, number)


def packed(mask: Tensor) -> Tensor:
    """The columns where a row is true, ascending and padded with NEVER: bool [B, L] -> int [B, C]."""
    column = torch.where(mask, torch.arange(mask.shape[1]), NEVER)
    return column.sort(1).values[:, : int(mask.sum(1).max())]


def write(tokens: Tensor, step: Step) -> None:
    """Write the tokens of a step to their positions in `tokens`, [B, L]."""
    row, column = step.drawn.nonzero(as_tuple=True)
    device = tokens.device
    tokens[row.to(device), step.position[row, column].to(device)] = step.token[row.to(device), column.to(device)]


def block_of(free: Tensor, block_length: int | None) -> Tensor:
    """The block of each position, int [B, L]; block 0 begins at the first position to be drawn, those before have -1.

    free: bool [B, L], the positions to be drawn.
    """
    length = free.shape[1]
    first = free.int().argmax(1, keepdim=True)
    return torch.div(torch.arange(length) - first, block_length or length, rounding_mode="floor").clamp_min(-1)


def steps_of(free: Tensor, num_steps: int | None, block_length: int | None) -> Tensor:
    """The step of each position to be drawn, int [B, L], one block after another.

    The T steps are divided among the blocks that have something to draw, and the tokens of a block among its steps; the
    first ones take one more. No step is empty, and num_steps None draws one token at a time. Raises ValueError.
    """
    number = block_of(free, block_length).clamp_min(0)
    masks = torch.zeros_like(number).scatter_add_(1, number, free.long())  # of each block
    busy = masks > 0
    blocks = busy.sum(1, keepdim=True)
    if num_steps is not None and num_steps < (most := int(blocks.max())):
        raise ValueError(f"num_steps is {num_steps}; {most} blocks need at least {most}: raise it, or block_length")
    steps = masks
    if num_steps is not None:
        each = num_steps // blocks.clamp_min(1) + (busy.long().cumsum(1) - 1 < num_steps % blocks.clamp_min(1))
        steps = torch.where(busy, torch.minimum(each, masks), 0)
    before = (steps.cumsum(1) - steps).gather(1, number)
    masks, steps = masks.gather(1, number), steps.gather(1, number).clamp_min(1)
    inside = free.long().cumsum(1) - 1
    begin = torch.where(free, inside, NEVER)
    begin = torch.full_like(begin, NEVER).scatter_reduce_(1, number, begin, "amin").gather(1, number)
    index, few, more = inside - begin, masks // steps, masks % steps
    late = more + torch.div(index - more * (few + 1), few.clamp_min(1), rounding_mode="floor")
    return before + torch.where(index < more * (few + 1), torch.div(index, few + 1, rounding_mode="floor"), late)


def plan(system: str, samplers: Mapping[str, tuple[str, ...]], request: Request, rng: Randomness) -> Schedule:
    """The sizes of the steps; for sampler threshold one token each, the most that it can need. Raises ValueError."""
    options = request.options
    sampler = request.choose_sampler(system, samplers, "confidence")
    cached = options.cache not in (None, "none")
    if options.refresh is not None and not cached:
        raise ValueError("refresh belongs to a cache: leave it out, or set cache to prefix, dual, delayed or frozen")
    if options.freeze is not None and options.cache != "frozen":
        raise ValueError("freeze belongs to cache frozen: leave it out, or set cache to frozen")
    free = request.valid & ~request.given
    steps = options.num_steps if sampler == "confidence" else None
    found = order.counted(
        request.given, request.valid, rng, steps_of(free, steps, options.block_length), options.given_order
    )
    if options.window is not None and (most := int(found.sizes.max())) > options.window:
        raise ValueError(f"window is {options.window}; a step draws {most} tokens: raise window or num_steps")
    return found


class Now(NamedTuple):
    """A sample before a pass."""

    tokens: Tensor  # int [B, L], on the device of the network; the mask where undecided
    when: Tensor  # int [B, L]: the pass that decided each position; -1 if given, NEVER if undecided
    live: Tensor  # bool [B]: has undecided positions
    begin: Tensor  # int [B]: the current block, up to `end`
    end: Tensor
    last: Tensor  # int [B]: where the block of the pass before begins
    number: int  # of this pass
    age: Tensor  # int [B]: of this pass in its block
    at: Tensor  # int [B, C]: the candidates, padded with NEVER


class Passes(Protocol):
    """How the passes of `unmask` are computed."""

    def logits(self, now: Now) -> Generator[Any, Tensor, tuple[Tensor, Tensor]]:
        """The logits of the candidates, [R, V], and the number of positions of each row that were fed, int [B]."""
        ...


class Whole:
    """Every pass feeds the whole sequence."""

    def __init__(self, net: Network, valid: Tensor) -> None:
        self.net, self.valid = net, valid
        length, device = valid.shape[1], net.device
        self.position = torch.arange(length, device=device)[None]
        self.visibility = full(length, None if bool(valid.all()) else valid.to(device), device)

    def logits(self, now: Now) -> Generator[Any, Tensor, tuple[Tensor, Tensor]]:
        """Logits of the candidates, row by row, and how many positions each row fed, from one pass."""
        length = self.valid.shape[1]
        row, column = (now.at < NEVER).nonzero(as_tuple=True)
        out = Rows(slice(0, length), (row * length + now.at[row, column]).to(now.tokens.device))
        logits = yield from call(self.net, now.tokens, self.position, self.visibility, out)
        return logits, self.valid.sum(1) * now.live


def unmask(
    passes: Passes, x: Tensor, schedule: Schedule, choose: Chooser, rule: Rule, block_length: int | None = None
) -> Iterator[Step]:
    """MDLM: each pass chooses among the undecided positions of the row's current block, the first that has any."""
    undecided = schedule.step_of() >= 0
    number = block_of(undecided, block_length)
    tokens = torch.where(undecided.to(x.device), choose.mask_id, x)
    when = torch.where(undecided, NEVER, -1)
    first, size = undecided.int().argmax(1), block_length or x.shape[1]
    last, age = torch.full_like(first, -1), torch.zeros_like(first)
    for k in range(int(schedule.sizes.sum(1).max())):
        live = undecided.any(1)
        if not bool(live.any()):
            return
        current = number.gather(1, undecided.int().argmax(1, keepdim=True))[:, 0]
        begin = first + current * size
        age = torch.where(begin == last, age + 1, 0)
        at = packed(undecided & (number == current[:, None]))
        now = Now(tokens, when, live, begin, begin + size, last, k, age, at)
        logits, fed = yield from passes.logits(now)
        step = rule.step(choose, logits, at, schedule.sizes[:, min(k, schedule.sizes.shape[1] - 1)], k, fed)
        write(tokens, step)
        row, column = step.drawn.nonzero(as_tuple=True)
        undecided[row, step.position[row, column]] = False
        when[row, step.position[row, column]] = k
        last = begin
        yield step
