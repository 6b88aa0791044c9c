"""Losses and the strict bound of systems with uniform noise; UDLM and Duo differ in what they feed in training.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.float64 import to_device
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.uniform import LogLinear, Uniform
from ..core.visibility import full
from ..net.conditionals import place_nats
from ..net.denoiser import Rows
from ..net.head import RowLoss
from ..net.protocol import Forward, Network
from ..sampling.chain import UniformReverse, redraw
from ..sampling.chooser import Chooser
from ..sampling.request import Request, Step

BOUNDS = ("strict", "authors")
END = 1e-5
"""Where the greedy tail takes over from the chain."""


def states(vocab_size: int, mask_id: int, noise_mask: bool) -> Uniform:
    """The states of the noise; raises ValueError if the vocabulary is not known."""
    if vocab_size < 2:
        raise ValueError(f"vocab_size is {vocab_size}; it must be the number of token ids, the mask included")
    return Uniform(vocab_size, None if noise_mask else mask_id)


def check(t_min: float, eps: float, bound: str) -> None:
    """Raise ValueError for options that no uniform system has."""
    if not 0 < t_min < 1:
        raise ValueError(f"t_min is {t_min}; it must be above 0 and below 1")
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps}; it must be above 0 and below 1")
    if bound not in BOUNDS:
        raise ValueError(f"bound is {bound!r}; it must be one of {', '.join(BOUNDS)}")


def draw_times(rng: Randomness, batch: int, t_min: float, device: torch.device) -> Tensor:
    """Uniform times in [t_min, 1], [B, 1], stratified over the global batch."""
    return t_min + (1 - t_min) * to_device(rng.at("time").times(rng.examples(batch), rng.total), device)


def weighted_times(
    rng: Randomness, batch: int, t_min: float, device: torch.device, independent: bool
) -> tuple[Tensor, Tensor]:
    """Times in [t_min, 1] and their weights in an integral over that interval, both [B, 1].

    Stratified, with a density proportional to t^-1/2: a token is replaced with probability of order t and its nats then
    have order 1/t, so this makes the variance least. Independent: uniform times.
    """
    if independent:
        u = to_device(rng.at("time").uniform(rng.examples(batch), 1), device)
        return t_min + (1 - t_min) * u, torch.full_like(u, 1 - t_min)
    low = t_min**0.5
    root = draw_times(rng, batch, low, device)
    return root**2, 2 * (1 - low) * root


def noised(noise: Uniform, batch: Batch, alpha: Tensor, rng: Randomness) -> Tensor:
    """z ~ q(z_t | x) at the scored positions, x elsewhere, int [B, L]; alpha [B, 1]."""
    x, scored = batch.x, batch.scored
    u = to_device(rng.uniform(rng.examples(len(x)), x.shape[1]), x.device)
    return torch.where(scored, noise.corrupt(x, alpha, u), x)


def row_nats(
    net: Forward,
    batch: Batch,
    function: Callable[..., Tensor],
    fed: Tensor,
    z: Tensor,
    alpha: Tensor,
    *more: Tensor,
) -> Tensor:
    """function(logits, x, z, alpha, ...) of the scored tokens in one pass at sigma = -log alpha, [B, L].

    fed: what the network is fed, ids or probabilities; alpha and more [B, 1].
    """
    x, scored = batch.x, batch.scored
    length = x.shape[1]
    position = torch.arange(length, device=x.device)[None]
    out = Rows(slice(0, length), scored.flatten().nonzero()[:, 0])
    each = (t.expand(x.shape)[scored] for t in (alpha, *more))
    loss = RowLoss(function, (x[scored], z[scored], *each))
    seen = full(length, batch.valid, x.device)
    nats = net(fed, position, seen, time=-alpha[:, 0].log(), out=out, score=loss)
    return place_nats(nats, scored, position.expand_as(x), length)


def rates(net: Forward, batch: Batch, noise: Uniform, eps: float, t: Tensor, rng: Randomness) -> Tensor:
    """The integrand of the NELBO at times t [B, 1], with one draw of z_t, [B, L]."""
    schedule = LogLinear(eps)
    alpha = schedule.alpha(t)
    z = noised(noise, batch, alpha, rng.at("noise"))
    return row_nats(net, batch, noise.rate, z, z, alpha, schedule.dalpha(t))


def strict(
    net: Forward, batch: Batch, noise: Uniform, eps: float, t_min: float, rng: Randomness, independent: bool
) -> Tensor:
    """An unbiased estimate of the NELBO, [B, L]: the integral over [t_min, 1], the last jump from t_min, and the KL of
    z_1 from the prior. Takes two passes."""
    t, weight = weighted_times(rng, len(batch.x), t_min, batch.x.device, independent)
    first = torch.full_like(t, t_min)
    alpha = LogLinear(eps).alpha(first)
    z = noised(noise, batch, alpha, rng.at("last"))
    jump = row_nats(net, batch, noise.last_jump, z, z, alpha)
    prior = noise.prior_nats(eps) * batch.scored.to(jump)
    return weight * rates(net, batch, noise, eps, t, rng) + jump + prior


def nelbo(
    net: Forward,
    batch: Batch,
    rng: Randomness,
    noise: Uniform,
    eps: float,
    t_min: float,
    mean: bool,
    independent: bool = False,
) -> list[Term]:
    """The bound, with one time per example.

    mean: only the mean of the integrand over [t_min, 1], in one pass. independent: uniform times, not stratified.
    """
    size, device = len(batch.x), batch.x.device
    if mean:
        uniform = (
            weighted_times(rng, size, t_min, device, True)[0] if independent else draw_times(rng, size, t_min, device)
        )
        nats = rates(net, batch, noise, eps, uniform, rng)
    else:
        nats = strict(net, batch, noise, eps, t_min, rng, independent)
    return [Term("diffusion", nats, batch.scored)]


def sample(
    net: Network,
    request: Request,
    schedule: Schedule,
    rng: Randomness,
    noise: Uniform,
    eps: float,
    mask_id: int,
    greedy_tail: bool = False,
) -> Iterator[Step]:
    """The chain from t = 1 to t = 0, where alpha is 1 and tokens are clean; or to `END`, and then the greedy tail."""
    num_steps = schedule.sizes.shape[1]
    last = max(num_steps - 1, 1) / (1 - END) if greedy_tail else num_steps
    times = [1 - k / last for k in range(num_steps)]
    alpha = [LogLinear(eps).at(t) for t in (*times, 0.0)]
    reverse = UniformReverse(noise, request.draw, alpha, [-math.log(a) for a in alpha[:-1]], greedy_tail)
    return redraw(net, request.x, request.valid, schedule, Chooser.of(request, rng, mask_id), reverse)
