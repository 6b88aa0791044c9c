"""The output layer for the nats of known tokens, without the logits of all rows in memory at once.

Shapes: B batch, N network input, R rows, W width, D width of an embedding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


NO_LATENTS = "this network has no latent_width: it takes tokens, and not noisy embeddings"


class Score(NamedTuple):
    """The targets of a pass that returns nats instead of logits."""

    target: Tensor  # int [R]
    exclude: int  # the mask id, which has probability zero
    weight: Tensor | None = None  # [R], the weight of each row's nats


class RowLoss(NamedTuple):
    """A function of all logits of a row, for losses that need more than the probability of a target."""

    function: Callable[..., Tensor]  # logits [R, V], inputs -> nats [R] or [R, n]; the chunks of a pass share no state
    inputs: tuple[Tensor, ...]  # [R, ...] each; no gradient flows into them
    columns: int | None = None  # n, if the function returns [R, n]

    def nats(self, logits: Tensor, rows: slice) -> Tensor:
        """The nats of some rows from their logits."""
        return self.function(logits, *(t[rows] for t in self.inputs))


@dataclass(frozen=True, eq=False)
class VectorPass:
    """A pass on noisy embeddings through a network with `latent_width`, which predicts the clean ones."""

    feed: Callable[[Tensor], Tensor]  # embeddings of the tokens [B, N, D] -> what the network is fed
    result: Callable[[Tensor, Tensor, TiedHead], Tensor]  # embeddings and predictions [R, D], and the head -> [R, n]
    columns: int  # n


Scoring = Score | RowLoss | VectorPass
"""What turns the logits of a pass into nats, or takes the place of tokens and logits."""


def tempered(target: Tensor, exclude: int, temperature: float) -> Scoring:
    """The nats of targets, int [R], in softmax(logits / temperature)."""
    if temperature == 1:
        return Score(target, exclude)
    return RowLoss(lambda logits, at: token_nats(logits / temperature, at, exclude), (target,))


class TiedHead(nn.Module):
    """An output layer whose weight is that of the embedding, and no parameter of its own."""

    def __init__(self, net: Any, vocab_size: int, bias: bool) -> None:
        super().__init__()
        # The network, since peft may replace its embedding; in a tuple, so that its weights have one name.
        self._net = (net,)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The embedding's weight, [V, W]."""
        return self._net[0].embed.weight

    def forward(self, h: Tensor) -> Tensor:
        """Logits: h [..., W] -> [..., V]."""
        return F.linear(h, self.weight, self.bias)


def score_rows(head: nn.Linear | TiedHead, h: Tensor, score: Scoring) -> Tensor:
    """weight * -log p(target), or the nats of a `RowLoss`: h [R, W] -> [R]."""
    whole = h.shape[0] * head.weight.shape[0] <= WHOLE or is_adapted(head)
    if isinstance(score, VectorPass):
        raise ValueError(NO_LATENTS)
    if isinstance(score, RowLoss):
        return score.nats(head(h), slice(None)) if whole else _chunked(head, h, score)
    if whole:
        nats = token_nats(head(h), score.target, score.exclude)
        return nats if score.weight is None else nats * score.weight.to(nats.dtype)
    return _chunked(head, h, score)


def _chunked(head: nn.Linear | TiedHead, h: Tensor, score: Score | RowLoss) -> Tensor:
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    with torch.autocast(kind, enabled=False):
        if isinstance(score, RowLoss):
            return _ChunkedLoss.apply(h.to(dtype), head.weight, head.bias, score, torch.is_grad_enabled())
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
    nats, sums = torch.empty_like(weight), _Sums(h, matrix, bias, gradients)
    for start in range(0, len(h), CHUNK):
        part = slice(start, start + CHUNK)
        at = target[part, None]
        logits = sums.logits(part).to(weight.dtype)
        logits[:, exclude] = float("-inf")
        lse = logits.logsumexp(1, keepdim=True)
        nats[part] = weight[part] * (lse - logits.gather(1, at))[:, 0]
        if gradients:
            change = logits.sub_(lse).exp_()
            change.scatter_add_(1, at, change.new_full(at.shape, -1.0))
            sums.add(part, change.mul_(weight[part, None]))
    return nats, sums.h, sums.matrix, sums.bias


class _Sums:
    """The output layer, and the gradients of its inputs and of what is trained of it, summed chunk by chunk."""

    def __init__(self, h: Tensor, matrix: Tensor, bias: Tensor | None, gradients: bool) -> None:
        self.inputs, self.wide = h, matrix.dtype
        self.low, self.low_bias = matrix.to(h.dtype), None if bias is None else bias.to(h.dtype)
        self.h = torch.zeros_like(h) if gradients else None
        trained = (t if gradients and t is not None and t.requires_grad else None for t in (matrix, bias))
        self.matrix, self.bias = (None if t is None else torch.zeros_like(t) for t in trained)

    def logits(self, part: slice) -> Tensor:
        h = self.inputs[part]
        return F.linear(h, self.low) if self.low_bias is None else torch.addmm(self.low_bias, h, self.low.t())

    def add(self, part: slice, change: Tensor) -> None:
        """Add the gradients of a chunk, given that of its logits."""
        assert self.h is not None, "made without gradients"
        h = self.inputs[part]
        if self.bias is not None:
            self.bias += change.sum(0)
        change = change.to(h.dtype)
        torch.mm(change, self.low, out=self.h[part])
        if self.matrix is not None and h.dtype == self.wide:
            self.matrix.addmm_(change.t(), h)
        elif self.matrix is not None:
            self.matrix += change.t() @ h


class _ChunkedLoss(torch.autograd.Function):
    """`_Chunked` for a `RowLoss`; autograd differentiates its function chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, matrix: Tensor, bias: Tensor | None, loss: RowLoss, learns: bool) -> Tensor:
        nats, *gradients = _sweep_loss(h, matrix, bias, loss, None, learns)
        ctx.save_for_backward(h, matrix, bias, *loss.inputs, *gradients)
        ctx.function = loss.function
        return nats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, matrix, bias, *rest = ctx.saved_tensors
        inputs, gradients = rest[:-3], rest[-3:]
        every = grad.flatten()
        if not bool((every == every[0]).all()):
            _, *gradients = _sweep_loss(h, matrix, bias, RowLoss(ctx.function, tuple(inputs)), grad, True)
            return *gradients, None, None
        return *(None if g is None else g * every[0].to(g.dtype) for g in gradients), None, None


def _sweep_loss(
    h: Tensor, matrix: Tensor, bias: Tensor | None, loss: RowLoss, weight: Tensor | None, gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Nats [R] and, if `gradients`, the gradients of their sum, weighted by [R], as in `_sweep`."""
    nats, sums = [], _Sums(h, matrix, bias, gradients)
    for start in range(0, len(h), CHUNK):
        part = slice(start, start + CHUNK)
        with torch.set_grad_enabled(gradients):
            logits = sums.logits(part).detach().to(matrix.dtype).requires_grad_(gradients)
            own = loss.nats(logits, part)
        nats.append(own.detach())
        if gradients:
            (change,) = torch.autograd.grad(own, logits, torch.ones_like(own) if weight is None else weight[part])
            sums.add(part, change)
    return torch.cat(nats), sums.h, sums.matrix, sums.bias
