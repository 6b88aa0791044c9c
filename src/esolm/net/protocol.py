"""What every network has in common, however it is stored or run."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..core.visibility import Packed, Visibility
from .cache import KVCache
from .denoiser import Denoiser, DenoiserConfig, Rows
from .head import Scoring


class Forward(Protocol):
    """The call of a network, which losses and likelihoods need; DDP and compiled networks have it too."""

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
        """Logits, or the nats of `score`; see `Denoiser.forward`."""
        ...


class Network(Forward, Protocol):
    """A function from tokens to logits with an optional KV cache: trained, folded, or replayed as a CUDA graph."""

    @property
    def config(self) -> DenoiserConfig:
        """The sizes of the network."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of matrix products, keys and values."""
        ...

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of this network's type, on its device."""
        ...


def trainable(net: Network) -> Denoiser:
    """The network with its parameters; raises ValueError for one that was prepared for inference."""
    if not isinstance(net, Denoiser):
        raise ValueError(f"{type(net).__name__} has no parameters: load the model without a precision")
    return net
