"""attend(q, k, v, visibility): one softmax, several kernels, the same result.

The slow twin is a dense boolean mask. On the CPU the sorted patterns go by stairs: some rows at a time over the keys
that they can see, since the flash kernel pays for the keys that a mask hides. What z sees of itself is merged in by
its log-sum-exp.

Shapes: B batch, H heads, N queries, K keys, D head width, M slots of z, L slots of x.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..visibility import Packed, Visibility

Flash = tuple[Tensor, Tensor]


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
    if visibility.kind == "causal" and whole:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    halves = visibility.kind in ("two_stream", "two_stream_prefix", "block")
    if halves and not q.is_cuda and (whole or span == slice(0, visibility.num_z)):
        return _halves(q, k, v, visibility)
    return dense(q, k, v, visibility, span)


def attend_asked(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility | Packed, span: slice | None) -> Tensor:
    """The same where only the rows that get logits are wanted; of packed inputs the others may be zero."""
    if isinstance(visibility, Packed):
        return _packed(q, k, v, visibility, asked=True)
    return attend(q, k, v, visibility, span)


def _packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, asked: bool) -> Tensor:
    """Each input by its own pattern: [1, H, R, D] -> [1, H, R, D], where R counts the slots of all inputs."""
    shapes = [(part.batch, part.visibility.rank.shape[1]) for part in packed.parts]
    rows = (t[0].split([batch * slots for batch, slots in shapes], 1) for t in (q, k, v))
    found = []
    for part, shape, *mine in zip(packed.parts, shapes, *rows, strict=True):
        q_i, k_i, v_i = (t.unflatten(1, shape).transpose(0, 1) for t in mine)  # [B, H, N, D]
        span = part.asked if asked else slice(0, shape[1])
        out = attend(q_i[:, :, span], k_i, v_i, part.visibility, span)
        if out.shape[2] < shape[1]:
            out = F.pad(out, (0, 0, span.start, shape[1] - span.stop))
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


def _halves(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """The patterns with a z half and an x half, for all queries or those of z."""
    (k_z, k_x), (v_z, v_x) = (t.split([visibility.num_z, t.shape[2] - visibility.num_z], 2) for t in (k, v))
    stairs = _stairs(visibility, q.shape[2], q.dtype)
    if visibility.kind == "block":
        return _BlockStream.apply(q, k_z, v_z, k_x, v_x, stairs, visibility.block_size)
    return _TwoStream.apply(q, k_z, v_z, k_x, v_x, stairs)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Flash:
    """Output [B, H, N, D] and log-sum-exp [B, H, N] of the CPU flash kernel."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Flash, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one group. With the merged output and log-sum-exp, the kernel's own formula is already right:
    P = exp(s - lse) are the merged weights and dS = P (dO v - dO O) needs the merged O."""
    out, lse = merged
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, False, attn_mask=mask
    )


def _merge(into: Flash, part: Flash) -> None:
    """One softmax over two groups of keys, in place, from each group's own softmax and log-sum-exp."""
    out, lse = into
    merged = torch.logaddexp(lse, part[1])
    before, after = ((t - merged).exp_().to(out.dtype)[..., None] for t in (lse, part[1]))
    out.mul_(before).addcmul_(part[0], after)
    lse.copy_(merged)


class Stairs(NamedTuple):
    """Sorted queries over x, some rows at a time, each over no more keys than its rows can see."""

    steps: tuple[tuple[slice, int], ...]
    bias: Tensor  # [B|1, 1, N, L]


@functools.lru_cache(maxsize=4)
def _stairs(visibility: Visibility, queries: int, dtype: torch.dtype) -> Stairs:
    """What the first so many queries see of x. The bias is finite: a query that sees no x has a log-sum-exp of -1e9
    there, and so no weight once its own key is merged in. All layers of a pass share it."""
    rank, horizon = visibility.rank[:, visibility.num_z :], visibility.horizon[:, :queries]
    hidden = rank[:, None] > horizon[:, :, None]
    reach = (~hidden).sum(-1).amax(0).clamp_min(1).tolist()
    size = _step(rank.shape[1])
    halves = range(0, min(visibility.num_z, queries), size), range(visibility.num_z, queries, size)
    starts = [i for half in halves for i in half] if size < queries else [0]
    steps = tuple((slice(i, j), max(reach[i:j])) for i, j in zip(starts, [*starts[1:], queries], strict=True))
    bias = torch.zeros(hidden.shape, dtype=dtype, device=rank.device).masked_fill_(hidden, -1e9)
    return Stairs(steps, bias[:, None])


def _climb(q: Tensor, k: Tensor, v: Tensor, stairs: Stairs) -> Flash:
    """Output and log-sum-exp of all rows, the output in the layout that the next projection reads."""
    if len(stairs.steps) == 1:
        return _flash(q, k, v, mask=stairs.bias)
    batch, heads, rows, width = q.shape
    out = q.new_empty(batch, rows, heads, width).transpose(1, 2)
    lse = q.new_empty(batch, heads, rows, dtype=_wide(q))
    for at, keys in stairs.steps:
        mask = stairs.bias[:, :, at, :keys]
        out[:, :, at], lse[:, :, at] = _flash(q[:, :, at], k[:, :, :keys], v[:, :, :keys], mask=mask)
    return out, lse


def _climb_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Flash, stairs: Stairs
) -> tuple[Tensor, Tensor, Tensor]:
    if len(stairs.steps) == 1:
        return _flash_backward(grad, q, k, v, merged, mask=stairs.bias)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    out, lse = merged
    for at, keys in stairs.steps:
        part = (out[:, :, at], lse[:, :, at].contiguous())
        mask = stairs.bias[:, :, at, :keys]
        dq[:, :, at], dk_p, dv_p = _flash_backward(
            grad[:, :, at], q[:, :, at], k[:, :, :keys], v[:, :, :keys], part, mask=mask
        )
        dk[:, :, :keys] += dk_p
        dv[:, :, :keys] += dv_p
    return dq, dk, dv


class _TwoStream(torch.autograd.Function):
    """Both halves over x by stairs; each z slot also sees its own key."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k_z: Tensor, v_z: Tensor, k_x: Tensor, v_x: Tensor, stairs: Stairs) -> Tensor:
        num_z = k_z.shape[2]
        own = (q[:, :, :num_z] * k_z).sum(-1, dtype=_wide(q)) * q.shape[-1] ** -0.5
        out, lse = _climb(q, k_x, v_x, stairs)
        _merge((out[:, :, :num_z], lse[:, :, :num_z]), (v_z, own))
        ctx.save_for_backward(q, k_z, v_z, k_x, v_x, out, lse, own)
        ctx.stairs = stairs
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k_z, v_z, k_x, v_x, out, lse, own = ctx.saved_tensors
        z = slice(0, k_z.shape[2])
        dq, dk_x, dv_x = _climb_backward(grad, q, k_x, v_x, (out, lse), ctx.stairs)
        weight = (own - lse[:, :, z]).exp_().to(q.dtype)[..., None]
        score = (grad[:, :, z] * (v_z - out[:, :, z])).sum(-1, keepdim=True).mul_(weight).mul_(q.shape[-1] ** -0.5)
        dq[:, :, z] += score * k_z
        return dq, score * q[:, :, z], weight * grad[:, :, z], dk_x, dv_x, None


class _BlockStream(torch.autograd.Function):
    """BD3-LM: both halves over x by stairs; each z slot also sees its own block of z, both ways."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_z: Tensor, v_z: Tensor, k_x: Tensor, v_x: Tensor, stairs: Stairs, size: int
    ) -> Tensor:
        z = slice(0, k_z.shape[2])
        own, own_lse = _flash(_fold(q[:, :, z], size), _fold(k_z, size), _fold(v_z, size))
        out, lse = _climb(q, k_x, v_x, stairs)
        _merge((out[:, :, z], lse[:, :, z]), (own.reshape(k_z.shape), own_lse.reshape(k_z.shape[:-1])))
        ctx.save_for_backward(q, k_z, v_z, k_x, v_x, out, lse)
        ctx.stairs, ctx.size = stairs, size
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k_z, v_z, k_x, v_x, out, lse = ctx.saved_tensors
        z, size = slice(0, k_z.shape[2]), ctx.size
        dq, dk_x, dv_x = _climb_backward(grad, q, k_x, v_x, (out, lse), ctx.stairs)
        merged = (_fold(out[:, :, z], size), lse[:, :, z].reshape(len(lse), -1, size))
        grad_z, q_z, k_b, v_b = (_fold(t, size) for t in (grad[:, :, z], q[:, :, z], k_z, v_z))
        own = _flash_backward(grad_z, q_z, k_b, v_b, merged)
        dq_z, dk_z, dv_z = (t.reshape(k_z.shape) for t in own)
        dq[:, :, z] += dq_z
        return dq, dk_z, dv_z, dk_x, dv_x, None, None


def _fold(t: Tensor, size: int) -> Tensor:
    """Blocks as further heads: [B, H, L, D] -> [B, H * L/size, size, D]."""
    return t.reshape(t.shape[0], -1, size, t.shape[3])


def _step(keys: int) -> int:
    """Rows at a time: measured, short sequences gain less from fewer pairs than more calls cost."""
    return 256 if keys >= 768 else 2 * keys


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
