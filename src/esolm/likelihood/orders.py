"""Any-order likelihood: one pass per order where attention is causal in the order, L passes where it is not.

Shapes: B batch, L length, M slots of the z half, K orders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import order
from ..core.noise import scored_tokens
from ..core.randomness import Randomness, fold
from ..net.protocol import Network
from . import estimators

OrderNats = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""x, sigma, scored, valid -> nats [B, L] under the order."""


def draw_orders(
    x: Tensor,
    alpha_0: float,
    rng: Randomness,
    number: int,
    antithetic: bool,
    valid: Tensor | None = None,
    given: Tensor | None = None,
    given_order: str = "ascending",
) -> Tensor:
    """Order number `number` of each example, sigma ~ P_L^alpha_0, int [B, L]; examples and numbers are independent.

    antithetic: an odd number has the diffusion part of the even one before it, reversed; the mean over orders is the
    same, and the two are negatively correlated.
    """
    if given_order not in order.GIVEN_ORDERS:
        raise ValueError(f"given_order is {given_order!r}; it must be one of {', '.join(order.GIVEN_ORDERS)}")
    examples, length = rng.examples(len(x)), x.shape[1]
    rng = rng.at("orders", number // 2 if antithetic else number)
    u, clean = (rng.at(name).uniform(examples, length).to(x.device) for name in ("order", "mask"))
    if antithetic and number % 2:
        u = torch.where(given, u, 1 - u) if given is not None else 1 - u
    if given_order == "ascending":
        u = order.left_to_right(u, given)
    return order.draw(alpha_0, u, clean, valid, given)


def under_orders(
    nats_of: OrderNats,
    x: Tensor,
    alpha_0: float,
    rng: Randomness,
    numbers: range,
    antithetic: bool = False,
    valid: Tensor | None = None,
    given: Tensor | None = None,
    given_order: str = "ascending",
    rows: int = 64,
) -> Iterator[Tensor]:
    """Nats of the scored tokens under the orders `numbers`, [k, B, L] of as many orders as `rows` sequences hold."""
    scored = scored_tokens(x, valid, given)
    per_pass = max(1, rows // len(x))
    for first in range(numbers.start, numbers.stop, per_pass):
        some = range(first, min(first + per_pass, numbers.stop))
        sigma = torch.cat([draw_orders(x, alpha_0, rng, k, antithetic, valid, given, given_order) for k in some])
        copies = len(some), 1
        with torch.no_grad():
            padding = None if valid is None else valid.repeat(copies)
            nats = nats_of(x.repeat(copies), sigma, scored.repeat(copies), padding)
        yield nats.unflatten(0, (len(some), len(x)))


def log_weights(
    nats_of: OrderNats,
    x: Tensor,
    alpha_0: float,
    rng: Randomness,
    numbers: range,
    antithetic: bool = False,
    valid: Tensor | None = None,
    given: Tensor | None = None,
    given_order: str = "ascending",
    rows: int = 64,
) -> Tensor:
    """log p(x | sigma_k) of the scored tokens for the orders `numbers`, float64 [B, K], `rows` sequences a pass."""
    draws = under_orders(nats_of, x, alpha_0, rng, numbers, antithetic, valid, given, given_order, rows)
    return -torch.cat([nats.double().sum(-1) for nats in draws]).T.cpu()


class Conditional(NamedTuple):
    """log p(target | context) under each of K orders, and of each token in their mean."""

    log_weights: Tensor  # float64 [B, K]
    tokens: Tensor  # float64 [B, L], zero where nothing is scored


def conditional(
    net: Network,
    system: Any,
    x: Tensor,
    valid: Tensor | None,
    given: Tensor | None,
    rng: Randomness,
    num_orders: int,
    antithetic: bool = False,
    given_order: str = "ascending",
    rows: int = 64,
) -> Conditional:
    """The tokens that are not given, given those that are, wherever they stand: the given ones come first in sigma."""
    nats_of, alpha_0 = order_function(net, system)
    weights, tokens = [], torch.zeros(x.shape, dtype=torch.float64)
    numbers = range(num_orders)
    for nats in under_orders(nats_of, x, alpha_0, rng, numbers, antithetic, valid, given, given_order, rows):
        wide = nats.double().cpu()
        weights.append(-wide.sum(-1))
        tokens -= wide.sum(0)
    return Conditional(torch.cat(weights).T, tokens / num_orders)


@dataclass(frozen=True)
class LogProb:
    """log p of texts, in nats."""

    total: Tensor  # float64 [n], of each text
    tokens: list[list[float]]  # of each token in the mean over the orders; 0 where it is given
    log_weights: Tensor  # float64 [n, K], of each text (or window) under each order
    kind: str  # exact, bound (log p is at least this, in expectation) or estimate


def log_prob(
    net: Network,
    system: Any,
    rows: Sequence[Sequence[int]],
    given: Sequence[Sequence[bool]],
    num_orders: int = 16,
    estimator: str = "iw",
    antithetic: bool = False,
    given_order: str = "ascending",
    seed: int = 0,
    batch_size: int = 32,
) -> LogProb:
    """log p of the tokens of each row that are not given, given those that are; rows may differ in length.

    estimator: `iw`, log mean_k p(target | context, sigma_k), or `jackknife` of it. The value of a row depends on seed
    and row alone. Where one order is all there is, num_orders is 1.
    """
    if estimator not in ("iw", "jackknife"):
        raise ValueError(f"estimator is {estimator!r}; it must be 'iw' or 'jackknife'")
    if num_orders < 1 or batch_size < 1 or (antithetic and num_orders % 2):
        raise ValueError(
            f"num_orders is {num_orders} and batch_size {batch_size}; both must be at least 1, and the orders even in "
            "number if they are antithetic"
        )
    exact = is_exact(system, any(map(any, given)), given_order)
    number, paired = (1, False) if exact else (num_orders, antithetic)
    weights, tokens, device = [], [], net.device
    for first in range(0, len(rows), batch_size):
        some = slice(first, first + batch_size)
        x, valid = padded(rows[some])
        kept, _ = padded(given[some])
        masks = None if valid.all() else valid.to(device), kept.bool().to(device) if kept.any() else None
        rng = Randomness(fold(seed, "log_prob"), first, len(rows))
        found = conditional(net, system, x.to(device), *masks, rng, number, paired, given_order, batch_size)
        weights.append(found.log_weights)
        tokens += [values[:n].tolist() for values, n in zip(found.tokens, valid.sum(1).tolist())]
    log_w = torch.cat(weights)
    if exact or estimator == "iw":
        return LogProb(-estimators.bound(log_w), tokens, log_w, "exact" if exact else "bound")
    return LogProb(-estimators.jackknife(log_w, 2 if paired else 1), tokens, log_w, "estimate")


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of different length as one tensor filled up with zeros, int [B, L], and which of it is theirs, bool."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    x = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long)
    return x.view(len(rows), longest), torch.arange(longest) < lengths[:, None]


def order_function(net: Network, system: Any) -> tuple[OrderNats, float]:
    """What gives the nats of a text under an order, and the alpha_0 that orders are drawn with (0: left to right).

    Raises ValueError if the system has no such likelihood.
    """
    if is_left_to_right(system):
        return functools.partial(_left_to_right, net, system), 0.0
    if not hasattr(system, "order_nats"):
        raise ValueError(f"{name_of(system)} has no likelihood of an order of the tokens: use the estimator nelbo")
    return functools.partial(system.order_nats, net), getattr(system, "alpha_0", 1.0)


def is_left_to_right(system: Any) -> bool:
    """Whether the system's only term is `nll`, the exact likelihood from left to right."""
    return set(system.counts(torch.ones(1, 1, dtype=torch.bool), Randomness(0))) == {"nll"}


def is_exact(system: Any, given: bool = False, given_order: str = "ascending") -> bool:
    """Whether one order is all there is; given: some tokens are, and their order may matter."""
    one = not given or given_order == "ascending"
    return is_left_to_right(system) or (one and getattr(system, "alpha_0", 1.0) == 0)


def name_of(system: Any) -> str:
    """The name of a system, that of its module in the package."""
    return type(system).__module__.removeprefix("esolm.systems.")


def _left_to_right(net: Network, system: Any, x: Tensor, sigma: Tensor, scored: Tensor, valid: Tensor | None) -> Tensor:
    given = ~scored if valid is None else ~scored & valid
    if (given & (scored.cumsum(1) > 0)).any():
        raise ValueError(
            f"{name_of(system)} goes left to right: context must stand before the target. Use an any-order system"
        )
    (term,) = system.terms(net, x, valid, given if given.any() else None, Randomness(0), False)
    return term.nats


def windows(tokens: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, first scored, end) of the windows that score each of `tokens` tokens once.

    After the first window, each of at most `length` tokens scores `stride` new ones after length - stride of context;
    the last one scores what is left, after more context.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"stride is {stride}; it must be between 1 and the length of a window, {length}")
    found = [(0, 0, min(length, tokens))]
    while (end := found[-1][2]) < tokens:
        stop = min(end + stride, tokens)
        found.append((stop - length, end, stop))
    return found
