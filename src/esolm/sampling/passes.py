"""Network calls that a sampling loop can leave to others, so that several loops share a pass.

A loop writes `logits = yield from call(net, …)`. With an ordinary network this is a call. With a `Deferred` one the
loop yields a `Pass` and goes on when it is sent the logits, or the tokens drawn from them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.draw import Draw
from ..core.visibility import Packed, Visibility
from ..net.cache import KVCache
from ..net.config import DenoiserConfig
from ..net.denoiser import Rows
from ..net.head import Scoring
from ..net.protocol import Network
from .request import Step


class Drawing(NamedTuple):
    """How tokens are drawn from the logits of a pass, so that the tokens of several loops can be drawn at once."""

    draw: Draw
    uniform: Callable[[int], Tensor]  # attempt -> float64 [R]
    mask_id: int


class Pass(NamedTuple):
    """The arguments of a network call that a loop waits for; see `Denoiser.forward`."""

    tokens: Tensor
    position: Tensor
    visibility: Visibility
    cache: KVCache | None
    out: Rows
    time: Tensor | None = None
    drawing: Drawing | None = None  # the loop waits for tokens, int [R], instead of logits


class Deferred:
    """A network whose passes are run by the one who drives the loop, with caches that come from there too."""

    def __init__(self, net: Network, new_cache: Callable[[int, int], KVCache]) -> None:
        self.net, self.new_cache = net, new_cache

    @property
    def config(self) -> DenoiserConfig:
        """The sizes of the network."""
        return self.net.config

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.net.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the network."""
        return self.net.dtype

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
        """The call itself, for loops that do not use `call`: it is made at once and shared with nobody."""
        return self.net(tokens, position, visibility, time, cache, out, score)


def call(
    net: Network,
    tokens: Tensor,
    position: Tensor,
    visibility: Visibility,
    out: Rows,
    cache: KVCache | None = None,
    time: Tensor | None = None,
    drawing: Drawing | None = None,
) -> Generator[Any, Tensor, Tensor]:
    """The logits of one pass. Yields a `Pass` if the network is deferred, and otherwise nothing.

    drawing: with a deferred network, the tokens drawn from the logits instead.
    """
    if isinstance(net, Deferred):
        return (yield Pass(tokens, position, visibility, cache, out, time, drawing))
    return net(tokens, position, visibility, time=time, cache=cache, out=out)


def without_start(steps: Iterator[Step]) -> Iterator[Any]:
    """The steps of texts with a start token, as those of the texts alone."""
    assert isinstance(steps, Generator)
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pass):
                step = steps.send((yield step))
                continue
            drafts = step.drafts
            if drafts is not None:
                drafts = drafts._replace(position=(drafts.position - 1).clamp_min(0))
            yield step._replace(position=(step.position - 1).clamp_min(0), drafts=drafts)
            step = next(steps)
    except StopIteration:
        return
