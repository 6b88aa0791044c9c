"""The likelihood engine: log p(x | sigma_k) of sequences under orders drawn from P_L^alpha_0.

`lm.log_prob`, `esolm score` and the harness all use `weigh`: order k of sequence i depends on the seed, i and k alone.

Shapes: B batch, L length, n sequences, K orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core import order
from ..core.batch import Batch
from ..core.float64 import to_device
from ..core.randomness import Randomness, fold
from ..data import Tokenizer
from ..net.protocol import Network
from ..runtime.distributed import ALONE, Ranks
from ..systems import System, as_any_order
from . import estimators

Advance = Callable[[int], None]
"""Called with the number of sequences scored since the last call."""


class NotFinite(ValueError):
    """A likelihood is NaN or infinite, as with damaged weights."""


def draw_orders(
    batch: Batch, alpha_0: float, rng: Randomness, number: int, antithetic: bool, given_order: str = "ascending"
) -> Tensor:
    """Order number `number` of each example, sigma ~ P_L^alpha_0, int [B, L]; examples and numbers are independent.

    antithetic: each odd-numbered order reverses the diffusion part of the order before it; the mean over orders is the
    same, and the two are negatively correlated.
    """
    if given_order not in order.GIVEN_ORDERS:
        raise ValueError(f"given_order is {given_order!r}; it must be one of {', '.join(order.GIVEN_ORDERS)}")
    x, valid, given = batch
    examples, length = rng.examples(len(x)), x.shape[1]
    rng = rng.at("orders", number // 2 if antithetic else number)
    u, clean = (to_device(rng.at(name).uniform(examples, length), x.device) for name in ("order", "mask"))
    if antithetic and number % 2:
        u = torch.where(given, u, 1 - u) if given is not None else 1 - u
    if given_order == "ascending":
        u = order.left_to_right(u, given)
    return order.draw(alpha_0, u, clean, valid, given)


@torch.no_grad()
def under_orders(
    net: Network,
    system: System,
    batch: Batch,
    rng: Randomness,
    numbers: range,
    antithetic: bool = False,
    given_order: str = "ascending",
) -> Tensor:
    """Nats of the scored tokens under the orders `numbers`, in one call for all of them: [k, B, L]."""
    system = as_any_order(system)
    alpha_0 = system.order_alpha_0
    sigma = torch.cat([draw_orders(batch, alpha_0, rng, k, antithetic, given_order) for k in numbers])
    return system.order_nats(net, batch.repeat(len(numbers)), sigma).unflatten(0, (len(numbers), len(batch.x)))


def weigh(
    net: Network,
    system: System,
    batch: Batch,
    num_orders: int,
    *,
    seed: int = 0,
    antithetic: bool = False,
    given_order: str = "ascending",
    batch_size: int = 32,
    known: Tensor | None = None,
    keep: Callable[[Tensor], None] = lambda matrix: None,
    tokens: Tensor | None = None,
    advance: Advance = lambda done: None,
    ranks: Ranks = ALONE,
) -> Tensor:
    """log p(x | sigma_k) of each sequence under its own K orders, float64 [n, K]; `batch_size` sequences a pass.

    known: such a matrix for any number of orders, NaN where it is not known. keep: called with the matrix after each
    new block. tokens: float64 [n, L], to which the log-probability of every token under every order is added. Ranks
    share the sequences, and K may be raised later.
    """
    check_orders(num_orders, batch_size, antithetic)
    as_any_order(system)
    n = len(batch.x)
    width = num_orders if known is None else max(num_orders, known.shape[1])
    matrix = torch.full((n, width), math.nan, dtype=torch.float64)
    if known is not None:
        matrix[:, : known.shape[1]] = known
    per_pass, mine = max(1, batch_size // n), ranks.share(n)

    def own() -> Tensor:
        for first in mine[::batch_size]:
            index = torch.arange(first, min(first + batch_size, mine.stop))
            some = batch.rows(index).cropped().trimmed().to(net.device)
            rng = Randomness(fold(seed, "score"), first, n)
            for start in range(0, num_orders, per_pass):
                numbers = range(start, min(start + per_pass, num_orders))
                block = matrix[first : first + len(index), start : numbers.stop]
                if block.isnan().any():
                    nats = under_orders(net, system, some, rng, numbers, antithetic, given_order).cpu().double()
                    block[:] = -nats.sum(-1).T
                    if tokens is not None:
                        tokens[index, : nats.shape[-1]] -= nats.sum(0)
                    if not block.isfinite().all():
                        raise NotFinite("a likelihood is not finite: the weights are damaged")
                    keep(matrix)
                advance(block.numel())
        return matrix[mine.start : mine.stop]

    matrix = torch.cat(ranks.gathered(ranks.everywhere(own)))
    if ranks.world > 1:
        keep(matrix)
    return matrix[:, :num_orders]


def check_orders(num_orders: int, batch_size: int, antithetic: bool) -> None:
    """Raise ValueError for numbers that cannot be."""
    if num_orders < 1 or batch_size < 1:
        raise ValueError(f"num_orders is {num_orders} and batch_size {batch_size}; both must be at least 1")
    if antithetic and num_orders % 2:
        raise ValueError(f"num_orders is {num_orders}; antithetic orders come in pairs: use an even number")


def is_exact(system: System, given: bool = False, given_order: str = "ascending") -> bool:
    """Whether one order gives the exact likelihood; given: some tokens are given, whose order may matter."""
    return system.exact and (not given or given_order == "ascending")


@dataclass(frozen=True, repr=False)
class LogProb:
    """log p of texts, in nats."""

    total: Tensor  # float64 [n], of each text
    tokens: list[list[float]]  # of each token, averaged over the orders; 0 where it is given
    log_weights: Tensor  # float64 [n, K], of each text (or window) under each order
    kind: str  # exact, bound (log p is at least this, in expectation) or estimate
    ids: list[list[int]] | None = None  # of each token
    given: list[list[bool]] | None = None  # which tokens are context and not scored
    tokenizer: Tokenizer | None = field(default=None, compare=False)  # for the picture of a notebook

    def __repr__(self) -> str:
        total = ", ".join(f"{value:.3f}" for value in self.total[:4].tolist()) + (", …" if len(self.total) > 4 else "")
        return f"LogProb(total=[{total}] nats, {self.kind}, {self.log_weights.shape[1]} orders)"

    def _repr_html_(self) -> str:
        """For notebooks: every token on a background that says how unlikely it is, with the number as its title."""
        from ..viz import html

        return html.likelihood(self.total.tolist(), self.tokens, self.kind, self.ids, self.given, self.tokenizer)


def log_prob(
    net: Network,
    system: System,
    rows: Sequence[Sequence[int]],
    given: Sequence[Sequence[bool]],
    num_orders: int = 16,
    estimator: str = "iw",
    antithetic: bool = False,
    given_order: str = "ascending",
    seed: int = 0,
    batch_size: int = 32,
    advance: Advance = lambda done: None,
) -> LogProb:
    """log p of the tokens of each row that are not given, given those that are; rows may differ in length.

    estimator: `iw`, log mean_k p(target | context, sigma_k), or its `jackknife`. Where one order is exact, num_orders
    is 1. The value of a row depends on the seed and the row alone.
    """
    if estimator not in ("iw", "jackknife"):
        raise ValueError(f"estimator is {estimator!r}; it must be 'iw' or 'jackknife'")
    check_orders(num_orders, batch_size, antithetic)
    exact = is_exact(system, any(map(any, given)), given_order)
    if exact:
        num_orders, antithetic = 1, False
    x, valid = padded(rows)
    kept, _ = padded(given)
    tokens = torch.zeros(x.shape, dtype=torch.float64)
    options = {"seed": seed, "antithetic": antithetic, "given_order": given_order, "batch_size": batch_size}
    batch = Batch(x, valid, kept.bool())
    log_w = weigh(net, system, batch, num_orders, tokens=tokens, advance=advance, **options)  # type: ignore[arg-type]
    each = [values[:n].tolist() for values, n in zip(tokens / num_orders, valid.sum(1).tolist())]
    if exact or estimator == "iw":
        total, kind = -estimators.bound(log_w), "exact" if exact else "bound"
    else:
        total, kind = -estimators.jackknife(log_w, 2 if antithetic else 1), "estimate"
    return LogProb(total, each, log_w, kind, [[*row] for row in rows], [[*row] for row in given])


def conditional_rows(
    texts: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], given: Sequence[Any] | None
) -> tuple[list[list[int]], list[list[bool]]]:
    """Texts after their contexts, and which tokens of each are given: the context, and the positions `given` of the
    text. Contexts and given are one for all texts, or one for each. Raises ValueError."""
    places = [list(p) if isinstance(p, Sequence) else p for p in given or ()]
    each = places if places and isinstance(places[0], list) else [places]
    if {len(contexts), len(each)} - {1, len(texts)}:
        counts = f"{len(texts)} texts, {len(contexts)} contexts, {len(each)} given"
        raise ValueError(f"{counts}: give one, or one for each")
    rows, kept = [], []
    for i, ids in enumerate(texts):
        before, seen = contexts[i % len(contexts)], set(each[i % len(each)])
        if not seen <= set(range(len(ids))):
            raise ValueError(f"given positions {sorted(seen)} are not all among the text's 0 .. {len(ids) - 1}")
        rows.append([*before, *ids])
        kept.append([*[True] * len(before), *(p in seen for p in range(len(ids)))])
    return rows, kept


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of different length as one zero-padded tensor, int [B, L], and which of it is valid, bool."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    x = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long)
    return x.view(len(rows), longest), torch.arange(longest) < lengths[:, None]


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
