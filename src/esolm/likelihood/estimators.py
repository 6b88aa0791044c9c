"""From log-weights to likelihoods: bounds, jackknife estimates and their errors.

A log-weight is log p(x | sigma_k), and p(x) = E_sigma[p(x | sigma)]. Everything here is a function of the matrix of
log-weights alone, so the network is asked once and every estimator and every K is read off the same orders.

Shapes: n sequences, K orders, G groups of k orders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bound(log_w: Tensor) -> Tensor:
    """The importance-weighted bound -log mean_k w_k, [..., k] -> [...]; in expectation at least -log p(x)."""
    return math.log(log_w.shape[-1]) - log_w.logsumexp(-1)


def leave_out(log_w: Tensor, size: int) -> Tensor:
    """The bounds that leave out one of k/size consecutive stretches of orders at a time, [..., k] -> [..., k/size]."""
    k = log_w.shape[-1]
    stretch = log_w.unflatten(-1, (-1, size)).logsumexp(-1)
    # log(sum - stretch) from both sides of the stretch; subtracting from the total would lose a dominant weight.
    nothing = torch.full_like(stretch[..., :1], -math.inf)
    below = torch.cat([nothing, stretch.logcumsumexp(-1)[..., :-1]], -1)
    above = torch.cat([stretch.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:], nothing], -1)
    return math.log(k - size) - torch.logaddexp(below, above)


def jackknife(log_w: Tensor, size: int = 1) -> Tensor:
    """m B_k - (m - 1) mean of the leave-one-out bounds, over m = k/size stretches: the 1/k part of the bias is gone.

    An estimate, not a bound. size 2 leaves out antithetic pairs.
    """
    m = _stretches(log_w, size, 2)
    return m * bound(log_w) - (m - 1) * leave_out(log_w, size).mean(-1)


def second_jackknife(log_w: Tensor, size: int = 1) -> Tensor:
    """The second-order jackknife, from all, all but one and all but two stretches; the 1/k^2 part is gone too.

    m^2/2 B_m - (m-1)^2 mean B_(m-1) + (m-2)^2/2 mean B_(m-2). The time grows with m^2.
    """
    m = _stretches(log_w, size, 3)
    stretch = log_w.unflatten(-1, (-1, size)).logsumexp(-1)
    keep = ~torch.eye(m, dtype=torch.bool, device=log_w.device)
    without = [leave_out_sums(stretch[..., row]).mean(-1) for row in keep]  # all but i and j, in the mean over j
    two = math.log(size * (m - 2)) - torch.stack(without).mean(0)
    one = leave_out(log_w, size).mean(-1)
    return m**2 / 2 * bound(log_w) - (m - 1) ** 2 * one + (m - 2) ** 2 / 2 * two


def _stretches(log_w: Tensor, size: int, least: int) -> int:
    """How many stretches of `size` the orders make, if there are enough and none is cut."""
    k = log_w.shape[-1]
    if k < least * size or k % size:
        what = "" if size == 1 else f", a multiple of {size}"
        raise ValueError(f"the jackknife of {k} orders: it needs at least {least * size}{what}")
    return k // size


def leave_out_sums(log_w: Tensor) -> Tensor:
    """log of the sum of all weights but one, [..., k] -> [..., k]."""
    k = log_w.shape[-1]
    return math.log(k - 1) - leave_out(log_w, 1)


def curve(log_w: Tensor, sizes: list[int], pair: int = 1) -> dict[int, dict[str, Tensor]]:
    """For each k: bound and jackknife of every sequence, [n], averaged over disjoint groups of k of the K orders."""
    found = {}
    for k in sizes:
        groups = log_w[:, : log_w.shape[1] // k * k].unflatten(1, (-1, k))  # [n, G, k]
        found[k] = {"bound": bound(groups).mean(1)}
        if k >= 2 * pair and k % pair == 0:
            found[k]["jackknife"] = jackknife(groups, pair).mean(1)
    return found


def decades(num_orders: int) -> list[int]:
    """1, 10, 100, ... and num_orders itself."""
    return [k for k in (10**i for i in range(12)) if k < num_orders] + [num_orders]


def standard_error(nats: Tensor, weight: Tensor) -> float:
    """Standard error of sum(nats) / sum(weight) over sequences, by the ratio estimator's linearisation."""
    n = len(nats)
    if n < 2:
        return math.nan
    residual = nats - nats.sum() / weight.sum() * weight
    return float((residual.square().sum() * n / (n - 1)).sqrt() / weight.sum())


def bootstrap(nats: Tensor, weight: Tensor, draws: int = 1000, seed: int = 0) -> float:
    """The same by resampling sequences."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(nats), (draws, len(nats)), generator=generator)
    return float((nats[index].sum(1) / weight[index].sum(1)).std())
