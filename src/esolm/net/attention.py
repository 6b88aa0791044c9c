"""attend(q, k, v, visibility): one softmax, several kernels, the same result.

The slow twin is a dense boolean mask. On the CPU the sorted patterns go by stairs: some rows at a time over the keys
that they can see, since the flash kernel pays for the keys that a mask hides. What z sees of itself is merged in by
its log-sum-exp.

Shapes: B batch, H heads, N queries, K keys, D head width, M slots of z, L slots of x.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.visibility import Packed, Visibility

Flash = tuple[Tensor, Tensor]
HALVES = ("two_stream", "two_stream_prefix", "block")
"""Patterns with a z half and an x half."""


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | Packed, span: slice | None) -> Tensor:
    """Attention of the query slots in span, or of all: q [B, H, N, D] over all slots k, v [B, H, K, D], as q."""
    if isinstance(visibility, Packed):
        return _packed(q, k, v, visibility, asked=False)
    slots = visibility.rank.shape[1]
    span = slice(0, slots) if span is None else span
    whole = span.start == 0 and span.stop == slots
    if visibility.kind == "full":
        return F.scaled_dot_product_attention(q, k, v)
    if q.is_cuda and whole and visibility.kind != "causal":
        return _compiled_flex()(q, k, v, block_mask=_block_mask(visibility))
    piece = Piece(visibility, span)
    if visibility.kind == "causal" and whole and (q.is_cuda or not q.requires_grad or _step(slots) >= slots):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if visibility.kind in (*HALVES, "causal") and not q.is_cuda and piece.fast:
        return _fast(q, k, v, (piece,))
    return dense(q, k, v, visibility, span)


def attend_asked(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | Packed, span: slice | None) -> Tensor:
    """The same where only the rows that get logits are wanted; of packed inputs the others may be zero."""
    if isinstance(visibility, Packed):
        return _packed(q, k, v, visibility, asked=True)
    return attend(q, k, v, visibility, span)


def _packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, asked: bool) -> Tensor:
    """Each input by its own pattern: [1, H, R, D] -> [1, H, R, D], where R counts the slots of all inputs."""
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
    """The slow twin of every shortcut."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visibility.dense(span=span))


def attend_cached(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of new slots q [B, H, N, D] over committed and new ones, k, v [B, H, K, D], by a bias [B|1, 1, N, K].

    In bf16 the CPU's kernel is three times faster for one row than for two. Two rows therefore go as two heads with the
    same keys and values, which the second finds in the processor's cache.
    """
    if q.shape[2] != 2 or q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
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
    """All layers of a pass share it."""
    return visibility.flex()


class Place(NamedTuple):
    """Where an input lies in a row of several."""

    first: int
    batch: int
    slots: int


class Piece(NamedTuple):
    """One input, and its slots that ask."""

    visibility: Visibility
    span: slice
    place: Place | None = None  # without one the tensors are this input's alone, the queries those of span

    def of(self, t: Tensor) -> Tensor:
        """All slots of this input, a view [B, H, N, D]."""
        if self.place is None:
            return t
        first, batch, slots = self.place
        return t[0, :, first : first + batch * slots].unflatten(1, (batch, slots)).transpose(0, 1)

    def asking(self, t: Tensor) -> Tensor:
        """The slots of span, a view [B, H, N, D]."""
        return t if self.place is None else self.of(t)[:, :, self.span]

    @property
    def fast(self) -> bool:
        """Whether stairs fit: of two halves, all rows or those of z."""
        slots, num_z = self.visibility.rank.shape[1], self.visibility.num_z
        if self.visibility.kind in HALVES:
            return self.span in (slice(0, slots), slice(0, num_z))
        return self.visibility.kind in ("full", "causal")

    @property
    def partial(self) -> bool:
        """Whether rows are left out that the tensors have."""
        return self.place is not None and self.span != slice(0, self.place.slots)


def _fast(q: Tensor, k: Tensor, v: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    return _Fast.apply(q, k, v, pieces)


class _Fast(torch.autograd.Function):
    """The inputs one after another, into one output and one gradient, so that nothing is joined or padded later."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
        batch, heads, rows, width = q.shape
        new = q.new_zeros if any(piece.partial for piece in pieces) else q.new_empty
        out = new((batch, rows, heads, width)).transpose(1, 2)  # as the next projection reads it
        kept: list[Tensor] = []
        for piece in pieces:
            kept += _forward(piece.asking(q), piece.of(k), piece.of(v), piece.visibility, piece.span, piece.asking(out))
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.pieces = pieces
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *kept = ctx.saved_tensors
        dq = (torch.zeros_like if any(piece.partial for piece in ctx.pieces) else torch.empty_like)(q)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for i, piece in enumerate(ctx.pieces):
            grad_i, out_i, dq_i, q_i = (piece.asking(t) for t in (grad, out, dq, q))
            k_i, v_i, dk_i, dv_i = (piece.of(t) for t in (k, v, dk, dv))
            lse, own = kept[2 * i : 2 * i + 2]
            _backward(grad_i, out_i, q_i, k_i, v_i, lse, own, piece.visibility, piece.span, (dq_i, dk_i, dv_i))
        return dq, dk, dv, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, span: slice, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes out; the log-sum-exp of all that a row sees and the score of a z slot's own key are for the backward."""
    m, size = visibility.num_z, visibility.block_size
    lse = _climb(q, k[:, :, m:], v[:, :, m:], _stairs(visibility, span.start, span.stop, q.dtype), out)
    own = lse.new_empty(0)
    if visibility.kind == "block":
        q_b, k_b, v_b = (_fold(t[:, :, :m], size) for t in (q, k, v))
        mixed, score = _flash(q_b, k_b, v_b)
        _merge((out[:, :, :m], lse[:, :, :m]), (mixed.reshape(v[:, :, :m].shape), score.reshape(lse[:, :, :m].shape)))
    elif m:
        own = (q[:, :, :m] * k[:, :, :m]).sum(-1, dtype=_wide(q)) * q.shape[-1] ** -0.5
        _merge((out[:, :, :m], lse[:, :, :m]), (v[:, :, :m], own))
    return lse, own


def _backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, own: Tensor,
    visibility: Visibility, span: slice, into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Writes dq, dk and dv."""
    dq, dk, dv = into
    m, size = visibility.num_z, visibility.block_size
    stairs = _stairs(visibility, span.start, span.stop, q.dtype)
    _climb_backward(grad, q, k[:, :, m:], v[:, :, m:], (out, lse), stairs, (dq, dk[:, :, m:], dv[:, :, m:]))
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
    """Gradients of one group. With the merged output and log-sum-exp, the kernel's own formula is already right:
    P = exp(s - lse) are the merged weights and dS = P (dO v - dO O) needs the merged O."""
    out, lse = merged
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask
    )


def _merge(into: Flash, part: Flash) -> None:
    """One softmax over two groups of keys, in place, from each group's own softmax and log-sum-exp."""
    out, lse = into
    merged = torch.logaddexp(lse, part[1])
    before, after = ((t - merged).exp_().to(out.dtype)[..., None] for t in (lse, part[1]))
    out.mul_(before).addcmul_(part[0], after)
    lse.copy_(merged)


class Call(NamedTuple):
    """One call of the kernel: some rows over some keys of x."""

    rows: slice
    keys: slice
    sees: Literal["all", "causal", "bias"]  # all keys; row i the first i + 1; or what the bias shows


class Stairs(NamedTuple):
    """Sorted queries over x, some rows at a time, each over no more keys than its rows can see."""

    calls: tuple[Call, ...]
    bias: Tensor | None  # [B|1, 1, N, L], for the calls that read it
    backward: tuple[tuple[Call, bool, bool], ...]  # with whether the rows, and the keys, are new in this call
    rows_left: bool  # some row, or some key, is in no backward call
    keys_left: bool

    def mask(self, call: Call) -> Tensor | None:
        return self.bias[:, :, call.rows, call.keys] if self.bias is not None and call.sees == "bias" else None


@functools.lru_cache(maxsize=8)
def _stairs(visibility: Visibility, start: int, stop: int, dtype: torch.dtype) -> Stairs:
    """What the queries from start to stop see of x. The bias is finite: a query that sees no x has a log-sum-exp of
    -1e9 there, and so no weight once its own key is merged in. All layers of a pass share it."""
    num_z, kind = visibility.num_z, visibility.kind
    keys, queries = visibility.rank.shape[1] - num_z, stop - start
    size, whole = _step(keys), start == 0 and stop == num_z + keys
    every, z, x = slice(0, keys), slice(0, num_z), slice(num_z, queries)
    if whole and kind in ("full", "causal"):
        calls = [Call(every, every, "causal" if kind == "causal" else "all")]
        columns = _columns(every, 0, 0, keys, size) if kind == "causal" else calls
        return _with_backward(calls, None, columns, queries, keys)
    if whole and kind == "two_stream" and size < keys:  # x is causal and needs no bias
        above = _stairs(visibility, 0, num_z, dtype)
        columns = [*_columns(x, 0, 0, keys, size), *_columns(z, keys - num_z, 1, keys, size)]
        return _with_backward([Call(x, every, "causal"), *above.calls], above.bias, columns, queries, keys)
    rank, horizon = visibility.rank[:, num_z:], visibility.horizon[:, start:stop]
    hidden = rank[:, None] > horizon[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=rank.device).masked_fill_(hidden, -1e9)[:, None]
    reach = (~hidden).sum(-1).amax(0).clamp_min(1).tolist()
    starts = (*range(0, num_z, size), *range(num_z, queries, size)) if size < queries else (0,)
    rows = (slice(i, j) for i, j in pairwise(sorted({*starts, queries})))
    calls = sorted((Call(at, slice(0, max(reach[at])), "bias") for at in rows), key=lambda call: -call.keys.stop)
    by_column = kind == "two_stream" and size < keys
    return _with_backward(calls, bias, _columns(z, keys - num_z, 1, keys, size) if by_column else calls, queries, keys)


def _columns(rows: slice, place: int, strict: int, keys: int, size: int) -> list[Call]:
    """Some keys and all rows that see any of them, for rows at the places from `place` on of the order, which see what
    comes before them, and themselves if not strict. The kernel's gradients are faster so than by stairs of rows."""
    starts = ((rows.start + first - place + strict, first) for first in range(place, keys, size))
    found = [Call(slice(i, rows.stop), slice(j, min(j + size, keys)), "causal") for i, j in starts if i < rows.stop]
    return [Call(rows, slice(0, place), "all"), *found] if place else found


def _with_backward(calls: list[Call], bias: Tensor | None, backward: list[Call], queries: int, keys: int) -> Stairs:
    rows_done: set[int] = set()
    keys_done: set[int] = set()
    marked = []
    for call in backward:
        rows_now, keys_now = range(queries)[call.rows], range(keys)[call.keys]
        marked.append((call, rows_done.isdisjoint(rows_now), keys_done.isdisjoint(keys_now)))
        rows_done.update(rows_now)
        keys_done.update(keys_now)
    return Stairs(tuple(calls), bias, tuple(marked), len(rows_done) < queries, len(keys_done) < keys)


def _climb(q: Tensor, k: Tensor, v: Tensor, stairs: Stairs, out: Tensor) -> Tensor:
    """Writes out; the log-sum-exp of all rows."""
    lse = q.new_empty(q.shape[:3], dtype=_wide(q))
    for call in stairs.calls:
        rows, keys, sees = call
        found = _flash(q[:, :, rows], k[:, :, keys], v[:, :, keys], stairs.mask(call), sees == "causal")
        out[:, :, rows], lse[:, :, rows] = found
    return lse


def _climb_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Flash, stairs: Stairs, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Writes dq, dk and dv."""
    out, lse = merged
    dq, dk, dv = into
    for t in (dq,) * stairs.rows_left + (dk, dv) * stairs.keys_left:
        t.zero_()
    for call, new_rows, new_keys in stairs.backward:
        rows, keys, sees = call
        part = (out[:, :, rows], lse[:, :, rows].contiguous())
        found = _flash_backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], part, stairs.mask(call), sees == "causal"
        )
        _write(dq[:, :, rows], found[0], new_rows)
        _write(dk[:, :, keys], found[1], new_keys)
        _write(dv[:, :, keys], found[2], new_keys)


def _write(into: Tensor, change: Tensor, new: bool) -> None:
    into.copy_(change) if new else into.add_(change)


def _fold(t: Tensor, size: int) -> Tensor:
    """Blocks as further heads: [B, H, L, D] -> [B, H * L/size, size, D]."""
    return t.reshape(t.shape[0], -1, size, t.shape[3])


def _step(keys: int) -> int:
    """Rows at a time: measured, short sequences gain less from fewer pairs than more calls cost."""
    return 256 if keys >= 768 else 2 * keys


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
