"""Slow twins: the same results, computed as the authors' published code computes them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.visibility import Visibility
from ..net.cache import KVCache
from ..net.denoiser import Block, Denoiser, Rows, rotary_table


class Naive:
    """A cached pass, operation by operation as `forward_sample` of the authors' repository does it: AdaLN in every
    step, norms apart from their weights, a mask in every layer, scores, softmax and values one after the other, logits
    of all slots, and the cache as [B, L, H, D]. As there, rotary tables are made once for a sample."""

    def __init__(self, net: Denoiser) -> None:
        self.net, self.config, self.embed = net, net.config, net.embed

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache whose slots hold all heads side by side."""
        cache = self.net.new_cache(batch, capacity)
        for buffers in (cache.keys, cache.values):
            buffers[:] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in buffers]
        table = rotary_table(torch.arange(capacity)[None], self.config, self.embed.weight.dtype)
        self.cos, self.sin = (t[0, 0].to(self.embed.weight.dtype) for t in table)  # [L, D/2]
        return cache

    def __call__(
        self, tokens: Tensor, position: Tensor, visibility: Visibility, *, cache: KVCache, out: Rows, **rest: Any
    ) -> Tensor:
        h = self.embed(tokens)
        cond = self.net.condition(torch.zeros(len(tokens)))
        assert cond is not None, "the twin is of a network with AdaLN"
        rotary = self.cos[position], self.sin[position]  # [B, N, D/2]
        cache.place(visibility)  # the cache's own count of slots, which the caller commits
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
        q, k, v = (t.squeeze(2) for t in qkv.unflatten(-1, (3, block.heads, -1)).contiguous().chunk(3, 2))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, *rotary), rotate(k, *rotary), v))  # [B, H, N, D]
        k, v = cache.extend(layer, k, v)
        new = h.shape[1]
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores[..., -new:] += -1e6 * torch.ones(new, new).triu(1)[None, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        h = h + gate1 * block.attn_out(mixed)
        return h + gate2 * block.mlp(norm(h, block.norm2) * (1 + scale2) + shift2)


def norm(h: Tensor, layer: nn.LayerNorm) -> Tensor:
    """The layer norm, and then its weight."""
    return F.layer_norm(h, layer.normalized_shape, eps=layer.eps) * layer.weight


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of [B, N, H, D] by tables [B, N, D/2], which every layer repeats for both halves."""
    cos, sin = (x.repeat(1, 1, 2)[:, :, None] for x in (cos, sin))
    a, b = t.chunk(2, -1)
    turned = t * cos + torch.cat([-b, a], -1) * sin
    return torch.cat([turned, t[..., turned.shape[-1] :]], -1)


def multinomial(logits: Tensor, mask_id: int) -> Tensor:
    """Tokens [R] from logits [R, V] by softmax and torch.multinomial."""
    logits = logits.index_fill(-1, torch.tensor([mask_id]), float("-inf"))
    return torch.multinomial(logits.float().softmax(-1), 1)[:, 0]


def sorted_nucleus(logits: Tensor, mask_id: int, top_p: float) -> Tensor:
    """Tokens [R] of the nucleus by a sort of the vocabulary."""
    logits = logits.index_fill(-1, torch.tensor([mask_id]), float("-inf"))
    p, token = logits.float().softmax(-1).sort(-1, descending=True)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    return token.gather(1, torch.multinomial(p, 1))[:, 0]
