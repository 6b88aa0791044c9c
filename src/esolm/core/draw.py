"""Drawing tokens from logits with one uniform per token, exact in the tail of the distribution.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .float64 import wide

BLOCK = 256
FEW = 2
"""Up to this number of rows NumPy is faster on a CPU than PyTorch."""
ATTEMPTS = 32
"""Rejections by top-p after which the remaining rows are drawn by a full sort."""


class BadLogits(ValueError):
    """The logits of a row define no distribution."""

    def __init__(self, row: int) -> None:
        super().__init__(
            f"the logits of row {row} hold NaN or +inf, or are all -inf: the weights may be damaged, or the precision "
            "too low for them (try float32)"
        )
        self.row = row


@dataclass(frozen=True)
class Draw:
    """How to draw a token: from softmax(logits / temperature), cut to the top_k likeliest tokens and the nucleus top_p.

    A token is in the nucleus iff the mass of the tokens strictly likelier than it is below top_p; ties are kept, in
    top_k too. Temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")

    def weights(self, logits: Tensor, mask_id: int | None) -> Tensor:
        """Probabilities before the nucleus, [R, V]: zero at the mask id and outside the top k. Raises BadLogits.

        mask_id None: every id may be drawn.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if mask_id is not None:
            scores[..., mask_id] = float("-inf")
        if self.temperature == 0:
            best = scores.argmax(-1, keepdim=True)
            _check(scores.gather(-1, best).isfinite())
            return torch.zeros_like(scores).scatter_(-1, best, 1.0)
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self.temperature != 1:
            # A temperature that rounds to zero would divide zero by zero; with the least one the draw is greedy.
            temperature = max(self.temperature, torch.finfo(scores.dtype).tiny)
            scores.sub_(scores.amax(-1, keepdim=True)).div_(temperature)
        weights = scores.softmax(-1)  # one sweep where maximum, difference and exponential are three
        _check(weights[..., :1].isfinite())  # a row without a distribution is NaN everywhere
        return weights

    def __call__(self, logits: Tensor, uniform: Callable[[int], Tensor], mask_id: int) -> Tensor:
        """Tokens int [R] from logits [R, V]; uniform(attempt) gives independent uniforms [R] for each attempt.

        Raises BadLogits, naming the row, for logits that are NaN.
        """
        if logits.is_cpu and 0 < len(logits) <= FEW:
            return self._few(logits, uniform, mask_id)
        weights = self.weights(logits, mask_id)
        token = inverse_cdf(weights, uniform(0))
        if self.top_p == 1 or self.temperature == 0:
            return token
        return self._reject(weights, token, uniform)

    def _few(self, logits: Tensor, uniform: Callable[[int], Tensor], mask_id: int) -> Tensor:
        """The same row by row with NumPy."""
        scores = logits.detach().to(torch.promote_types(logits.dtype, torch.float32), copy=True).numpy()
        scores[:, mask_id] = -np.inf
        if self.temperature == 0:
            best = scores.argmax(-1)
            _check(torch.from_numpy(np.isfinite(scores[np.arange(len(best)), best])))
            return torch.from_numpy(best)
        temperature = max(self.temperature, np.finfo(scores.dtype).tiny)
        numbers = [uniform(0)]
        tokens = []
        for r, w in enumerate(scores):
            if self.top_k is not None and self.top_k < len(w):
                w[w < np.partition(w, -self.top_k)[-self.top_k]] = -np.inf
            if not np.isfinite(top := w.max()):
                raise BadLogits(r)
            w -= top
            if self.temperature != 1:
                with np.errstate(over="ignore"):
                    w /= temperature
            np.exp(w, out=w)
            token = _inverse_cdf_of_row(w, numbers[0][r].item())
            attempt, limit = 0, self.top_p * w.sum(dtype=np.float64) if self.top_p < 1 else np.inf
            while limit < np.inf and (w * (w > w[token])).sum(dtype=np.float64) >= limit:
                attempt += 1
                if len(numbers) == attempt:
                    numbers.append(uniform(attempt))
                if attempt > ATTEMPTS:
                    w, limit = nucleus(torch.from_numpy(w)[None], self.top_p)[0].numpy(), np.inf
                token = _inverse_cdf_of_row(w, numbers[attempt][r].item())
            tokens.append(token)
        return torch.tensor(tokens)

    def _reject(self, weights: Tensor, token: Tensor, uniform: Callable[[int], Tensor]) -> Tensor:
        """Draw again wherever the token is outside the nucleus: the accepted tokens have the nucleus's distribution."""
        kind = wide(weights.device)
        limit = self.top_p * weights.sum(-1, dtype=kind)
        rows = torch.arange(len(token), device=token.device)
        for attempt in range(1, ATTEMPTS + 1):
            w = weights if attempt == 1 else weights[rows]
            likelier = w > w.gather(-1, token[rows, None])
            above = likelier.to(w.dtype).mul_(w).sum(-1, dtype=kind)  # several times as fast as torch.where
            rows = rows[above >= limit[rows]]
            if not len(rows):
                return token
            token[rows] = inverse_cdf(weights[rows], uniform(attempt)[rows])
        token[rows] = inverse_cdf(nucleus(weights[rows], self.top_p), uniform(ATTEMPTS + 1)[rows])
        return token

    def probabilities(self, logits: Tensor, mask_id: int | None) -> Tensor:
        """The distribution that tokens are drawn from, [R, V]; the reference for `__call__`."""
        weights = self.weights(logits, mask_id)
        weights = weights if self.top_p == 1 else nucleus(weights, self.top_p)
        return weights / weights.sum(-1, keepdim=True)


def _check(fine: Tensor) -> None:
    """Raise BadLogits for the first row that is False, bool [R] or [R, 1]."""
    if not fine.all():
        raise BadLogits(int(fine.flatten().logical_not().nonzero()[0]))


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Weights [R, V] with zeros outside the nucleus, by a full sort."""
    ordered = _ascending(weights).flip(-1)
    cumulative = ordered.cumsum(-1, dtype=wide(weights.device))
    before = F.pad(cumulative, (1, 0))[..., :-1]
    # Tied tokens share the mass before the first of them; the last such group with less than top_p before it ends the
    # nucleus.
    first = F.pad(ordered[..., 1:] < ordered[..., :-1], (1, 0), value=True)
    inside = first & (before < top_p * cumulative[..., -1:])
    least = torch.where(inside, ordered, float("inf")).amin(-1, keepdim=True)
    return weights.masked_fill(weights < least, 0)


def _ascending(weights: Tensor) -> Tensor:
    """Sorted values; on the CPU NumPy's sort is thirty times faster than PyTorch's, which also returns indices."""
    if weights.is_cpu:
        return torch.from_numpy(np.sort(weights.detach().numpy(), -1))
    return weights.sort(-1).values


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The index whose interval of the cumulative weights holds u, int [R]; weights [R, V], u [R].

    Two levels, sums of blocks and then inside one block, in the type of u: in float64 a token of weight 1e-12 has its
    exact probability, without a cumulative sum over the vocabulary.
    """
    vocabulary = weights.shape[1]
    whole = vocabulary - vocabulary % BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=u.dtype)
    if whole < vocabulary:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, dtype=u.dtype, keepdim=True)], 1)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    target = u[:, None] * total
    # u times the sum may round up to the sum: then take the last block that has any weight.
    block = torch.searchsorted(cumulative, target, right=True).minimum(torch.searchsorted(cumulative, total))
    before = F.pad(cumulative, (1, 0)).gather(1, block)
    place = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    chosen = weights.gather(1, place.clamp_max(vocabulary - 1)).masked_fill_(place >= vocabulary, 0)
    within = chosen.to(u.dtype).cumsum(-1)
    index = torch.searchsorted(within, target - before, right=True)
    # Rounding may point behind the last token of the block that has any weight.
    last = torch.searchsorted(within, within[:, -1:].contiguous())
    return (block * BLOCK + index.minimum(last))[:, 0]


def _inverse_cdf_of_row(weights: np.ndarray, u: float) -> int:
    """`inverse_cdf` of one row, [V]."""
    whole = len(weights) - len(weights) % BLOCK
    sums = weights[:whole].reshape(-1, BLOCK).sum(1, dtype=np.float64)
    cumulative = np.append(sums, weights[whole:].sum(dtype=np.float64)).cumsum()
    total = cumulative[-1]
    block = int(min(cumulative.searchsorted(u * total, "right"), cumulative.searchsorted(total)))
    within = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    before = cumulative[block - 1] if block else 0.0
    index = min(within.searchsorted(u * total - before, "right"), within.searchsorted(within[-1]))
    return block * BLOCK + int(index)
