"""Slow reference implementations: the same results, computed as in the authors' published code."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.visibility import Visibility
from ..net.cache import KVCache
from ..net.denoiser import Block, Denoiser, Rows
from ..net.rotary import rotary_table


class Naive:
    """A cached pass with the operations of `forward_sample` in the authors' repository.

    AdaLN runs in every step, norms are separate from their weights, every layer builds a mask, attention is unfused,
    logits are computed for all slots, and the cache is [B, L, H, D]. Rotary tables are computed once per sample.
    """

    def __init__(self, net: Denoiser) -> None:
        self.net, self.config, self.embed = net, net.config, net.embed
        self.device, self.dtype = net.device, net.dtype

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return a cache whose memory layout is [B, L, H, D]."""
        cache = self.net.new_cache(batch, capacity)
        for buffers in (cache.keys, cache.values):
            buffers[:] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in buffers]
        table = rotary_table(torch.arange(capacity)[None], self.config, self.dtype)
        self.cos, self.sin = (t[0, 0].to(self.dtype) for t in table)  # [L, D/2]
        return cache

    def __call__(
        self, tokens: Tensor, position: Tensor, visibility: Visibility, *, cache: KVCache, out: Rows, **rest: Any
    ) -> Tensor:
        h = self.embed(tokens)
        cond = self.net.condition(torch.zeros(len(tokens)))
        assert cond is not None, "the network must have AdaLN"
        rotary = self.cos[position], self.sin[position]  # [B, N, D/2]
        cache.place(visibility)  # counts the new slots, which the caller commits
        for i, block in enumerate(self.net.blocks):
            h = self.block(cast(Block, block), h, cond, rotary, cache, i)
        shift, scale = self.net.modulation(cond).chunk(2, -1)
        return out.select(self.net.head(norm(h, self.net.norm) * (1 + scale) + shift))

    def block(
        self, block: Block, h: Tensor, cond: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache, layer: int
    ) -> Tensor:
        """h [B, N, W] -> [B, N, W]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(cond).chunk(6, -1)
        qkv = block.attn_qkv(norm(h, block.norm1) * (1 + scale1) + shift1)
        q, k, v = (t.squeeze(2) for t in qkv.unflatten(-1, (3, block.sizes.heads, -1)).contiguous().chunk(3, 2))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, *rotary), rotate(k, *rotary), v))  # [B, H, N, D]
        k, v = cache.extend(layer, k, v)
        new = h.shape[1]
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores[..., -new:] += -1e6 * torch.ones(new, new).triu(1)[None, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        h = h + gate1 * block.attn_out(mixed)
        return h + gate2 * block.mlp(norm(h, block.norm2) * (1 + scale2) + shift2)


def norm(h: Tensor, layer: Any) -> Tensor:
    """Layer norm, then multiplication by its weight."""
    return F.layer_norm(h, layer.normalized_shape, eps=layer.eps) * layer.weight


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, N, H, D] with tables [B, N, D/2], repeated for both halves in every layer."""
    cos, sin = (x.repeat(1, 1, 2)[:, :, None] for x in (cos, sin))
    a, b = t.chunk(2, -1)
    turned = t * cos + torch.cat([-b, a], -1) * sin
    return torch.cat([turned, t[..., turned.shape[-1] :]], -1)


def multinomial(logits: Tensor, mask_id: int) -> Tensor:
    """Draw tokens [R] from logits [R, V] by softmax and torch.multinomial."""
    logits = logits.index_fill(-1, torch.tensor([mask_id]), float("-inf"))
    return torch.multinomial(logits.float().softmax(-1), 1)[:, 0]


def sorted_nucleus(logits: Tensor, mask_id: int, top_p: float) -> Tensor:
    """Draw tokens [R] from the nucleus by sorting the vocabulary."""
    logits = logits.index_fill(-1, torch.tensor([mask_id]), float("-inf"))
    p, token = logits.float().softmax(-1).sort(-1, descending=True)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    return token.gather(1, torch.multinomial(p, 1))[:, 0]
