"""Drawing tokens from logits: exact in the tail, and with one uniform number per token.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
ATTEMPTS = 32
"""Rejections by top-p after which the remaining rows are drawn by a full sort."""


@dataclass(frozen=True)
class Draw:
    """How a token is drawn: softmax(logits / temperature), cut to the top_k likeliest and to the nucleus top_p.

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

    def weights(self, logits: Tensor, mask_id: int) -> Tensor:
        """Unnormalised probabilities before the nucleus, [R, V]: zero at the mask id and outside the top k."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        wide = wide.index_fill(-1, torch.tensor([mask_id], device=wide.device), float("-inf"))
        if self.temperature == 0:
            best = wide.argmax(-1, keepdim=True)
            return torch.zeros_like(wide).scatter_(-1, best, 1.0)
        if self.top_k is not None and self.top_k < wide.shape[-1]:
            least = wide.topk(self.top_k).values[..., -1:]
            wide = wide.masked_fill(wide < least, float("-inf"))
        wide = wide - wide.amax(-1, keepdim=True)
        return (wide / self.temperature if self.temperature != 1 else wide).exp_()

    def __call__(self, logits: Tensor, uniform: Callable[[int], Tensor], mask_id: int) -> Tensor:
        """Tokens int [R] from logits [R, V]; uniform(attempt) gives float64 [R], independent for each attempt."""
        weights = self.weights(logits, mask_id)
        token = inverse_cdf(weights, uniform(0))
        if self.top_p == 1 or self.temperature == 0:
            return token
        return self._reject(weights, token, uniform)

    def _reject(self, weights: Tensor, token: Tensor, uniform: Callable[[int], Tensor]) -> Tensor:
        """Draw again wherever the token is outside the nucleus: what is kept has the nucleus's own distribution."""
        limit = self.top_p * weights.sum(-1, dtype=torch.float64)
        rows = torch.arange(len(token), device=token.device)
        for attempt in range(1, ATTEMPTS + 1):
            w = weights[rows]
            above = torch.where(w > w.gather(-1, token[rows, None]), w, 0).sum(-1, dtype=torch.float64)
            rows = rows[above >= limit[rows]]
            if not len(rows):
                return token
            token[rows] = inverse_cdf(weights[rows], uniform(attempt)[rows])
        token[rows] = inverse_cdf(nucleus(weights[rows], self.top_p), uniform(ATTEMPTS + 1)[rows])
        return token

    def probabilities(self, logits: Tensor, mask_id: int) -> Tensor:
        """The slow twin: the distribution that tokens are drawn from, [R, V]."""
        weights = self.weights(logits, mask_id)
        weights = weights if self.top_p == 1 else nucleus(weights, self.top_p)
        return weights / weights.sum(-1, keepdim=True)


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Weights [R, V] with zeros outside the nucleus, by a full sort."""
    ordered = _ascending(weights).flip(-1)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    before = F.pad(cumulative, (1, 0))[..., :-1]
    # Ties have the mass above the first of them; the last first with less than top_p above it ends the nucleus.
    first = F.pad(ordered[..., 1:] < ordered[..., :-1], (1, 0), value=True)
    inside = first & (before < top_p * cumulative[..., -1:])
    least = torch.where(inside, ordered, float("inf")).amin(-1, keepdim=True)
    return weights.masked_fill(weights < least, 0)


def _ascending(weights: Tensor) -> Tensor:
    """Sorted values; on the CPU NumPy's sort is thirty times faster than PyTorch's, which also finds the indices."""
    if weights.is_cpu:
        return torch.from_numpy(np.sort(weights.detach().numpy(), -1))
    return weights.sort(-1).values


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The index whose stretch of the cumulative weights holds u, int [R]; weights [R, V], u float64 [R].

    Two levels, sums of blocks and then inside one block, in float64, so that a token of weight 1e-12 is drawn as
    often as it should be, without a cumulative sum over the vocabulary.
    """
    rows, vocabulary = weights.shape
    blocks = -(-vocabulary // BLOCK)
    inside = F.pad(weights, (0, blocks * BLOCK - vocabulary)).view(rows, blocks, BLOCK)
    cumulative = inside.sum(-1, dtype=torch.float64).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    target = u[:, None] * total
    # u times the sum may round up to the sum: the last block is the last that has any weight.
    block = torch.searchsorted(cumulative, target, right=True).minimum(torch.searchsorted(cumulative, total))
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_min(0)), 0.0)
    chosen = inside[torch.arange(rows, device=weights.device), block[:, 0]]
    within = chosen.double().cumsum(-1)
    index = torch.searchsorted(within, target - before, right=True)
    # Rounding may point behind the last token of the block that has any weight.
    last = BLOCK - 1 - (chosen.flip(-1) > 0).long().argmax(-1, keepdim=True)
    return (block * BLOCK + index.minimum(last))[:, 0]
