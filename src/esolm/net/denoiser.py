"""The network: a transformer whose attention pattern, positions, time and cache are arguments.

It has no notion of a mask token, objective, schedule or order.

Shapes: B batch, N network input, H heads, D head width, W width, V vocabulary, R rows that get logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..core.visibility import Packed, Visibility
from .adapters import some_outputs
from .attention import attend, mix
from .cache import KVCache, Window
from .config import DenoiserConfig
from .head import NO_LATENTS, Scoring, TiedHead, VectorPass, score_rows
from .rotary import Rotary, rotary_table, rotate

TIME_FEATURES = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that get logits: the slots of `span` in every example, or only those at `index`, flat in [B, span]."""

    span: slice
    index: Tensor | None = None  # int [R]

    def select(self, h: Tensor) -> Tensor:
        """[B, N, W] -> [B, span, W] or [R, W]."""
        h = h[:, self.span]
        return h if self.index is None else h.flatten(0, 1).index_select(0, self.index)

    def place(self, h: Tensor, batch: int) -> Tensor:
        """The inverse of select, [R, W] -> [B, span, W], with zeros in the other rows."""
        if self.index is None:
            return h
        slots = self.span.stop - self.span.start
        return h.new_zeros(batch * slots, h.shape[-1]).index_copy(0, self.index, h).unflatten(0, (batch, slots))

    def condition(self, cond: Tensor | None) -> Tensor | None:
        """The condition [B|1, 1, C] of the selected rows."""
        if cond is None or self.index is None:
            return cond
        slots = self.span.stop - self.span.start
        return cond[0] if cond.shape[0] == 1 else cond[self.index // slots, 0]


class Past(NamedTuple):
    """One layer's part of a cached pass."""

    cache: KVCache | Window
    layer: int
    seen: Tensor  # bool, or as a bias, [B|1, 1, N, S]


class Denoiser(nn.Module):
    """Logits of the selected slots, given the tokens that each slot may see."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = False  # recompute activations in the backward pass
        width, cond, latent = config.width, config.cond_width, config.latent_width
        self.embed = nn.Embedding(config.vocab_size, latent or width)
        self.up = None if latent is None else between(latent, width, width)
        self.down = None if latent is None else between(width, width, latent)
        self.places = nn.Embedding(config.length, width) if config.positions == "learned" else None
        if config.adaln:
            self.time = nn.Sequential(nn.Linear(TIME_FEATURES, cond), nn.SiLU(), nn.Linear(cond, cond))
            self.modulation = nn.Linear(cond, 2 * width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head: nn.Linear | TiedHead
        if config.tied or latent is not None:
            self.head = TiedHead(self, config.vocab_size, config.head_bias)
        else:
            self.head = nn.Linear(width, config.vocab_size, bias=config.head_bias)
        self.reset()

    def reset(self) -> None:
        """Set the initial weights. Paper: uniform ±1/sqrt(fan-in) and a zero output layer unless it is tied. GPT-2:
        normal with standard deviation 0.02, divided by sqrt(2 layers) where a block adds to the residual. In both,
        modulation is zero, and embeddings of `latent_width`, to which noise of variance 1 is added, have variance 1."""
        c = self.config
        for table in (self.embed, self.places):
            if table is not None:
                nn.init.kaiming_uniform_(table.weight, a=math.sqrt(5))
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)
        if c.init == "gpt2":
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                elif parameter.dim() == 2:
                    residual = name.endswith(("attn_out.weight", "mlp.2.weight"))
                    nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * c.layers) if residual else 0.02)
        if c.latent_width is not None:
            nn.init.normal_(self.embed.weight)
        for layer in (self, *self.blocks) if c.adaln else ():
            nn.init.zeros_(layer.modulation.weight)
            nn.init.zeros_(layer.modulation.bias)

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        visibility: Visibility | Packed,
        time: Tensor | None = None,
        cache: KVCache | None = None,
        out: Rows | None = None,
        score: Scoring | None = None,
    ) -> Tensor:
        """Logits [B, N, V], or those of the rows `out`: [B, span, V] or [R, V]; with `score`, its nats [R] instead, or
        the result of a `VectorPass`.

        tokens: int [B, N], or probabilities [B, N, V]. position: int [B|1, N], original indices. time: [B], or None for
        zero. With a cache, the new slots also see its committed tokens by their ranks.
        """
        table = self.embed.weight
        clean = tokens.to(table.dtype) @ table if tokens.is_floating_point() else self.embed(tokens)
        h = self.enter(clean, score)  # [B, N, W]
        rows = out or Rows(slice(0, h.shape[1]))
        cond = self.condition(time)
        if self.places is not None:
            h = h + learned(self.places.weight, position)
        rotary = rotary_table(position, self.config, h.dtype) if self.places is None else None
        seen = None if cache is None or isinstance(visibility, Packed) else cache.place(visibility)
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            past = None if cache is None or seen is None else Past(cache, i, seen)
            arguments = (h, cond, rotary, visibility, past, rows if i == last else None)
            if self.checkpoint_blocks and torch.is_grad_enabled():
                h = checkpoint(block, *arguments, use_reentrant=False)
            else:
                h = block(*arguments)
        shift, scale = modulate(self, rows.condition(cond), 2)
        h = modulated_norm(h, self.norm, shift, scale)
        h = h if self.down is None else self.down(h).to(table.dtype)
        if isinstance(score, VectorPass):
            assert isinstance(self.head, TiedHead), "enter raises an error without latent_width"
            return score.result(rows.select(clean).flatten(0, -2), h.flatten(0, -2), self.head)
        return self.head(h) if score is None else score_rows(self.head, h.flatten(0, -2), score)

    def enter(self, clean: Tensor, score: Scoring | None) -> Tensor:
        """The residual stream [B, N, W] from the embeddings, or from what a `VectorPass` feeds in place of them."""
        if isinstance(score, VectorPass):
            if self.up is None:
                raise ValueError(NO_LATENTS)
            clean = score.feed(clean)
        return clean if self.up is None else self.up(clean).to(clean.dtype)

    def condition(self, time: Tensor | None) -> Tensor | None:
        """AdaLN's condition, [B|1, 1, C]; None without AdaLN."""
        if not self.config.adaln:
            return None
        weight = self.embed.weight
        time = weight.new_zeros(1) if time is None else time
        half = TIME_FEATURES // 2
        wide = torch.promote_types(weight.dtype, torch.float32)
        frequency = torch.exp(-math.log(10000.0) / half * torch.arange(half, dtype=wide, device=weight.device))
        angle = time.to(wide)[:, None] * frequency
        return F.silu(self.time(torch.cat([angle.cos(), angle.sin()], -1).to(weight.dtype)))[:, None]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.embed.weight.dtype

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of this network's type, on its device."""
        return empty_cache(self.config, batch, capacity, self.dtype, self.device)


def empty_cache(c: DenoiserConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """A cache with the layers, heads and head width of a network."""
    return KVCache(c.layers, batch, c.sizes.kv_heads, capacity, c.sizes.head_width, dtype, device)


def make_norm(config: DenoiserConfig) -> nn.LayerNorm | nn.RMSNorm:
    """A norm of the residual stream."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.norm_bias)


def learned(table: Tensor, position: Tensor) -> Tensor:
    """The learned vector of each position, [B|1, N, W]; on the CPU, raises ValueError for one that has none."""
    known = position.device.type != "cpu" or torch.compiler.is_compiling() or not position.numel()
    if not known and int(position.max()) >= len(table):
        raise ValueError(
            f"position {int(position.max())} has no embedding: this network has {len(table)} positions. Use texts of "
            f"at most {len(table)} tokens, or {len(table) - 1} with shifted queries, which begin with a start token"
        )
    return F.embedding(position, table)


def between(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """The MLP between embeddings and the residual stream."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


class Gate(nn.Module):
    """SwiGLU's activation: the first half of the inputs, after SiLU, times the second."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 W] -> [..., W]."""
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value


class Block(nn.Module):
    """Attention and MLP, each after a norm that AdaLN shifts and scales, and before a gate."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        width, sizes = config.width, config.sizes
        self.sizes, self.dropout = sizes, config.dropout
        self.norm1 = make_norm(config)
        self.attn_qkv = nn.Linear(width, sizes.queries + 2 * sizes.keys, bias=config.qkv_bias)
        self.q_norm = nn.RMSNorm(sizes.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(sizes.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.attn_out = nn.Linear(sizes.queries, width, bias=config.out_bias)
        self.norm2 = make_norm(config)
        gated = config.mlp == "swiglu"
        self.mlp = nn.Sequential(
            nn.Linear(width, (1 + gated) * sizes.inner, bias=config.mlp_bias),
            Gate() if gated else nn.GELU(approximate="tanh"),
            nn.Linear(sizes.inner, width, bias=config.mlp_bias),
        )
        if config.adaln:
            self.modulation = nn.Linear(config.cond_width, 6 * width)

    def forward(
        self,
        h: Tensor,
        cond: Tensor | None,
        rotary: Rotary | None,
        visibility: Visibility | Packed,
        past: Past | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """h [B, N, W] -> [B, N, W]; with `rows`, only those rows are computed after keys and values."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulate(self, cond, 6)
        a = modulated_norm(h, self.norm1, shift1, scale1)
        a = self.attention(a, rotary, visibility, past, rows)
        if rows is not None:
            h = rows.select(h)
            _, _, gate1, shift2, scale2, gate2 = modulate(self, rows.condition(cond), 6)
        h = self.residual(h, self.attn_out(a), gate1)
        return self.residual(h, self.mlp(modulated_norm(h, self.norm2, shift2, scale2)), gate2)

    def attention(
        self, a: Tensor, rotary: Rotary | None, visibility: Visibility | Packed, past: Past | None, rows: Rows | None
    ) -> Tensor:
        """Attention output before its projection, [B, N, H D], or of the selected rows."""
        span = None if rows is None or isinstance(visibility, Packed) else rows.span
        q, k, v = (t.unflatten(-1, (-1, self.sizes.head_width)).transpose(1, 2) for t in self.project(a, rows))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            cos, sin = rotary
            q = rotate(q, cos, sin) if span is None else rotate(q, cos[:, :, span], sin[:, :, span])
            k = rotate(k, cos, sin)
        if past is None:
            mixed = attend(q, k, v, visibility, span, asked=rows is not None)
        else:
            k, v = past.cache.extend(past.layer, k, v)
            mixed = mix(q, k, v, attn_mask=past.seen if span is None else past.seen[:, :, span])
        mixed = mixed.transpose(1, 2).flatten(2)
        return mixed if rows is None or rows.index is None else mixed.flatten(0, 1).index_select(0, rows.index)

    def project(self, a: Tensor, rows: Rows | None) -> tuple[Tensor, ...]:
        """Queries [B, N, H D], or of the selected rows and zero elsewhere; keys and values [B, N, K D]."""
        queries, keys = self.sizes.queries, self.sizes.keys
        if rows is None:
            return self.attn_qkv(a).split((queries, keys, keys), -1)
        k, v = some_outputs(self.attn_qkv, a, slice(queries, None)).chunk(2, -1)
        q = some_outputs(self.attn_qkv, rows.select(a), slice(0, queries))
        return rows.place(q, a.shape[0]), k, v

    def residual(self, h: Tensor, change: Tensor, gate: Tensor | None) -> Tensor:
        """h + gate * dropout(change)."""
        change = F.dropout(change, self.dropout, self.training)
        return h + change if gate is None else torch.addcmul(h, gate, change.to(h.dtype))


def modulate(layer: Denoiser | Block, cond: Tensor | None, parts: int) -> tuple[Tensor | None, ...]:
    """AdaLN's shifts, scales and gates, in full precision (they are small); None without AdaLN."""
    if cond is None:
        return (None,) * parts
    with torch.autocast(cond.device.type, enabled=False):
        return layer.modulation(cond.to(layer.modulation.weight.dtype)).chunk(parts, -1)


def modulated_norm(h: Tensor, norm: nn.LayerNorm | nn.RMSNorm, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """norm(h) (1 + scale) + shift; a condition that all rows share is folded into the weight and bias of the norm."""
    if shift is None or scale is None:
        return norm(h)
    if shift.numel() == shift.shape[-1] and isinstance(norm, nn.LayerNorm):
        weight, bias = norm.weight * (1 + scale.flatten()), shift.flatten()
        bias = bias if norm.bias is None else torch.addcmul(bias, norm.bias, 1 + scale.flatten())
        return F.layer_norm(h, norm.normalized_shape, weight, bias, norm.eps)
    return norm(h) * (1 + scale) + shift
