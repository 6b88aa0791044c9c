"""The naive sampler that the sampling loops are compared with.

One sequence at a time, without padding, without a cache, in natural order, with the paper's attention bias at each step
written out (B.8 for Eso-LM (B), D.3 for (A)). Distributions are enumerated from it, token by token.

Shapes: V vocabulary; a row's positions are 0 .. n - 1.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esolm.core.draw import Draw
from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.sampling.request import Request, Step
from support import paper

Tokens = tuple[int, ...]


class Plan(NamedTuple):
    """One row of a schedule: how many positions of sigma are given, and the steps behind them."""

    given: Tokens  # positions, in their order
    steps: tuple[Tokens, ...]
    diffusion: int  # how many of the steps belong to the diffusion phase

    @property
    def sigma(self) -> Tokens:
        return self.given + sum(self.steps, ())


def plan_of(schedule: Schedule, row: int) -> Plan:
    given = schedule.sigma[row, : int(schedule.given[row])].tolist()
    return Plan(tuple(given), tuple(map(tuple, schedule.steps(row))), int(schedule.diffusion[row]))


def decoded(plan: Plan, k: int) -> Tokens:
    """D_k: what is clean before step k, in the order of sigma."""
    return plan.given + sum(plan.steps[:k], ())


def eso_b(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int, hidden: bool = False) -> Tensor:
    """Logits of the masks of S_k, [|S_k|, V]. hidden: a mask sees no other mask (systems with the any-order loss)."""
    clean, now = decoded(plan, k), plan.steps[k]
    tokens, seen = paper.sampling_b(plan.sigma, len(clean), len(now))
    if hidden:
        for (p, i), (q, j) in itertools.product(enumerate(tokens), repeat=2):
            if i in now and j in now:
                seen[p, q] = i == j
    out = paper.logits(net, [known[i] if i in clean else mask for i in tokens], tokens, seen)
    return out[[tokens.index(i) for i in now]]


def eso_a(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int) -> Tensor:
    clean, now = decoded(plan, k), plan.steps[k]
    by_diffusion = len(decoded(plan, min(k, plan.diffusion)))
    tokens, seen = paper.sampling_a(plan.sigma, by_diffusion, len(clean) - by_diffusion, len(now))
    out = paper.logits(net, [known[i] if i in clean else mask for i in tokens], tokens, seen)
    return out[[tokens.index(i) for i in now]]


def shifted(net: Any, kind: str, plan: Plan, k: int, known: Mapping[int, int], mask: int, start: int) -> Tensor:
    """Logits of the shifted queries of S_k; kind: B, any or A."""
    clean, chain = decoded(plan, k), kind != "any"
    together = len(decoded(plan, min(k, plan.diffusion))) if kind == "A" else 0
    return paper.shifted_logits(net, known, clean, plan.steps[k], mask, start, chain, together)


def mdlm(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int) -> Tensor:
    clean, length = decoded(plan, k), len(plan.sigma)
    tokens = [known[i] if i in clean else mask for i in range(length)]
    return paper.logits(net, tokens, range(length), paper.bidirectional(length))[list(plan.steps[k])]


def bd3lm(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int, size: int) -> Tensor:
    """By the training pattern over z and x: z as it stands at this step, x with every block before it clean."""
    clean, length, now = decoded(plan, k), len(plan.sigma), plan.steps[k]
    z = [known[i] if i in clean else mask for i in range(length)]
    first = now[0] // size * size
    assert mask not in z[:first]  # every block before is clean
    assert {i // size for i in now} == {now[0] // size}
    return paper.logits(net, z + z, [*range(length)] * 2, paper.blocks(length, size))[list(now)]


def ar(net: Any, plan: Plan, k: int, known: Mapping[int, int], mask: int) -> Tensor:
    (now,) = plan.steps[k]
    tokens = [mask, *(known[i] for i in range(now))]
    return paper.logits(net, tokens, range(now + 1), paper.left_to_right(now + 1))[-1:]


@dataclass
class Naive:
    """The conditionals of a system and the distribution of its samples, each computed once."""

    net: Any
    kind: str  # B, any, A, mdlm, ar, or bd3lm with its block size; B-shift, any-shift and A-shift
    mask: int
    start: int | None = None  # the token before the text, by default the mask
    memo: dict[Any, Tensor] = field(default_factory=dict)

    def logits(self, plan: Plan, k: int, known: Mapping[int, int]) -> Tensor:
        """Of the positions of step k, in the order of the step, [|S_k|, V]; known: tokens by position."""
        if self.kind.startswith("bd3lm"):
            return bd3lm(self.net, plan, k, known, self.mask, int(self.kind[5:]))
        if self.kind.endswith("-shift"):
            start = self.mask if self.start is None else self.start
            return shifted(self.net, self.kind.removesuffix("-shift"), plan, k, known, self.mask, start)
        if self.kind == "any":
            return eso_b(self.net, plan, k, known, self.mask, hidden=True)
        step = {"B": eso_b, "A": eso_a, "mdlm": mdlm, "ar": ar}[self.kind]
        return step(self.net, plan, k, known, self.mask)

    def conditional(self, plan: Plan, k: int, known: Mapping[int, int]) -> Tensor:
        """Probabilities of the tokens of a step, each given what the step sees, [|S_k|, V]."""
        clean = decoded(plan, k)
        sequential = clean[len(decoded(plan, min(k, plan.diffusion))) :]
        key = (clean, tuple(known[i] for i in clean), plan.steps[k], sequential, len(plan.sigma))
        if key not in self.memo:
            out = self.logits(plan, k, known).clone()
            out[:, self.mask] = -math.inf
            self.memo[key] = out.softmax(-1)
        return self.memo[key]

    def joint(self, plan: Plan, known: Mapping[int, int]) -> dict[Tokens, float]:
        """The probability of every sequence: the product, over the steps, of the conditionals that each defines."""
        return dict(self._from(plan, 0, dict(known), 1.0))

    def _from(self, plan: Plan, k: int, known: dict[int, int], p: float) -> Iterator[tuple[Tokens, float]]:
        if k == len(plan.steps):
            yield tuple(known[i] for i in range(len(plan.sigma))), p
            return
        now, table = plan.steps[k], self.conditional(plan, k, known).tolist()
        real = [v for v in range(len(table[0])) if v != self.mask]
        for drawn in itertools.product(real, repeat=len(now)):
            chance = math.prod(row[v] for row, v in zip(table, drawn))
            yield from self._from(plan, k + 1, {**known, **dict(zip(now, drawn))}, p * chance)


def mixture(plans: Mapping[Plan, float], naive: Naive, known: Mapping[int, int]) -> dict[Tokens, float]:
    """The distribution of samples when the schedule is drawn too."""
    found: dict[Tokens, float] = defaultdict(float)
    for plan, weight in plans.items():
        for x, p in naive.joint(plan, known).items():
            found[x] += weight * p
    return dict(found)


def every_plan(length: int, alpha_0: float, num_steps: int, given: tuple[Tokens, ...] = ((),)) -> dict[Plan, float]:
    """Every schedule of the paper's algorithm with its probability, by its own sequential rule.

    At each of the T steps a position that is still masked is denoised with probability
    (alpha_s - alpha_t) / (1 - alpha_t); the positions of a step come in uniformly random order; what is left goes left
    to right. given: the orders of the given positions, all equally likely.
    """
    plans: dict[Plan, float] = defaultdict(float)

    def go(t: int, left: Tokens, steps: tuple[Tokens, ...], p: float, first: Tokens) -> None:
        if p == 0:
            return
        if t == 0:
            plans[Plan(first, steps + tuple((i,) for i in left), len(steps))] += p
            return
        alpha_t, alpha_s = alpha_0 * (1 - t / num_steps), alpha_0 * (1 - (t - 1) / num_steps)
        rate = (alpha_s - alpha_t) / (1 - alpha_t)
        for size in range(len(left) + 1):
            for chosen in itertools.permutations(left, size):
                chance = rate**size * (1 - rate) ** (len(left) - size) / math.factorial(size)
                rest = tuple(i for i in left if i not in chosen)
                go(t - 1, rest, (*steps, chosen) if size else steps, p * chance, first)

    for first in given:
        go(num_steps, tuple(i for i in range(length) if i not in first), (), 1 / len(given), first)
    return dict(plans)


def run(system: Any, net: Any, request: Request, rng: Randomness) -> tuple[Tensor, Schedule, list[Step]]:
    """Carry out a request: tokens int [B, L], with the mask wherever nothing was given or drawn."""
    schedule = system.plan(request, rng)
    with torch.inference_mode():
        steps = list(system.sample(net, request, schedule, rng))
    tokens = torch.where(request.given & request.valid, request.x, system.mask_id)
    for step in steps:
        row, column = step.drawn.nonzero(as_tuple=True)
        tokens[row, step.position[row, column]] = step.token[row, column]
    return tokens, schedule, steps


@dataclass(frozen=True)
class Recording(Draw):
    """Draws tokens as `Draw` does, and keeps the logits of every step."""

    seen: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, uniform: Any, mask_id: int) -> Tensor:
        self.seen.append(logits.clone())
        return super().__call__(logits, uniform, mask_id)
