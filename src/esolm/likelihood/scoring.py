"""Scoring of texts: the system's bound, and the estimators over orders, each with its standard error.

Shapes: n sequences, K orders.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.randomness import Randomness, fold
from ..net.protocol import Network
from ..runtime.distributed import ALONE, Ranks
from ..systems import System
from . import estimators
from .orders import Advance, is_exact, weigh
from .texts import Sequences

OF_ORDERS = ("any-order", "iw", "jackknife")
"""Estimators over drawn orders."""
ESTIMATORS = ("nelbo", "exact", *OF_ORDERS)


class Scorer(Protocol):
    """A network and its system, as `LanguageModel` holds them."""

    @property
    def net(self) -> Network:
        """The network."""
        ...

    @property
    def system(self) -> System:
        """The system it was trained with."""
        ...


@dataclass(frozen=True)
class TextScore:
    """The estimate of each sequence, in nats."""

    corpus: str
    estimator: str
    kind: str  # exact, bound or estimate
    nats: Tensor  # float64 [n]
    tokens: Tensor  # float64 [n]
    bytes: int
    terms: dict[str, Tensor]  # float64 [n] each; they add up to nats
    num_orders: int | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    moved: float | None = None  # nats per token: the bound at K/2 minus the bound at K

    def record(self) -> dict[str, Any]:
        """The mean over all tokens with its standard error, as JSON holds it."""
        nats = self._mean(self.nats)
        return {
            "corpus": self.corpus,
            "perplexity": math.exp(min(nats, 700.0)),
            "nats": nats,
            "stderr": _finite(estimators.standard_error(self.nats, self.tokens)),
            "bits_per_token": nats / math.log(2),
            "bits_per_byte": float(self.nats.sum()) / math.log(2) / self.bytes if self.bytes else None,
            "tokens": int(self.tokens.sum()),
            "sequences": len(self.nats),
            "estimator": self.estimator,
            "kind": self.kind,
            "num_orders": self.num_orders,
            "terms": {name: self._mean(value) for name, value in self.terms.items()},
            "curve": self.curve,
            "moved": self.moved,
        }

    def _mean(self, nats: Tensor) -> float:
        return float(nats.sum() / self.tokens.sum())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def nelbo(
    lm: Scorer,
    sequences: Sequences,
    seed: int = 0,
    num_draws: int = 1,
    batch_size: int = 32,
    advance: Advance = lambda done: None,
    ranks: Ranks = ALONE,
) -> TextScore:
    """The system's own bound, the mean of num_draws draws for each sequence.

    The times (or numbers of masks) of all draws form one stratified set, dealt to the sequences at random. The result
    does not depend on the batch size or on the number of ranks.
    """
    if num_draws < 1 or batch_size < 1:
        raise ValueError(f"num_draws is {num_draws} and batch_size {batch_size}; both must be at least 1")
    total = len(sequences) * num_draws
    mine = ranks.share(len(sequences))
    draws = range(mine.start * num_draws, mine.stop * num_draws)

    def own() -> list[tuple[str, Tensor]]:
        found = []
        for first in draws[::batch_size]:
            index = torch.arange(first, min(first + batch_size, draws.stop)) // num_draws
            rng = Randomness(fold(seed, "nelbo"), first, total)
            for term in lm.system.terms(lm.net, sequences.rows(index, lm.net.device), rng, False):
                found.append((term.name, term.nats.cpu().double().sum(1)))
            advance(len(index))
        return found

    found: dict[str, list[Tensor]] = {}
    for name, nats in itertools.chain(*ranks.gathered(ranks.everywhere(own))):
        found.setdefault(name, []).append(nats)
    terms = {name: torch.cat(parts).view(-1, num_draws).mean(1) for name, parts in found.items()}
    kind = "exact" if is_exact(lm.system, sequences.batch.given is not None) else "bound"
    nats = torch.stack(list(terms.values())).sum(0)
    return TextScore(sequences.name, "nelbo", kind, nats, sequences.tokens, sequences.bytes, terms)


@torch.no_grad()
def enumerated(
    lm: Scorer, sequences: Sequences, batch_size: int = 32, advance: Advance = lambda done: None, ranks: Ranks = ALONE
) -> TextScore:
    """The exact likelihood: of a system that has it in one pass, or of one whose orders can be enumerated."""
    if is_exact(lm.system, sequences.batch.given is not None):
        found = nelbo(lm, sequences, batch_size=batch_size, advance=advance, ranks=ranks)
        return dataclasses.replace(found, estimator="exact")
    mine = ranks.share(len(sequences))

    def own() -> list[Tensor]:
        parts = []
        for first in mine[::batch_size]:
            index = torch.arange(first, min(first + batch_size, mine.stop))
            parts.append(lm.system.exact_nats(lm.net, sequences.rows(index, lm.net.device)).cpu())
            advance(len(index) * lm.system.exact_passes)
        return parts

    nats = torch.cat([*itertools.chain(*ranks.gathered(ranks.everywhere(own)))])
    return TextScore(sequences.name, "exact", "exact", nats, sequences.tokens, sequences.bytes, {"exact": nats})


def from_weights(log_w: Tensor, sequences: Sequences, estimator: str, exact: bool = False, pair: int = 1) -> TextScore:
    """The estimate from log-weights [n, K]; pair 2: orders 2i and 2i+1 are antithetic."""
    num_orders, weight = log_w.shape[1], sequences.tokens
    if estimator not in OF_ORDERS:
        raise ValueError(f"no estimator {estimator!r} of orders: choose one of {', '.join(OF_ORDERS)}")
    if exact or estimator == "any-order":
        nats = -log_w.mean(1)
    else:
        nats = estimators.bound(log_w) if estimator == "iw" else estimators.jackknife(log_w, pair)
    kind = "exact" if exact else "estimate" if estimator == "jackknife" else "bound"
    curve, moved = [], None
    for k, values in estimators.curve(log_w, estimators.curve_sizes(num_orders, pair), pair).items():
        row: dict[str, Any] = {"num_orders": k}
        for name in ("bound", "jackknife"):
            value = values.get(name)
            row[name] = None if value is None else float(value.sum() / weight.sum())
            row[f"{name}_stderr"] = None if value is None else _finite(estimators.standard_error(value, weight))
        curve.append(row)
    if num_orders > 1:
        half, whole = (estimators.curve(log_w, [k])[k]["bound"] for k in (num_orders // 2, num_orders))
        moved = float((half - whole).sum() / weight.sum())
    found = {estimator.replace("-", "_"): nats}
    return TextScore(sequences.name, estimator, kind, nats, weight, sequences.bytes, found, num_orders, curve, moved)


def score(
    lm: Scorer,
    sequences: Sequences,
    estimator: str = "nelbo",
    num_orders: int = 100,
    antithetic: bool = False,
    num_draws: int = 1,
    seed: int = 0,
    batch_size: int = 32,
    advance: Advance = lambda done: None,
    ranks: Ranks = ALONE,
    **work: Any,
) -> TextScore:
    """Any estimator on some sequences; where one order is exact (ar, alpha_0 = 0), K is 1.

    work: `known` and `keep` of `weigh`.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"no estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")
    if estimator == "nelbo":
        return nelbo(lm, sequences, seed, num_draws, batch_size, advance, ranks)
    if estimator == "exact":
        return enumerated(lm, sequences, batch_size, advance, ranks)
    exact = is_exact(lm.system, sequences.batch.given is not None)
    if exact:
        num_orders, antithetic = 1, False
    pair = 2 if antithetic else 1
    if estimator == "jackknife" and not exact and num_orders < 2 * pair:
        raise ValueError(f"num_orders is {num_orders}; the jackknife needs at least {2 * pair}")
    options = {"seed": seed, "antithetic": antithetic, "batch_size": batch_size, **work}
    log_w = weigh(lm.net, lm.system, sequences.batch, num_orders, advance=advance, ranks=ranks, **options)
    return from_weights(log_w, sequences, estimator, exact, pair)
