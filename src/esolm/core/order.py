"""Orders and schedules: sigma[:, l] is the position that is denoised l-th, a 0-based permutation.

Shapes: B batch, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .randomness import Randomness

GIVEN, CLEAN, MASKED, PADDING = range(4)
"""The groups of an order, in the order in which they come."""

GIVEN_ORDERS = ("random", "ascending")


def inverse(sigma: Tensor) -> Tensor:
    """sigma_inv[:, i] is the step at which position i is denoised, int [B, L]."""
    steps = torch.arange(sigma.shape[1], device=sigma.device).expand_as(sigma)
    return torch.empty_like(sigma).scatter_(1, sigma, steps)


def groups(masked: Tensor, valid: Tensor | None, given: Tensor | None) -> Tensor:
    """The group of each position, int [B, L]."""
    group = torch.where(masked, MASKED, CLEAN)
    if given is not None:
        group = torch.where(given, GIVEN, group)
    return group if valid is None else torch.where(valid, group, PADDING)


def left_to_right(u: Tensor, where: Tensor | None) -> Tensor:
    """Sorting keys in (0, 1), [B, L]: ascending by position where `where` is true, u elsewhere."""
    return u if where is None else torch.where(where, torch.arange(u.shape[1], device=u.device) / u.shape[1], u)


def sort(group: Tensor, u: Tensor, ascending: bool = False) -> Tensor:
    """sigma with one group after another, each in random order by u in (0, 1); `ascending`: MASKED left to right."""
    return (group + (left_to_right(u, group == MASKED) if ascending else u)).argsort(-1)


def draw(alpha_0: float | Tensor, u: Tensor, clean: Tensor, valid: Tensor | None, given: Tensor | None) -> Tensor:
    """sigma ~ P_L^alpha_0: each position is clean with probability alpha_0; clean positions come in random
    order, then the rest ascending. Given positions come first, padding last. u, clean: independent uniforms [B, L].
    alpha_0: a number, or one for each row, [B, 1]."""
    return sort(groups(clean >= alpha_0, valid, given), u, ascending=True)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which positions are denoised at which step, complete before the first forward pass.

    The order of a row holds its given positions, then those of its steps one after another, then padding.
    """

    sigma: Tensor  # int [B, L]
    sizes: Tensor  # int [B, K]: n_k of each row, zeros only at the end
    given: Tensor  # int [B]: leading positions of the order that are clean from the start
    diffusion: Tensor  # int [B]: number of steps in the diffusion phase

    @property
    def nfe(self) -> Tensor:
        """Number of network evaluations of each row, int [B]."""
        return (self.sizes > 0).sum(1)

    @property
    def starts(self) -> Tensor:
        """The index in sigma at which each step starts, int [B, K]."""
        return self.given[:, None] + self.sizes.cumsum(1) - self.sizes

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each row, given or drawn, int [B]."""
        return self.given + self.sizes.sum(1)

    @property
    def rewrites(self) -> bool:
        """Whether a position that was drawn may be drawn again."""
        return False

    def free(self, row: int = 0) -> list[int]:
        """The positions of one row that are drawn."""
        return self.sigma[row, int(self.given[row]) : int(self.lengths[row])].tolist()

    def step_of(self) -> Tensor:
        """The step of each position, int [B, L]; -1 for given positions and padding."""
        place = torch.arange(self.sigma.shape[1]).expand_as(self.sigma)
        ends = self.given[:, None] + self.sizes.cumsum(1)
        step = torch.searchsorted(ends, place.contiguous(), right=True)
        step = torch.where((place < self.given[:, None]) | (place >= ends[:, -1:]), -1, step)
        return torch.empty_like(step).scatter_(1, self.sigma, step)

    def begins(self) -> Tensor:
        """The place of the order at which the step of each place begins, int [B, L]; given tokens and padding: 0."""
        place = torch.arange(self.sigma.shape[1]).expand_as(self.sigma)
        step = torch.searchsorted(self.starts, place.contiguous(), right=True) - 1
        drawn = (place >= self.given[:, None]) & (place < self.lengths[:, None])
        last = (self.nfe - 1).clamp_min(0)[:, None]
        return torch.where(drawn, self.starts.gather(1, torch.minimum(step, last).clamp_min(0)), 0)

    def merged(self, most: int) -> Schedule:
        """The same order in at most `most` steps, each of some consecutive steps of this schedule."""
        steps = self.nfe[:, None]
        parts = steps.clamp_max(most)
        number = torch.arange(self.sizes.shape[1]).expand_as(self.sizes) * parts // steps.clamp_min(1)
        number = number.clamp_max(self.sizes.shape[1] - 1)
        sizes = torch.zeros_like(self.sizes).scatter_add_(1, number, self.sizes)
        sizes = sizes[:, : max(int(parts.max()), 1)]
        return Schedule(self.sigma, sizes, self.given, parts[:, 0])

    def rows(self, index: slice | Tensor) -> Schedule:
        """Some rows."""
        return Schedule(self.sigma[index], self.sizes[index], self.given[index], self.diffusion[index])

    def steps(self, row: int = 0) -> list[list[int]]:
        """The paper's S = (S_1, ..., S_K) of one row: the positions of each step."""
        places = self.free(row)
        steps = []
        for size in self.sizes[row, : int(self.nfe[row])].tolist():
            steps.append(places[:size])
            places = places[size:]
        return steps


@dataclass(frozen=True, slots=True)
class Chain(Schedule):
    """A schedule whose steps draw all positions that are not given again, or as many of them as the network decides.

    The order of a row holds its given positions, the others ascending, then padding; sizes[:, k] counts the others in
    every step k.
    """

    redraws: bool = True  # False if each position is drawn once, at a step that is not known beforehand

    @property
    def starts(self) -> Tensor:
        return self.given[:, None].expand_as(self.sizes)

    @property
    def lengths(self) -> Tensor:
        return self.given + self.sizes[:, 0]

    @property
    def rewrites(self) -> bool:
        return self.redraws and self.sizes.shape[1] > 1

    def step_of(self) -> Tensor:
        """The last step for positions that are not given; -1 for given positions and padding."""
        place = torch.arange(self.sigma.shape[1]).expand_as(self.sigma)
        free = (place >= self.given[:, None]) & (place < self.lengths[:, None])
        step = torch.where(free, self.sizes.shape[1] - 1, -1)
        return torch.empty_like(step).scatter_(1, self.sigma, step)

    def steps(self, row: int = 0) -> list[list[int]]:
        return [self.free(row)] * int(self.nfe[row])


def chain(given: Tensor, valid: Tensor, num_steps: int, redraws: bool = True) -> Chain:
    """num_steps steps for all positions that are valid and not given."""
    free = valid & ~given
    group = groups(free, valid, given & valid)
    sigma = group.argsort(stable=True)
    sizes = free.sum(1, keepdim=True).repeat(1, num_steps)
    steps = torch.where(free.any(1), num_steps, 0)
    return Chain(sigma, sizes, (group == GIVEN).sum(1), steps, redraws)


def _schedule(group: Tensor, u: Tensor, step: Tensor, given_u: Tensor) -> Schedule:
    """Sort positions by group, then by step, then by u; a new step begins wherever `step` changes.

    group, u, step: [B, L]; the steps of CLEAN (diffusion) come before those of MASKED (left to right).
    """
    length = group.shape[1]
    key = torch.where(group == GIVEN, given_u, u)
    sigma = key.argsort(-1)
    for level in (step, group):
        sigma = sigma.gather(1, level.gather(1, sigma).argsort(stable=True))
    kind = group.gather(1, sigma)
    at = step.gather(1, sigma)
    drawn = (kind == CLEAN) | (kind == MASKED)
    fresh = torch.ones_like(drawn)
    fresh[:, 1:] = (at[:, 1:] != at[:, :-1]) | (kind[:, 1:] != kind[:, :-1])
    fresh &= drawn
    number = fresh.long().cumsum(1) - 1
    sizes = torch.zeros(len(group), length, dtype=torch.long).scatter_add_(1, number.clamp_min(0), drawn.long())
    sizes = sizes[:, : max(int((sizes > 0).sum(1).max()), 1)]
    return Schedule(sigma, sizes, (group == GIVEN).sum(1), (fresh & (kind == CLEAN)).sum(1))


def _prepare(given: Tensor, valid: Tensor, rng: Randomness, given_order: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions as floats, a uniform per position, the sorting key of given positions, and groups without CLEAN."""
    if given_order not in GIVEN_ORDERS:
        raise ValueError(f"given_order is {given_order!r}; it must be one of {', '.join(GIVEN_ORDERS)}")
    batch, length = given.shape
    rows = rng.examples(batch)
    position = torch.arange(length, dtype=torch.float64).expand(batch, -1)
    given_u = position if given_order == "ascending" else rng.at("given").uniform(rows, length)
    group = groups(torch.ones_like(given), valid, given & valid)
    return position, rng.at("schedule").uniform(rows, length), given_u, group


def ancestral(
    given: Tensor,
    valid: Tensor,
    rng: Randomness,
    alpha_0: float,
    num_steps: int | Tensor | None,
    given_order: str = "ascending",
    block_size: int | None = None,
) -> Schedule:
    """The unified denoising schedule: T diffusion steps for a share alpha_0 of the positions, the rest left to right.

    Under n_t ~ Binomial(masked, (alpha_s - alpha_t) / (1 - alpha_t)) every position is independently denoised at each
    of the T steps with probability alpha_0 / T, and left for the sequential phase with probability 1 - alpha_0. So one
    uniform per position draws its step, without a loop over T. num_steps: T, int [B, 1] for T of each row, or None for
    T -> infinity, the first-hitting sampler, which denoises one token at a time. With block_size each block takes T
    steps, one block after another.
    """
    position, u, given_u, group = _prepare(given, valid, rng, given_order)
    group = torch.where((group == MASKED) & (u < alpha_0), CLEAN, group)
    share = u / alpha_0 if alpha_0 > 0 else u
    if num_steps is None:
        step = share.argsort(-1).argsort(-1).double()
    else:
        step = (share * num_steps).floor()
    step = torch.where(group == CLEAN, step, position)
    if block_size is not None:
        step = step + (position // block_size).floor() * (step.max() + 1)
    step = torch.where(group == GIVEN, 0.0, step)
    return _schedule(group, u, step, given_u)


def blocks(given: Tensor, valid: Tensor, rng: Randomness, parallelism: int, given_order: str = "ascending") -> Schedule:
    """Denoise evenly spaced positions together, in random interleaving (paper, F.8).

    The n positions of a row are cut into `parallelism` segments of ceil(n / parallelism); each step takes one offset in
    every segment, and the offsets come in random order.
    """
    _, u, given_u, group = _prepare(given, valid, rng, given_order)
    free = group == MASKED
    stretch = torch.ceil(free.sum(1, keepdim=True) / parallelism).clamp_min(1)
    offset = (free.long().cumsum(1) - 1).clamp_min(0) % stretch
    deal = rng.at("deal").uniform(rng.examples(len(given)), given.shape[1])
    deal = torch.where(torch.arange(given.shape[1]) < stretch, deal, 2.0).argsort(-1).argsort(-1)
    step = torch.where(free, deal.gather(1, offset.long()).double(), 0.0)
    return _schedule(torch.where(free, CLEAN, group), u, step, given_u)


def user_order(
    given: Tensor, valid: Tensor, rng: Randomness, sigma: Tensor, given_order: str = "ascending"
) -> Schedule:
    """One token at a time in the order of sigma, int [B|1, L], a permutation; given positions are skipped."""
    _, u, given_u, group = _prepare(given, valid, rng, given_order)
    length = given.shape[1]
    if sigma.shape[1] != length or not bool((sigma.sort(1).values == torch.arange(length)).all()):
        raise ValueError(f"order must be a permutation of 0 .. {length - 1}")
    sigma = sigma.expand_as(given)
    group = torch.where(group == MASKED, CLEAN, group)
    step = torch.where(group == CLEAN, inverse(sigma).double(), 0.0)
    return _schedule(group, u, step, given_u)


def counted(given: Tensor, valid: Tensor, rng: Randomness, step: Tensor, given_order: str = "ascending") -> Schedule:
    """Position i in step[:, i], int [B, L], ascending inside a step; given positions and padding have none.

    Samplers that choose positions as they go take the sizes of their steps from it, and not the positions.
    """
    position, _, given_u, group = _prepare(given, valid, rng, given_order)
    step = torch.where(group == MASKED, step.double(), 0.0)
    return _schedule(torch.where(group == MASKED, CLEAN, group), position, step, given_u)
