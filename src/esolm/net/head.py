"""The output layer for the nats of known tokens, without the logits of all rows in memory at once.

Shapes: R rows, W width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.terms import token_nats
from .adapters import is_adapted

WHOLE = 1 << 24
"""Up to this number of logits they are computed at once, with autograd."""
CHUNK = 512
"""Rows of a chunk otherwise: enough that accumulating the weight gradient costs less than the chunk itself."""


class Score(NamedTuple):
    """The targets of a pass that returns nats instead of logits."""

    target: Tensor  # int [R]
    exclude: int  # the mask id, which has probability zero
    weight: Tensor | None = None  # [R], the weight of each row's nats


class TiedHead(nn.Module):
    """An output layer whose weight is that of the embedding, and no parameter of its own."""

    def __init__(self, net: Any, vocab_size: int, bias: bool) -> None:
        super().__init__()
        # The network, since peft may replace its embedding; in a tuple, so that its weights have one name.
        self._net = (net,)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    @property
    def weight(self) -> Tensor:
        return self._net[0].embed.weight

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight, self.bias)


def score_rows(head: nn.Linear | TiedHead, h: Tensor, score: Score) -> Tensor:
    """weight * -log p(target): h [R, W] -> [R]."""
    if h.shape[0] * head.weight.shape[0] <= WHOLE or is_adapted(head):
        nats = token_nats(head(h), score.target, score.exclude)
        return nats if score.weight is None else nats * score.weight.to(nats.dtype)
    return _chunked(head, h, score)


def _chunked(head: nn.Linear | TiedHead, h: Tensor, score: Score) -> Tensor:
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    with torch.autocast(kind, enabled=False):
        return _Chunked.apply(h.to(dtype), head.weight, head.bias, *score, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    """Nats and, in the same sweep over the rows, their gradients.

    A loss sums the rows, so the incoming gradient is the same for all of them; any other takes a second sweep.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        target: Tensor,
        exclude: int,
        weight: Tensor | None,
        learns: bool,
    ) -> Tensor:
        weight = matrix.new_ones(len(h)) if weight is None else weight.to(matrix.dtype)
        nats, *gradients = _sweep(h, matrix, bias, target, exclude, weight, learns)
        ctx.save_for_backward(h, matrix, bias, target, weight, *gradients)
        ctx.exclude = exclude
        return nats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, matrix, bias, target, weight, *gradients = ctx.saved_tensors
        if not bool((grad == grad[0]).all()):
            _, *gradients = _sweep(h, matrix, bias, target, ctx.exclude, weight * grad, True)
            return *gradients, None, None, None, None
        return *(None if g is None else g * grad[0].to(g.dtype) for g in gradients), None, None, None, None


def _sweep(
    h: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, exclude: int, weight: Tensor, gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Weighted nats [R] and, if `gradients`, the gradients of their sum with respect to h and, if they are trained,
    matrix and bias."""
    nats = torch.empty_like(weight)
    dh = torch.zeros_like(h) if gradients else None
    trained = (t if gradients and t is not None and t.requires_grad else None for t in (matrix, bias))
    d_matrix, d_bias = (None if t is None else torch.zeros_like(t) for t in trained)
    low, low_bias = matrix.to(h.dtype), None if bias is None else bias.to(h.dtype)
    for start in range(0, len(h), CHUNK):
        part = slice(start, start + CHUNK)
        at = target[part, None]
        logits = F.linear(h[part], low) if low_bias is None else torch.addmm(low_bias, h[part], low.t())
        logits = logits.to(weight.dtype)
        logits[:, exclude] = float("-inf")
        lse = logits.logsumexp(1, keepdim=True)
        nats[part] = weight[part] * (lse - logits.gather(1, at))[:, 0]
        if dh is not None:
            change = logits.sub_(lse).exp_()
            change.scatter_add_(1, at, change.new_full(at.shape, -1.0))
            change.mul_(weight[part, None])
            if d_bias is not None:
                d_bias += change.sum(0)
            change = change.to(h.dtype)
            torch.mm(change, low, out=dh[part])
            if d_matrix is not None and h.dtype == matrix.dtype:
                d_matrix.addmm_(change.t(), h[part])
            elif d_matrix is not None:
                d_matrix += change.t() @ h[part]
    return nats, dh, d_matrix, d_bias
