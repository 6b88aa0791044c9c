"""attend(q, k, v, visibility): one softmax, several kernels, the same result.

The slow twin is a dense boolean mask. The shortcuts split the keys of the z half into groups that need no mask (or
none with a batch dimension), attend to each group by the flash kernel and merge the groups by their log-sum-exp.

Shapes: B batch, H heads, N queries, K keys, D head width, M slots of z, L slots of x.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..visibility import Visibility

Flash = tuple[Tensor, Tensor]

SHORT = 768
"""Below so many keys the CPU's flash kernel gains nothing from a causal pattern, and one masked call for both halves
is faster than several calls without a mask."""


def attend(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, span: slice) -> Tensor:
    """Attention of the query slots in span, q [B, H, N, D], over all slots k, v [B, H, K, D] -> [B, H, N, D]."""
    slots = visibility.rank.shape[1]
    whole = span.start == 0 and span.stop == slots
    if visibility.kind == "full":
        return F.scaled_dot_product_attention(q, k, v)
    if q.is_cuda and whole and visibility.kind != "causal":
        return _compiled_flex()(q, k, v, block_mask=visibility.flex())
    if visibility.kind == "causal" and whole:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    halves = visibility.kind in ("two_stream", "two_stream_prefix", "block")
    if halves and not q.is_cuda and (whole or span == slice(0, visibility.num_z)):
        return _halves(q, k, v, visibility)
    return dense(q, k, v, visibility, span)


def dense(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, span: slice) -> Tensor:
    """The slow twin of every shortcut."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visibility.dense(span=span))


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _halves(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """z queries by merged groups; x queries, where asked for, by their own plain pattern."""
    num_z = visibility.num_z
    (k_z, k_x), (v_z, v_x) = (t.split([num_z, t.shape[2] - num_z], 2) for t in (k, v))
    if visibility.kind != "block" and k_x.shape[2] < SHORT:
        return _OneCall.apply(q, k_z, v_z, k_x, v_x, _bias(visibility, q))
    q_z, q_x = q.split([num_z, q.shape[2] - num_z], 2)
    if visibility.kind == "block":
        mask = _block_mask(k_x.shape[2], visibility.block_size, q.device, q.dtype)
        z = _BlockStream.apply(q_z, k_z, v_z, k_x, v_x, visibility.block_size, mask)
    else:
        z = _TwoStream.apply(q_z, k_z, v_z, k_x, v_x)
    if q.shape[2] == num_z:
        return z
    if visibility.kind == "two_stream":
        x = F.scaled_dot_product_attention(q_x, k_x, v_x, is_causal=True)
    else:
        rank = visibility.rank[:, num_z:]
        x = F.scaled_dot_product_attention(q_x, k_x, v_x, attn_mask=(rank[:, None] <= rank[:, :, None])[:, None])
    # The layout that the output projection reads: one copy here and none there.
    return torch.cat([z.transpose(1, 2), x.transpose(1, 2)], 1).transpose(1, 2)


def _block_mask(length: int, block_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """x blocks strictly before z's own, as a bias [1, 1, L, L]; the first block's rows are left out of it."""
    number = torch.arange(length, device=device) // block_size
    mask = torch.zeros(length, length, dtype=dtype, device=device)
    return mask.masked_fill(number[None] >= number[:, None], float("-inf"))[None, None, block_size:]


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None) -> Flash:
    """Output [B, H, N, D] and log-sum-exp [B, H, N] of the CPU flash kernel."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Flash, causal: bool = False, mask: Tensor | None = None
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


def _bias(visibility: Visibility, q: Tensor) -> Tensor:
    """What the queries may see of x, as a bias [B|1, 1, N, L]. It is finite: a query that sees no x has a log-sum-exp
    of -1e9 there, and so no weight once its own key is merged in."""
    rank, horizon = visibility.rank[:, visibility.num_z :], visibility.horizon[:, : q.shape[2]]
    hidden = rank[:, None, None] > horizon[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -1e9)


class _OneCall(torch.autograd.Function):
    """Both halves over x in one masked call; each z slot also sees its own key."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k_z: Tensor, v_z: Tensor, k_x: Tensor, v_x: Tensor, bias: Tensor) -> Tensor:
        num_z = k_z.shape[2]
        own = (q[:, :, :num_z] * k_z).sum(-1, dtype=_wide(q)) * q.shape[-1] ** -0.5
        out, lse = _flash(q, k_x, v_x, mask=bias)
        _merge((out[:, :, :num_z], lse[:, :, :num_z]), (v_z, own))
        ctx.save_for_backward(q, k_z, v_z, k_x, v_x, bias, out, lse, own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k_z, v_z, k_x, v_x, bias, out, lse, own = ctx.saved_tensors
        z = slice(0, k_z.shape[2])
        dq, dk_x, dv_x = _flash_backward(grad, q, k_x, v_x, (out, lse), mask=bias)
        weight = (own - lse[:, :, z]).exp_().to(q.dtype)[..., None]
        score = (grad[:, :, z] * (v_z - out[:, :, z])).sum(-1, keepdim=True).mul_(weight).mul_(q.shape[-1] ** -0.5)
        dq[:, :, z] += score * k_z
        return dq, score * q[:, :, z], weight * grad[:, :, z], dk_x, dv_x, None


class _TwoStream(torch.autograd.Function):
    """z slot i sees itself and x slots 0 .. L-M+i-1: a full prefix, a shifted triangle, and one key of its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k_z: Tensor, v_z: Tensor, k_x: Tensor, v_x: Tensor) -> Tensor:
        num_z = q.shape[2]
        prefix = k_x.shape[2] - num_z
        own = (q * k_z).sum(-1, dtype=_wide(q)) * q.shape[-1] ** -0.5
        out, lse = v_z.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2), own.clone()
        if prefix:
            _merge((out, lse), _flash(q, k_x[:, :, :prefix], v_x[:, :, :prefix]))
        if num_z > 1:
            part = _flash(q[:, :, 1:], k_x[:, :, prefix:-1], v_x[:, :, prefix:-1], causal=True)
            _merge((out[:, :, 1:], lse[:, :, 1:]), part)
        ctx.save_for_backward(q, k_z, v_z, k_x, v_x, out, lse, own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k_z, v_z, k_x, v_x, out, lse, own = ctx.saved_tensors
        num_z = q.shape[2]
        prefix = k_x.shape[2] - num_z
        weight = (own - lse).exp_().to(q.dtype)[..., None]
        score = (grad * (v_z - out)).sum(-1, keepdim=True).mul_(weight).mul_(q.shape[-1] ** -0.5)
        dq, dk_z, dv_z = score * k_z, score * q, weight * grad
        dk_x, dv_x = torch.empty_like(k_x), torch.empty_like(v_x)
        dk_x[:, :, -1:], dv_x[:, :, -1:] = 0, 0  # nobody comes after the last place
        if prefix:
            part = slice(None, prefix)
            dq_p, dk_x[:, :, part], dv_x[:, :, part] = _flash_backward(
                grad, q, k_x[:, :, part], v_x[:, :, part], (out, lse)
            )
            dq += dq_p
        if num_z > 1:
            part, rest = slice(prefix, -1), slice(1, None)
            merged = (out[:, :, rest], lse[:, :, rest].contiguous())
            dq_p, dk_x[:, :, part], dv_x[:, :, part] = _flash_backward(
                grad[:, :, rest], q[:, :, rest], k_x[:, :, part], v_x[:, :, part], merged, causal=True
            )
            dq[:, :, rest] += dq_p
        return dq, dk_z, dv_z, dk_x, dv_x


class _BlockStream(torch.autograd.Function):
    """BD3-LM's z half: its own block of z, both ways, and the earlier blocks of x."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_z: Tensor, v_z: Tensor, k_x: Tensor, v_x: Tensor, size: int, mask: Tensor
    ) -> Tensor:
        own, own_lse = _flash(_fold(q, size), _fold(k_z, size), _fold(v_z, size))
        out, lse = own.reshape(q.shape).contiguous(), own_lse.reshape(q.shape[:-1]).contiguous()
        if q.shape[2] > size:
            _merge((out[:, :, size:], lse[:, :, size:]), _flash(q[:, :, size:], k_x, v_x, mask=mask))
        ctx.save_for_backward(q, k_z, v_z, k_x, v_x, out, lse, mask)
        ctx.size = size
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k_z, v_z, k_x, v_x, out, lse, mask = ctx.saved_tensors
        size, grad = ctx.size, grad.contiguous()
        merged = (_fold(out, size), lse.reshape(lse.shape[0], -1, size))
        own = _flash_backward(_fold(grad, size), _fold(q, size), _fold(k_z, size), _fold(v_z, size), merged)
        dq, dk_z, dv_z = (t.reshape(q.shape) for t in own)
        dk_x, dv_x = torch.zeros_like(k_x), torch.zeros_like(v_x)
        if q.shape[2] > size:
            tail = slice(size, None)
            merged = (out[:, :, tail].contiguous(), lse[:, :, tail].contiguous())
            dq_p, dk_x, dv_x = _flash_backward(
                grad[:, :, tail].contiguous(), q[:, :, tail], k_x, v_x, merged, mask=mask
            )
            dq = dq.contiguous()
            dq[:, :, tail] += dq_p
        return dq, dk_z, dv_z, dk_x, dv_x, None, None


def _fold(t: Tensor, size: int) -> Tensor:
    """Blocks as further heads: [B, H, L, D] -> [B, H * L/size, size, D]."""
    return t.reshape(t.shape[0], -1, size, t.shape[3])


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
