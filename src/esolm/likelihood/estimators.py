"""From log-weights to likelihoods: bounds, jackknife estimates and their errors.

A log-weight is log p(x | sigma_k), and p(x) = E_sigma[p(x | sigma)]. Everything here is a function of the matrix of
log-weights alone, so the network runs once and every estimator and every K uses the same orders.

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
    """The bounds without one group of `size` consecutive orders at a time, [..., k] -> [..., k/size]."""
    k = log_w.shape[-1]
    group = log_w.unflatten(-1, (-1, size)).logsumexp(-1)
    # Sum what is before and after the group: subtracting it from the total would cancel a dominant weight.
    nothing = torch.full_like(group[..., :1], -math.inf)
    below = torch.cat([nothing, group.logcumsumexp(-1)[..., :-1]], -1)
    above = torch.cat([group.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:], nothing], -1)
    return math.log(k - size) - torch.logaddexp(below, above)


def jackknife(log_w: Tensor, size: int = 1) -> Tensor:
    """m B_k - (m - 1) mean of the leave-one-out bounds, over m = k/size groups: it removes the 1/k part of the bias.

    An estimate, not a bound. size 2 leaves out antithetic pairs.
    """
    k = log_w.shape[-1]
    if k < 2 * size or k % size:
        what = "" if size == 1 else f", a multiple of {size}"
        raise ValueError(f"the jackknife of {k} orders: it needs at least {2 * size}{what}")
    m = k // size
    return m * bound(log_w) - (m - 1) * leave_out(log_w, size).mean(-1)


def curve(log_w: Tensor, sizes: list[int], pair: int = 1) -> dict[int, dict[str, Tensor]]:
    """For each k: bound and jackknife of every sequence, [n], averaged over disjoint groups of k of the K orders."""
    found = {}
    for k in sizes:
        groups = log_w[:, : log_w.shape[1] // k * k].unflatten(1, (-1, k))  # [n, G, k]
        found[k] = {"bound": bound(groups).mean(1)}
        if k >= 2 * pair and k % pair == 0:
            found[k]["jackknife"] = jackknife(groups, pair).mean(1)
    return found


def curve_sizes(num_orders: int, pair: int = 1) -> list[int]:
    """1, 10, 100, ..., half of num_orders, and num_orders itself; half of it in whole pairs.

    The change from the half to the whole tells what is left of the bias.
    """
    half = num_orders // (2 * pair) * pair
    return sorted({*(10**i for i in range(12) if 10**i < num_orders), *([half] if half else []), num_orders})


def standard_error(nats: Tensor, weight: Tensor) -> float:
    """Standard error of sum(nats) / sum(weight) over sequences, by the ratio estimator's linearisation."""
    n = len(nats)
    if n < 2:
        return math.nan
    residual = nats - nats.sum() / weight.sum() * weight
    return float((residual.square().sum() * n / (n - 1)).sqrt() / weight.sum())
