"""A network for inference that is fed the time, which changes its norms and gates from call to call."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..core.visibility import Packed, Visibility
from .cache import KVCache
from .denoiser import Denoiser, Rows, empty_cache
from .head import NO_LATENTS, Scoring


class Conditioned:
    """A read-only copy of a denoiser with matrix products in bf16 or float32; norms and sums are in float32."""

    def __init__(self, net: Denoiser, dtype: torch.dtype) -> None:
        self.net, self.config, self.dtype = copy.deepcopy(net).float().eval().requires_grad_(False), net.config, dtype

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.net.device

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache in the precision of the products."""
        return empty_cache(self.config, batch, capacity, self.dtype, self.device)

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
        """As Denoiser.forward."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.net(tokens, position, visibility, time, cache, out, score)


def embedder(net: object) -> Denoiser:
    """The network whose embedding and output layer a network uses; raises ValueError for one without latent_width."""
    inner = net.net if isinstance(net, Conditioned) else net
    if not isinstance(inner, Denoiser) or inner.config.latent_width is None:
        raise ValueError(NO_LATENTS)
    return inner


def conditioned(net: Denoiser, precision: str) -> Conditioned:
    """A copy of the network for calls with a time; raises ValueError for a precision that rounds the weights."""
    kinds = {"float32": torch.float32, "bf16": torch.bfloat16}
    if precision not in kinds:
        raise ValueError(f"precision is {precision!r}; a network that is fed the time runs in {' or '.join(kinds)}")
    return Conditioned(net, kinds[precision])
