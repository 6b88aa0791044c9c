"""How much single estimates of the bound of one sequence vary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..systems import as_any_order
from .orders import Advance, under_orders
from .scoring import Scorer


@torch.no_grad()
def _bound(lm: Scorer, sequence: Batch, rng: Randomness, independent: bool, count: int) -> Tensor:
    """The bound of one sequence by `count` draws over times, of which rng's first is the first: float64 [count]."""
    terms = lm.system.bound_over_times(lm.net, sequence.repeat(count), rng, independent)
    return torch.stack([term.nats.cpu().double().sum(1) for term in terms]).sum(0)


def over_times(
    lm: Scorer, sequence: Batch, trials: int, num_samples: int, seed: int, batch_size: int, advance: Advance
) -> Tensor:
    """The paper's estimate: independent times, weight -alpha'_t / (1 - alpha_t) on the nats of the masks; [trials].

    At alpha_0 = 1 the weight is unbounded and the variance infinite: the standard deviation grows with the trials.
    """
    total, found = trials * num_samples, []
    for first in range(0, total, batch_size):
        count = min(batch_size, total - first)
        rng = Randomness(fold(seed, "times"), first, max(total, 1 << 16))  # so many strata that times are independent
        found.append(_bound(lm, sequence, rng, True, count))
        advance(count)
    return torch.cat(found).view(trials, num_samples).mean(1)


def over_strata(lm: Scorer, sequence: Batch, trials: int, num_samples: int, seed: int, advance: Advance) -> Tensor:
    """Stratified times and, where weights are unbounded, numbers of masks, as `esolm score` draws them; [trials]."""
    found = []
    for trial in range(trials):
        rng = Randomness(fold(fold(seed, "strata"), trial), 0, num_samples)
        found.append(_bound(lm, sequence, rng, False, num_samples).mean())
        advance(num_samples)
    return torch.stack(found)


def over_orders(lm: Scorer, sequence: Batch, trials: int, seed: int, batch_size: int) -> Tensor:
    """The any-order bound with one order; [trials]."""
    as_any_order(lm.system)
    rng, found = Randomness(fold(seed, "orders")), []
    for first in range(0, trials, batch_size):
        numbers = range(first, min(first + batch_size, trials))
        found.append(under_orders(lm.net, lm.system, sequence, rng, numbers).cpu().double().sum((1, 2)))
    return torch.cat(found)
