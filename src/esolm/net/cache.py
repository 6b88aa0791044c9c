"""Keys and values of committed tokens, owned by whoever samples.

Shapes: B batch, H heads, P capacity, N new slots, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """One preallocated buffer per layer; new slots are written behind the committed ones and kept only by `commit`."""

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch, heads, capacity, head_width)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.ranks = torch.empty(batch, capacity, dtype=torch.long, device=device)
        self.length = 0

    @property
    def rank(self) -> Tensor:
        """Ranks of the committed tokens, int [B, P]."""
        return self.ranks[:, : self.length]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, H, N, D] behind the committed slots; views of all keys and values [B, H, P+N, D]."""
        end = self.length + k.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        if end > keys.shape[2]:
            raise ValueError(f"the cache holds {keys.shape[2]} tokens, and {end} were asked for")
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, rank: Tensor) -> None:
        """Keep the first n of the new slots, with their ranks int [B|1, n]; the rest are overwritten next time."""
        end = self.length + rank.shape[1]
        self.ranks[:, self.length : end] = rank
        self.length = end
