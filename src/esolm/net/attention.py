"""Attention by a visibility pattern, with several kernels that give the same result.

The reference is a dense boolean mask. On the CPU the sorted patterns are tiled into row blocks, each over the keys that
its rows can see, because the flash kernel also computes the keys that a mask hides. Each z slot's attention to itself,
if it has any, is merged in by its log-sum-exp.

Where keys and values have fewer heads than queries, each is shared by consecutive heads of queries.

Shapes: B batch, H heads, N queries, K keys, D head width, M slots of z, L slots of x.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.visibility import Packed, Visibility
from .tiling import Tiling, block_rows, tile_rows

Flash = tuple[Tensor, Tensor]
PRODUCTS = 1 << 25
"""Up to this number of attention weights a layer may keep them for training in bf16 on a CPU: 64 MB."""
HALVES = ("two_stream", "two_stream_prefix", "block")
"""Patterns with a z half and an x half."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | Packed, span: slice | None, asked: bool = False
) -> Tensor:
    """Attention of the query slots in `span`, or of all: q [B, H, N, D], k and v [B, H|fewer, K, D] -> [B, H, N, D].

    asked: of packed inputs, only the rows that get logits are needed; the others may be zero.
    """
    if isinstance(visibility, Packed):
        return _packed(q, k, v, visibility, asked)
    slots = visibility.rank.shape[1]
    span = slice(0, slots) if span is None else span
    whole = span.start == 0 and span.stop == slots
    weights = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if visibility.kind in ("full", "causal") and whole and _trains_bf16(q) and weights <= PRODUCTS:
        return _products(q, *shared(q, k, v), causal=visibility.kind == "causal")
    if visibility.kind == "full":
        return mix(q, k, v)
    if q.is_cuda and whole and visibility.kind != "causal":
        return _compiled_flex()(q, *shared(q, k, v), block_mask=_block_mask(visibility))
    piece = Piece(visibility, span)
    if visibility.kind == "causal" and whole and (q.is_cuda or not q.requires_grad or block_rows(slots) >= slots):
        return mix(q, k, v, is_causal=True)
    if visibility.kind in (*HALVES, "causal") and not q.is_cuda and piece.fast:
        return _fast(q, k, v, (piece,))
    return dense(q, k, v, visibility, span)


def _packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, asked: bool) -> Tensor:
    """Each input by its own pattern: [1, H, R, D] -> [1, H, R, D], where R is the number of slots of all inputs."""
    pieces, first = [], 0
    for part in packed.parts:
        slots = part.visibility.rank.shape[1]
        place = Place(first, part.batch, slots)
        pieces.append(Piece(part.visibility, part.asked if asked else slice(0, slots), place))
        first += part.batch * slots
    if not q.is_cuda and all(piece.fast for piece in pieces):
        return _fast(q, k, v, tuple(pieces))
    found = []
    for piece in pieces:
        q_i, k_i, v_i = (piece.of(t) for t in (q, k, v))
        out = attend(q_i[:, :, piece.span], k_i, v_i, piece.visibility, piece.span)
        if out.shape[2] < k_i.shape[2]:
            out = F.pad(out, (0, 0, piece.span.start, k_i.shape[2] - piece.span.stop))
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)[None].transpose(1, 2)


def dense(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, span: slice) -> Tensor:
    """Attention by the boolean mask, the reference for every kernel."""
    return mix(q, k, v, attn_mask=visibility.dense(span=span))


def mix(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's attention."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < q.shape[1], **options)


def shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each head of queries, for kernels that need as many."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def attend_cached(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of new slots q [B, H, N, D] over committed and new ones, k, v [B, H, K, D], by a bias [B|1, 1, N, K].

    In bf16 the CPU's kernel is three times faster for one row than for two, so two rows become two heads that share
    keys and values.
    """
    alone = k.shape[1] == q.shape[1]
    if q.shape[2] != 2 or q.dtype != torch.bfloat16 or q.device.type != "cpu" or not alone:
        return mix(q, k, v, attn_mask=bias)
    batch, heads = q.shape[:2]
    k, v = (t.flatten(0, 1)[:, None].expand(-1, 2, -1, -1) for t in (k, v))  # [B H, 2, K, D], not copied
    rows = bias.expand(-1, heads if bias.shape[0] > 1 else 1, -1, -1).flatten(0, 1)[:, :, None]
    out = F.scaled_dot_product_attention(q.flatten(0, 1)[:, :, None], k, v, attn_mask=rows.expand(len(k), -1, -1, -1))
    return out.view(batch, heads, 2, -1)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@functools.lru_cache(maxsize=4)
def _block_mask(visibility: Visibility) -> Any:
    """Cached, because all layers of a pass share it."""
    return visibility.flex()


class Place(NamedTuple):
    """The position of one input in a packed row."""

    first: int
    batch: int
    slots: int


class Piece(NamedTuple):
    """One input and its query slots."""

    visibility: Visibility
    span: slice
    place: Place | None = None  # None: the tensors hold this input only, and q only the rows of span

    def of(self, t: Tensor) -> Tensor:
        """All slots of this input, a view [B, H, N, D]."""
        if self.place is None:
            return t
        first, batch, slots = self.place
        return t[0, :, first : first + batch * slots].unflatten(1, (batch, slots)).transpose(0, 1)

    def asking(self, t: Tensor) -> Tensor:
        """The slots of `span`, a view [B, H, N, D]."""
        return t if self.place is None else self.of(t)[:, :, self.span]

    @property
    def fast(self) -> bool:
        """Whether it can be tiled: with two halves, all rows or those of z."""
        slots, num_z = self.visibility.rank.shape[1], self.visibility.num_z
        if self.visibility.kind in HALVES:
            return self.span in (slice(0, slots), slice(0, num_z))
        return self.visibility.kind in ("full", "causal")

    @property
    def partial(self) -> bool:
        """Whether some rows of the tensors get no output."""
        return self.place is not None and self.span != slice(0, self.place.slots)


def _trains_bf16(q: Tensor) -> bool:
    """Whether the CPU kernel's backward pass would run in bf16, which is several times slower than its parts."""
    return q.dtype == torch.bfloat16 and q.requires_grad and q.device.type == "cpu"


def _products(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention by two matrix products, which keeps the weights of all pairs for the backward pass."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if causal:
        scores = scores + _later(k.shape[2])
    return scores.softmax(-1) @ v


@functools.lru_cache(maxsize=4)
def _later(slots: int) -> Tensor:
    """A bias [N, N] that hides the keys after each query."""
    return torch.full((slots, slots), float("-inf"), dtype=torch.bfloat16).triu_(1)


def _fast(q: Tensor, k: Tensor, v: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    return _Fast.apply(q, *shared(q, k, v), pieces)


class _Fast(torch.autograd.Function):
    """All inputs, written into one output and one gradient, so that nothing is concatenated or padded later.

    For training in bf16 it computes in float32, because the backward pass of the bf16 kernel is slower.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *low, pieces = given
        q, k, v = (_wider(ctx, t) for t in low)
        batch, heads, rows, width = q.shape
        new = q.new_zeros if any(piece.partial for piece in pieces) else q.new_empty
        out = new((batch, rows, heads, width)).transpose(1, 2)  # contiguous for the output projection
        kept: list[Tensor] = []
        for piece in pieces:
            kept += _forward(piece.asking(q), piece.of(k), piece.of(v), piece.visibility, piece.span, piece.asking(out))
        out = out.to(low[0].dtype)
        ctx.save_for_backward(*low, out, *kept)
        ctx.pieces = pieces
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dtype, saved = grad.dtype, ctx.saved_tensors
        q, k, v, out, grad = (_wider(ctx, t) for t in (*saved[:4], grad))
        kept = saved[4:]
        dq = (torch.zeros_like if any(piece.partial for piece in ctx.pieces) else torch.empty_like)(q)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for i, piece in enumerate(ctx.pieces):
            grad_i, out_i, dq_i, q_i = (piece.asking(t) for t in (grad, out, dq, q))
            k_i, v_i, dk_i, dv_i = (piece.of(t) for t in (k, v, dk, dv))
            lse, own = kept[2 * i : 2 * i + 2]
            _backward(grad_i, out_i, q_i, k_i, v_i, lse, own, piece.visibility, piece.span, (dq_i, dk_i, dv_i))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None


def _wider(ctx: Any, t: Tensor) -> Tensor:
    return t.float() if t.dtype == torch.bfloat16 and any(ctx.needs_input_grad) else t


def _forward(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, span: slice, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Write `out`; returns each row's log-sum-exp and each z slot's score of its own key, for the backward pass."""
    m, size = visibility.num_z, visibility.block_size
    lse = _run(q, k[:, :, m:], v[:, :, m:], tile_rows(visibility, span.start, span.stop, q.dtype), out)
    own = lse.new_empty(0)
    if visibility.kind == "block":
        q_b, k_b, v_b = (_fold(t[:, :, :m], size) for t in (q, k, v))
        mixed, score = _flash(q_b, k_b, v_b)
        _merge((out[:, :, :m], lse[:, :, :m]), (mixed.reshape(v[:, :, :m].shape), score.reshape(lse[:, :, :m].shape)))
    elif m:
        own = (q[:, :, :m] * k[:, :, :m]).sum(-1, dtype=_wide(q)) * q.shape[-1] ** -0.5
        own.masked_fill_(visibility.clique[:, None, :m] < 0, -torch.inf)  # copies do not see themselves
        _merge((out[:, :, :m], lse[:, :, :m]), (v[:, :, :m], own))
    return lse, own


def _backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, own: Tensor,
    visibility: Visibility, span: slice, into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write dq, dk and dv."""
    dq, dk, dv = into
    m, size = visibility.num_z, visibility.block_size
    tiling = tile_rows(visibility, span.start, span.stop, q.dtype)
    _run_backward(grad, q, k[:, :, m:], v[:, :, m:], (out, lse), tiling, (dq, dk[:, :, m:], dv[:, :, m:]))
    if visibility.kind == "block":
        merged = (_fold(out[:, :, :m], size), lse[:, :, :m].reshape(len(lse), -1, size))
        grad_b, q_b, k_b, v_b = (_fold(t[:, :, :m], size) for t in (grad, q, k, v))
        found = _flash_backward(grad_b, q_b, k_b, v_b, merged)
        dq_z, dk_z, dv_z = (t.reshape(k[:, :, :m].shape) for t in found)
        dq[:, :, :m] += dq_z
        dk[:, :, :m], dv[:, :, :m] = dk_z, dv_z
    elif m:
        grad_z, weight = grad[:, :, :m], (own - lse[:, :, :m]).exp_().to(q.dtype)[..., None]
        score = (grad_z * (v[:, :, :m] - out[:, :, :m])).sum(-1, keepdim=True)
        score.mul_(weight).mul_(q.shape[-1] ** -0.5)
        dq[:, :, :m].addcmul_(score, k[:, :, :m])
        torch.mul(score, q[:, :, :m], out=dk[:, :, :m])
        torch.mul(weight, grad_z, out=dv[:, :, :m])


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Flash:
    """Output [B, H, N, D] and log-sum-exp [B, H, N] of the CPU flash kernel."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Flash, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one group of keys. Given the merged output and log-sum-exp, the kernel's own formula is exact:
    P = exp(s - lse) are the merged weights, and dS = P (dO v - dO O) needs the merged O."""
    out, lse = merged
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask
    )


def _merge(into: Flash, part: Flash) -> None:
    """Merge two groups of keys into one softmax, in place, from each group's output and log-sum-exp."""
    out, lse = into
    merged = torch.logaddexp(lse, part[1])
    before, after = ((t - merged).exp_().to(out.dtype)[..., None] for t in (lse, part[1]))
    out.mul_(before).addcmul_(part[0], after)
    lse.copy_(merged)


def _run(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, out: Tensor) -> Tensor:
    """Write `out`; returns the log-sum-exp of all rows."""
    lse = q.new_empty(q.shape[:3], dtype=_wide(q))
    for tile in tiling.tiles:
        rows, keys, sees = tile
        found = _flash(q[:, :, rows], k[:, :, keys], v[:, :, keys], tiling.mask(tile), sees == "causal")
        out[:, :, rows], lse[:, :, rows] = found
    return lse


def _run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Flash, tiling: Tiling, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write dq, dk and dv."""
    out, lse = merged
    dq, dk, dv = into
    for t in (dq,) * tiling.rows_left + (dk, dv) * tiling.keys_left:
        t.zero_()
    for tile, new_rows, new_keys in tiling.backward:
        rows, keys, sees = tile
        part = (out[:, :, rows], lse[:, :, rows].contiguous())
        found = _flash_backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], part, tiling.mask(tile), sees == "causal"
        )
        parts = (dq[:, :, rows], new_rows), (dk[:, :, keys], new_keys), (dv[:, :, keys], new_keys)
        for (part_of, new), change in zip(parts, found, strict=True):
            part_of.copy_(change) if new else part_of.add_(change)


def _fold(t: Tensor, size: int) -> Tensor:
    """Blocks as additional heads: [B, H, L, D] -> [B, H * L/size, size, D]."""
    return t.reshape(t.shape[0], -1, size, t.shape[3])


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
