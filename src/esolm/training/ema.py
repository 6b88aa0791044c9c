"""The moving average of the weights that validation and sampling use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .parallel import local


class Ema:
    """A float32 shadow of every parameter, moved towards it after each step."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay {decay} is not in [0, 1): use 0.9999 for long runs, 0 for none")
        self.decay = decay
        self.shadow = {name: p.detach().float().clone() for name, p in net.named_parameters()}

    @torch.no_grad()
    def update(self, net: nn.Module, step: int) -> None:
        """Move the shadow after step 1, 2, …; early steps forget faster: decay min(decay, (1 + n) / (10 + n))."""
        decay = min(self.decay, (1 + step) / (10 + step))
        now = [local(p.detach()).float() for p in net.parameters()]
        torch._foreach_lerp_(self._parts(), now, 1 - decay)

    @contextmanager
    def applied(self, net: nn.Module) -> Iterator[None]:
        """The network carries the averaged weights inside the block and its own again after it."""
        parameters = [local(p.detach()) for p in net.parameters()]
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
        """Take the averaged weights from what `state` gave."""
        for name, tensor in self.shadow.items():
            tensor.copy_(state[name])
