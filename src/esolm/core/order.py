"""Orders: sigma[:, l] is the position that is denoised l-th. Only ever permutations, 0-based.

Shapes: B batch, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .randomness import Randomness

GIVEN, CLEAN, MASKED, PADDING = range(4)
"""The groups of an order, one after another."""

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
    """Keys in (0, 1) that keep some positions in their own order, and the others as u has them, [B, L]."""
    return u if where is None else torch.where(where, torch.arange(u.shape[1], device=u.device) / u.shape[1], u)


def sort(group: Tensor, u: Tensor, ascending: bool = False) -> Tensor:
    """sigma with the groups in turn, each in random order by u in (0, 1); `ascending` keeps MASKED left to right."""
    return (group + (left_to_right(u, group == MASKED) if ascending else u)).argsort(-1)


def draw(alpha_0: float, u: Tensor, clean: Tensor, valid: Tensor | None, given: Tensor | None) -> Tensor:
    """sigma ~ P_L^alpha_0: each position is clean with probability alpha_0; the clean in random order, then the rest
    ascending. Given positions come first, padding last. u, clean: two independent uniforms [B, L]."""
    return sort(groups(clean >= alpha_0, valid, given), u, ascending=True)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which positions are denoised at which step, complete before the first forward pass.

    The places of a row's order are: given positions, then those of its steps one after another, then padding.
    """

    sigma: Tensor  # int [B, L]
    sizes: Tensor  # int [B, K]: n_k of each row, zeros only at the end
    given: Tensor  # int [B]: leading places that are clean from the start
    diffusion: Tensor  # int [B]: how many of the steps belong to the diffusion phase

    @property
    def nfe(self) -> Tensor:
        """Network evaluations that each row needs, int [B]."""
        return (self.sizes > 0).sum(1)

    @property
    def starts(self) -> Tensor:
        """The first place of each step, int [B, K]."""
        return self.given[:, None] + self.sizes.cumsum(1) - self.sizes

    def step_of(self) -> Tensor:
        """The step of each position, int [B, L]; -1 for given positions and padding."""
        place = torch.arange(self.sigma.shape[1]).expand_as(self.sigma)
        ends = self.given[:, None] + self.sizes.cumsum(1)
        step = torch.searchsorted(ends, place.contiguous(), right=True)
        step = torch.where((place < self.given[:, None]) | (place >= ends[:, -1:]), -1, step)
        return torch.empty_like(step).scatter_(1, self.sigma, step)

    def steps(self, row: int = 0) -> list[list[int]]:
        """The paper's S = (S_1, ..., S_K) of one row."""
        places = self.sigma[row, int(self.given[row]) :].tolist()
        steps = []
        for size in self.sizes[row, : int(self.nfe[row])].tolist():
            steps.append(places[:size])
            places = places[size:]
        return steps


def _schedule(group: Tensor, u: Tensor, step: Tensor, given_u: Tensor) -> Schedule:
    """Positions sorted by group, then by step, then by u; a new step begins wherever `step` changes.

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
    """Positions as floats, a uniform per position, the key that orders the given, and the groups (MASKED so far)."""
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
    """The unified denoising schedule: T diffusion steps for a share alpha_0, then left to right.

    Under n_t ~ Binomial(masked, (alpha_s - alpha_t) / (1 - alpha_t)) every position has, independently, the chance
    alpha_0 / T to be denoised at each of the T steps and 1 - alpha_0 to be left for the sequential phase: so one
    uniform per position draws its step, and no loop over T is needed. num_steps None is T -> infinity, the
    first-hitting sampler: one token at a time; int [B, 1] is T of each row. With block_size the T steps are those of
    each block, one after another.
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
    """Evenly spaced, far-apart positions together, in random interleaving (paper, F.8).

    A row with n positions to denoise is cut into `parallelism` stretches of ceil(n / parallelism); a step takes the
    same offset of every stretch, and the offsets come in random order.
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
    """One token at a time in the order of sigma, int [B|1, L], a permutation; given positions are taken out of it."""
    _, u, given_u, group = _prepare(given, valid, rng, given_order)
    length = given.shape[1]
    if sigma.shape[1] != length or not bool((sigma.sort(1).values == torch.arange(length)).all()):
        raise ValueError(f"order must be a permutation of 0 .. {length - 1}")
    sigma = sigma.expand_as(given)
    group = torch.where(group == MASKED, CLEAN, group)
    step = torch.where(group == CLEAN, inverse(sigma).double(), 0.0)
    return _schedule(group, u, step, given_u)
