"""Slow twins: the same results, computed as the authors' published code computes them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..net.cache import KVCache
from ..net.denoiser import Block, Denoiser, Rows, rotary_table, rotate
from ..visibility import Visibility


class Naive:
    """A cached pass with AdaLN in every step, masks in every layer, logits of all slots, and keys as [B, L, H, D]."""

    def __init__(self, net: Denoiser) -> None:
        self.net, self.config, self.embed = net, net.config, net.embed

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache whose slots hold all heads side by side."""
        cache = self.net.new_cache(batch, capacity)
        for buffers in (cache.keys, cache.values):
            buffers[:] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in buffers]
        return cache

    def __call__(
        self, tokens: Tensor, position: Tensor, visibility: Visibility, *, cache: KVCache, out: Rows, **rest: Any
    ) -> Tensor:
        h = self.embed(tokens)
        cond = self.net.condition(None)
        assert cond is not None, "the twin is of a network with AdaLN"
        rotary = rotary_table(position, self.config, h.dtype)
        for i, block in enumerate(self.net.blocks):
            h = self.block(cast(Block, block), h, cond, rotary, visibility, cache, i)
        shift, scale = self.net.modulation(cond).chunk(2, -1)
        return out.select(self.net.head(self.net.norm(h) * (1 + scale) + shift))

    def block(
        self,
        block: Block,
        h: Tensor,
        cond: Tensor,
        rotary: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: KVCache,
        layer: int,
    ) -> Tensor:
        """h [B, N, W] -> [B, N, W]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(cond).chunk(6, -1)
        qkv = block.attn_qkv(block.norm1(h) * (1 + scale1) + shift1)
        q, k, v = (t.unflatten(-1, (block.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
        seen = cache.place(visibility)
        k, v = cache.extend(layer, rotate(k, *rotary), v)
        mixed = F.scaled_dot_product_attention(rotate(q, *rotary), k, v, attn_mask=seen)
        h = h + gate1 * block.attn_out(mixed.transpose(1, 2).flatten(2))
        return h + gate2 * block.mlp(block.norm2(h) * (1 + scale2) + shift2)


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
