"""Chains: every pass feeds the whole noisy sequence and draws its positions again, until the last step leaves a text.

A system describes its chain by a `Reverse`; the loop holds the given tokens fixed and draws every position with a
number that depends on seed, row, position and step.

Shapes: B batch, L length, R rows that get logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..core.draw import Draw, inverse_cdf
from ..core.float64 import wide
from ..core.order import Chain, Schedule, chain
from ..core.uniform import Uniform
from ..core.visibility import full
from ..net.denoiser import Rows
from ..net.protocol import Network
from .chooser import Chooser
from .feeds import places
from .passes import call
from .request import Request, Step

STEPS = 128
"""Steps of a chain if num_steps is not given."""
WHOLE = 1 << 24
"""Up to this number of probabilities are computed at once."""


class Reverse(Protocol):
    """The reverse process of a chain."""

    @property
    def absorbing(self) -> int | None:
        """The mask id if only masks change, each once; None if every token may change in every step."""
        ...

    def start(self, u: Tensor) -> Tensor:
        """Tokens of the prior from uniforms in (0, 1), int of the same shape."""
        ...

    def time(self, step: int) -> float | None:
        """The time that the network is fed in a step, 0, 1, …"""
        ...

    def weights(self, step: int, logits: Tensor, z: Tensor) -> Tensor:
        """The distribution of the next tokens, [R, V], not normalised; logits [R, V], the tokens before it z [R]."""
        ...


def chain_plan(
    system: str,
    samplers: Mapping[str, tuple[str, ...]],
    request: Request,
    default: str = "ancestral",
    redraws: bool = True,
    most: int | None = None,
) -> Chain:
    """The schedule of a system that samples by a chain: num_steps passes, by default 128.

    most: the steps of the forward process, if it has a number of them; a chain can skip some.
    """
    request.choose_sampler(system, samplers, default)
    request.refuse_limits(system, "which draws tokens again")
    num_steps = request.options.num_steps
    if most is not None and num_steps is not None and num_steps > most:
        raise ValueError(f"num_steps is {num_steps}; this model has {most} steps, and can skip some of them")
    if request.options.given_order != "ascending":
        raise ValueError(f"given_order is {request.options.given_order!r}; {system} has no order: leave it out")
    return chain(request.given, request.valid, num_steps or min(STEPS, most or STEPS), redraws)


def redraw(
    net: Network, x: Tensor, valid: Tensor, schedule: Schedule, choose: Chooser, reverse: Reverse
) -> Iterator[Step]:
    """Run a chain. Each pass feeds all tokens; a chain with an absorbing token ends when none is left."""
    batch, length = x.shape
    device, mask = x.device, reverse.absorbing
    at, free = drawn_positions(schedule, length)
    number = torch.arange(batch)[:, None].expand_as(at)
    row, position = number[free], at[free]
    tokens = x.clone()
    tokens[row.to(device), position.to(device)] = reverse.start(choose.uniform("prior", row, position, device))
    slots = torch.arange(length, device=device)[None]
    seen = full(length, None if bool(valid.all()) else valid.to(device), device)
    for step in range(schedule.sizes.shape[1]):
        asked = free if mask is None else free & (tokens.cpu().gather(1, at) == mask)
        if not bool(asked.any()):
            return
        row, position = number[asked], at[asked]
        flat, value = (row * length + position).to(device), reverse.time(step)
        time = None if value is None else torch.full((batch,), value, dtype=wide(device), device=device)
        logits = yield from call(net, tokens, slots, seen, Rows(slice(0, length), flat), time=time)
        u = choose.at(step).uniform(0, row, position, device)
        drawn = _draw(reverse, step, logits, tokens.flatten()[flat], u)
        tokens.view(-1)[flat] = drawn
        token = torch.zeros_like(at, device=device)
        token[asked.to(device)] = drawn
        changed = asked if mask is None else asked & (token.cpu() != mask)
        yield Step(at, token, changed, fed=asked.any(1))


def drawn_positions(schedule: Schedule, length: int) -> tuple[Tensor, Tensor]:
    """The positions that a chain draws, int [B, m], and which of them are no padding."""
    most = int(schedule.sizes[:, 0].max())
    place = places(schedule.given, schedule.sizes[:, 0], most, length)
    free = place < length
    return torch.where(free, schedule.sigma.gather(1, place.clamp_max(length - 1)), 0), free


def _draw(reverse: Reverse, step: int, logits: Tensor, z: Tensor, u: Tensor) -> Tensor:
    """The next tokens, int [R], in chunks of rows."""
    rows = max(1, WHOLE // logits.shape[1])
    parts = zip(logits.split(rows), z.split(rows), u.split(rows), strict=True)
    return torch.cat([inverse_cdf(reverse.weights(step, some, before), v) for some, before, v in parts])


@dataclass(frozen=True)
class UniformReverse:
    """Ancestral sampling under uniform noise: z_s ~ q(z_s | z_t, x_theta)."""

    noise: Uniform
    draw: Draw  # temperature, top_k and top_p shape x_theta
    alpha: Sequence[float]  # alpha_t before each step and after the last, ascending
    sigma: Sequence[float]  # the times that the network is fed, one for each step
    greedy_tail: bool = False  # the last step takes the likeliest token of x_theta instead of drawing

    absorbing = None

    def start(self, u: Tensor) -> Tensor:
        """As `Reverse.start`."""
        return self.noise.draw(u)

    def time(self, step: int) -> float:
        """As `Reverse.time`."""
        return self.sigma[step]

    def weights(self, step: int, logits: Tensor, z: Tensor) -> Tensor:
        """As `Reverse.weights`."""
        logits = logits.to(wide(logits.device))
        if self.greedy_tail and step == len(self.sigma) - 1:
            return Draw(temperature=0).probabilities(logits, self.noise.exclude)
        p = self.draw.probabilities(logits, self.noise.exclude)
        alpha_t, alpha_s = self.alpha[step], self.alpha[step + 1]
        return self.noise.posterior(p, z, alpha_s, alpha_t / alpha_s)
