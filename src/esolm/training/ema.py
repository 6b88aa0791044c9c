"""The exponential moving average (EMA) of the weights, which validation and sampling use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .parallel import local
from .tuning import trained


class Ema:
    """A float32 average of every parameter that is trained."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay {decay} is not in [0, 1): use 0.9999 for long runs, 0 for none")
        self.decay = decay
        self.shadow = {name: p.detach().float().clone() for name, p in trained(net).items()}

    @torch.no_grad()
    def update(self, net: nn.Module, step: int) -> None:
        """Update the average after step n = 1, 2, …, with decay min(decay, (1 + n) / (10 + n))."""
        decay = min(self.decay, (1 + step) / (10 + step))
        now = [local(p.detach()).float() for p in trained(net).values()]
        torch._foreach_lerp_(self._parts(), now, 1 - decay)

    @contextmanager
    def applied(self, net: nn.Module) -> Iterator[None]:
        """Use the averaged weights inside the block, and restore the network's own after it."""
        parameters = [local(p.detach()) for p in trained(net).values()]
        kept = [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, self._parts())
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, kept)

    def _parts(self) -> list[Tensor]:
        return [local(tensor) for tensor in self.shadow.values()]

    def state(self, net: nn.Module) -> dict[str, Tensor]:
        """The network's state dict with the averaged weights in place of its own."""
        return {**net.state_dict(), **self.shadow}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load averaged weights, as `state` returns them."""
        for name, tensor in self.shadow.items():
            tensor.copy_(state[name])
