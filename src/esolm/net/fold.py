"""The network for inference: at time zero AdaLN is constant and is folded into the norms and linear layers.

Norms and the residual stream are at least float32; matrix products, keys and values are in the given precision.

Shapes: B batch, N network input, H heads, D head width, W width, V vocabulary, R rows that get logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.terms import token_nats
from ..core.visibility import Packed, Visibility
from .adapters import without_adapters
from .attention import attend, attend_cached
from .cache import KVCache, Window
from .config import DenoiserConfig
from .denoiser import Block, Denoiser, Gate, Past, Rows, empty_cache, learned, modulate
from .head import CHUNK, NO_LATENTS, RowLoss, Scoring, VectorPass
from .rotary import Rotary, rotary_table
from .rounding import from_int4, to_int4, to_int8

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.bfloat16}
"""Precisions, and the type of products, keys and values in each."""
FEW = 20
"""Up to this number of rows, a product with int8 weights is limited by reading them."""


class PlainLinear:
    """x weight + bias, with an optional GELU; the reference for the others."""

    rounds = False  # takes weights in the type of products

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool) -> None:
        self.weight, self.bias, self.gelu = weight, bias, gelu

    def __call__(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight, self.bias)
        return F.gelu(x, approximate="tanh") if self.gelu else x


class PackedLinear:
    """Weights in oneDNN's blocked layout, with which a few rows take only the time to read the weights. PyTorch's own
    product is slower: in float32 from four rows on, in bf16 always."""

    rounds = False

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias
        self.then: tuple[Any, ...] = ("gelu", [], "tanh") if gelu else ("none", [], "")

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, *self.then)


class Int8Linear:
    """Integer weights from -127 to 127 with a scale for each output; activations in bf16."""

    rounds = True  # takes the weights as they were trained

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool) -> None:
        (self.weight, self.scale), self.bias, self.gelu = to_int8(weight), bias, gelu

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        # PyTorch's kernel reads beyond inputs that are not a multiple of its vectors, and may crash.
        if len(rows) <= FEW and not rows.is_cuda and rows.shape[1] % 32 == 0:
            out = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        else:
            out = F.linear(rows, self.weight.to(x.dtype)).mul_(self.scale)
        out = out if self.bias is None else out.add_(self.bias)
        out = F.gelu(out, approximate="tanh") if self.gelu else out
        return out.unflatten(0, x.shape[:-1])


class Int4Linear(PlainLinear):
    """Weights rounded to 4 bits with a scale for each 32 inputs; stored in bf16, since PyTorch has no product for them
    that is faster. The native library has one."""

    rounds = True

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool) -> None:
        super().__init__(from_int4(*to_int4(weight)).to(torch.bfloat16), bias, gelu)


class FoldedLinear(Protocol):
    """What the layers of a folded network are made of."""

    rounds: bool

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool) -> None: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Norm(NamedTuple):
    """LayerNorm or RMSNorm with AdaLN's scale and shift folded in."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    dtype: torch.dtype  # of the output
    rms: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        if self.rms:
            h = F.rms_norm(h.to(self.weight.dtype), h.shape[-1:], self.weight, self.eps)
            return (h if self.bias is None else h + self.bias).to(self.dtype)
        return F.layer_norm(h, h.shape[-1:], self.weight, self.bias, self.eps).to(self.dtype)


class Maker(NamedTuple):
    """Builds the layers of a folded network in one precision."""

    kind: type[FoldedLinear]
    dtype: torch.dtype  # of products, keys and values

    @property
    def stream(self) -> torch.dtype:
        """The type of the norms and the residual stream."""
        return torch.promote_types(self.dtype, torch.float32)

    def linear(
        self, linear: Any, gate: Tensor | None = None, rows: slice | None = None, gelu: bool = False
    ) -> FoldedLinear:
        """gate * (x weight + bias), or only the outputs `rows`."""
        rows, linear = rows or slice(None), without_adapters(linear)
        weight, bias = linear.weight[rows], None if linear.bias is None else linear.bias[rows]
        if gate is not None:
            weight, bias = weight * gate.flatten()[:, None], None if bias is None else bias * gate.flatten()
        bias = None if bias is None else bias.to(self.dtype, copy=True)
        return self.kind(weight if self.kind.rounds else weight.to(self.dtype, copy=True), bias, gelu)

    def norm(self, norm: nn.LayerNorm | nn.RMSNorm, shift: Tensor | None = None, scale: Tensor | None = None) -> Norm:
        """norm(h) (1 + scale) + shift."""
        weight: Tensor = norm.weight
        bias: Tensor | None = norm.bias if isinstance(norm, nn.LayerNorm) else None
        if scale is not None and shift is not None:
            factor, shift = 1 + scale.flatten(), shift.flatten()
            weight, bias = weight * factor, shift if bias is None else torch.addcmul(shift, bias, factor)
        bias = None if bias is None else bias.to(self.stream, copy=True)
        assert norm.eps is not None
        return Norm(weight.to(self.stream, copy=True), bias, norm.eps, self.dtype, isinstance(norm, nn.RMSNorm))


class FoldedBlock:
    """A block with its modulation folded into its weights. The last block projects q separately from k and v."""

    def __init__(self, block: Block, cond: Tensor | None, make: Maker, last: bool) -> None:
        shift1, scale1, gate1, shift2, scale2, gate2 = modulate(block, cond, 6)
        self.sizes, queries = block.sizes, block.sizes.queries
        self.norm1, self.norm2 = make.norm(block.norm1, shift1, scale1), make.norm(block.norm2, shift2, scale2)
        norms = block.q_norm, block.k_norm
        self.q_norm, self.k_norm = (None if norm is None else make.norm(norm) for norm in norms)
        parts = (slice(0, queries), slice(queries, None)) if last else (slice(None),)
        self.project = [make.linear(block.attn_qkv, rows=part) for part in parts]
        self.attn_out = make.linear(block.attn_out, gate1)
        self.activation = block.mlp[1] if isinstance(block.mlp[1], Gate) else None  # GELU is part of mlp_up
        self.mlp_up = make.linear(block.mlp[0], gelu=self.activation is None)
        self.mlp_down = make.linear(block.mlp[2], gate2)

    def __call__(
        self, h: Tensor, rotary: Rotary | None, visibility: Visibility | Packed, past: Past | None, rows: Rows | None
    ) -> Tensor:
        """h [B, N, W] -> [B, N, W]; with `rows`, only those rows are computed after keys and values."""
        span = slice(0, h.shape[1]) if rows is None else rows.span
        q, k, v = self.projected(self.norm1(h), rotary, rows)
        h = h if rows is None else rows.select(h)
        if past is None:
            mixed = attend(q, k, v, visibility, span)
        else:
            k, v = past.cache.extend(past.layer, k, v)
            mixed = attend_cached(q, k, v, past.seen[:, :, span])
        mixed = mixed.transpose(1, 2).flatten(2)
        if rows is not None and rows.index is not None:
            mixed = mixed.flatten(0, 1).index_select(0, rows.index)
        h = h + self.attn_out(mixed)
        up = self.mlp_up(self.norm2(h))
        return h + self.mlp_down(up if self.activation is None else self.activation(up))

    def projected(self, a: Tensor, rotary: Rotary | None, rows: Rows | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, N, D], rotated; with `rows`, only those have queries."""
        heads, kv_heads = self.sizes.heads, self.sizes.kv_heads
        if rows is None and self.q_norm is None:
            qk, v = split_heads(self.project[0](a), heads + kv_heads, kv_heads)
            q, k = turn(qk, rotary).split((heads, kv_heads), 1)
            return q, k, v
        if rows is None:
            q, k, v = split_heads(self.project[0](a), heads, kv_heads, kv_heads)
        else:
            k, v = split_heads(self.project[1](a), kv_heads, kv_heads)
            (q,) = split_heads(rows.place(self.project[0](rows.select(a)), a.shape[0]), heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return turn(q, rotary, None if rows is None else rows.span), turn(k, rotary), v


class Folded:
    """The function of the denoiser at time zero, without parameters or gradients."""

    def __init__(self, net: Denoiser, make: Maker) -> None:
        if net.config.latent_width is not None:
            raise ValueError("a network with latent_width cannot be folded: use the trained one")
        cond, last = net.condition(None), len(net.blocks) - 1
        self.config, self.stream, self.device, self.dtype = net.config, make.stream, net.device, make.dtype
        self.embed = nn.Embedding.from_pretrained(net.embed.weight.to(make.dtype, copy=True))
        self.places = None if net.places is None else net.places.weight.to(make.stream, copy=True)
        blocks = (block for block in net.blocks if isinstance(block, Block))  # a ModuleList is not typed
        self.blocks = [FoldedBlock(block, cond, make, i == last) for i, block in enumerate(blocks)]
        shift, scale = modulate(net, cond, 2)
        self.norm, self.head = make.norm(net.norm, shift, scale), make.linear(net.head)

    def __call__(
        self,
        tokens: Tensor,
        position: Tensor,
        visibility: Visibility | Packed,
        time: Tensor | None = None,
        cache: KVCache | None = None,
        out: Rows | None = None,
        score: Scoring | None = None,
    ) -> Tensor:
        """As Denoiser.forward; raises ValueError if a time is given."""
        if time is not None:
            raise ValueError("a folded network has time zero only: leave out time, or use the trained network")
        placed = None if cache is None or isinstance(visibility, Packed) else cache.place(visibility)
        bias = None if placed is None else as_bias(placed, self.dtype)
        h = self.rows(tokens, position, visibility, cache, bias, out or Rows(slice(0, tokens.shape[1])))
        return self.head(h) if score is None else self.nats(h.flatten(0, -2), score)

    def rows(
        self,
        tokens: Tensor,
        position: Tensor,
        visibility: Visibility | Packed,
        cache: KVCache | Window | None,
        bias: Tensor | None,
        rows: Rows,
    ) -> Tensor:
        """The inputs of the output layer for `rows`; with a cache, the bias [B|1, 1, N, S] is the attention mask."""
        h = self.inputs(tokens, position)
        rotary = wide_table(position, self.config, self.embed.weight.dtype) if self.places is None else None
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            past = None if cache is None or bias is None else Past(cache, i, bias)
            h = block(h, rotary, visibility, past, rows if i == last else None)
        return self.norm(h)

    def inputs(self, tokens: Tensor, position: Tensor) -> Tensor:
        """The inputs of the first block, [B, N, W]."""
        table = self.embed.weight
        h = tokens.to(table.dtype) @ table if tokens.is_floating_point() else self.embed(tokens)
        return h.to(self.stream) if self.places is None else h.to(self.stream) + learned(self.places, position)

    def nats(self, h: Tensor, score: Scoring) -> Tensor:
        """weight * -log p(target), or the nats of a `RowLoss`: h [R, W] -> [R], in chunks of rows."""
        if isinstance(score, RowLoss):
            chunks = (slice(start, start + CHUNK) for start in range(0, len(h), CHUNK))
            return torch.cat([h.new_empty(0), *(score.nats(self.head(h[rows]), rows) for rows in chunks)])
        if isinstance(score, VectorPass):
            raise ValueError(NO_LATENTS)
        parts = zip(h.split(CHUNK), score.target.split(CHUNK), strict=True)
        nats = torch.cat([token_nats(self.head(part), target, score.exclude) for part, target in parts])
        return nats if score.weight is None else nats * score.weight.to(nats.dtype)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache in the precision of the products."""
        return empty_cache(self.config, batch, capacity, self.dtype, self.device)


@torch.no_grad()
def fold(net: Denoiser, precision: str | None = None) -> Folded:
    """A copy of the network at time zero for inference, with the same call; precision None: that of the network."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    dtype = net.dtype if precision is None else PRECISIONS[precision]
    kind: type[FoldedLinear] = PackedLinear if packs(dtype, net.device) else PlainLinear
    rounded: dict[str | None, type[FoldedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}
    return Folded(net, Maker(rounded.get(precision, kind), dtype))


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch can pack weights of this type for oneDNN; in bf16 that needs AVX-512."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # These operators are private to PyTorch, and another version may not have them.
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The boolean mask as the additive bias that SDPA would build in every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def split_heads(t: Tensor, *heads: int) -> tuple[Tensor, ...]:
    """[B, N, sum of heads * D] -> [B, heads, N, D] for each number of heads."""
    return t.unflatten(-1, (sum(heads), -1)).transpose(1, 2).split(heads, 1)


def turn(t: Tensor, rotary: Rotary | None, span: slice | None = None) -> Tensor:
    """The rotary embedding of [B, H, N, D] by the tables of all slots, or of those in `span`; None leaves it."""
    if rotary is None:
        return t
    cos, sin = rotary if span is None else (part[:, :, span] for part in rotary)
    return torch.addcmul(t * cos, t.roll(t.shape[-1] // 2, -1), sin)


def wide_table(position: Tensor, config: DenoiserConfig, dtype: torch.dtype) -> Rotary:
    """cos and signed sin for both halves of a head, [B|1, 1, N, D]."""
    cos, sin = rotary_table(position, config, dtype)
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
