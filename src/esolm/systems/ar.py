"""AR: left to right; each token is predicted from the token before it.

Shapes: B batch, L length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core import order
from ..core.batch import Batch
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.visibility import causal
from ..net.conditionals import next_logits, place_nats
from ..net.denoiser import Rows
from ..net.head import Score, tempered
from ..net.packed import Call, NatsCall, unpadded
from ..net.protocol import Forward, Network
from ..sampling.chooser import Chooser
from ..sampling.loops import left_to_right
from ..sampling.request import Request, Step
from . import AnyOrder


@dataclass(frozen=True)
class AR(AnyOrder):
    """The autoregressive baseline. All L tokens are scored; the first is predicted from a fixed start token."""

    first: Literal["mask", "bos"] = "mask"
    """The token before the first one."""
    mask_id: int = -1
    bos_id: int | None = None

    samplers: ClassVar = {"left_to_right": ()}
    exact = True
    has_next_logits = True
    any_order = True
    order_alpha_0 = 0.0

    def __post_init__(self) -> None:
        if self.first not in ("mask", "bos"):
            raise ValueError(f"first is {self.first!r}; it must be 'mask' or 'bos'")

    @property
    def start_id(self) -> int:
        """The id of the token before the first one."""
        if self.first == "mask":
            return self.mask_id
        if self.bos_id is None:
            raise ValueError("first is 'bos', and the tokenizer has no beginning-of-sequence token: use first 'mask'")
        return self.bos_id

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"nll": int(scored.sum())}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """-log p(x^l | x^<l) for every l. Rows of different lengths are packed into one pass without padding."""
        return [Term("nll", unpadded(net, batch, lambda rows, part: self._pending(part)), batch.scored)]

    def _pending(self, batch: Batch) -> NatsCall:
        x, valid, given = batch
        rows, length = x.shape
        scored = batch.scored
        position = torch.arange(length, device=x.device)[None]
        target, wanted = x, scored
        if valid is not None:  # padding goes last, where the causal pattern never sees it
            position = (~valid).long().argsort(stable=True)
            target, wanted = x.gather(1, position), scored.gather(1, position)
        before = torch.cat([x.new_full((rows, 1), self.start_id), target[:, :-1]], 1)
        every = valid is None and given is None
        out = Rows(slice(0, length), None if every else wanted.flatten().nonzero()[:, 0])
        call = Call(before, position, causal(length, x.device), out, Score(target[wanted], self.mask_id))
        return NatsCall(call, functools.partial(place_nats, rows=wanted, position=position.expand_as(x), length=length))

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        request.choose_sampler(self.name, self.samplers, "left_to_right")
        prompt = request.given.long().cumprod(1).sum(1)
        if not (request.given & request.valid).sum(1).equal(prompt):
            raise ValueError(
                "ar is left to right: given tokens must come first. To infill, make an any-order model of this one: "
                "esolm adapt"
            )
        if request.options.given_order != "ascending":
            raise ValueError(f"given_order is {request.options.given_order!r}; ar has no order to choose: leave it out")
        return order.ancestral(request.given, request.valid, rng, 0.0, None)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """One token a pass, with a cache."""
        choose = Chooser.of(request, rng, self.mask_id)
        return left_to_right(net, request.x, request.valid.sum(1), schedule.given, choose, self.start_id)

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        if sigma is not None:
            raise ValueError("sigma is an order of positions, and ar has none to choose: leave it out")
        return next_logits(net, batch, self.start_id)

    def next_logits(self, net: Forward, batch: Batch) -> Tensor:
        return self.logits(net, batch)

    def order_nats(self, net: Forward, batch: Batch, sigma: Tensor) -> Tensor:
        """The nats from left to right, whatever sigma is."""
        if batch.given is not None and (batch.given & (batch.scored.cumsum(1) > 0)).any():
            raise ValueError("ar is left to right: context must come before the target. Use an any-order system")
        (term,) = self.terms(net, batch, Randomness(0), False)
        return term.nats

    def schedule_nats(self, net: Forward, x: Tensor, schedule: Schedule, temperature: float = 1.0) -> Tensor:
        """The nats from left to right."""
        scored = schedule.step_of().to(x.device) >= 0
        before = torch.cat([x.new_full((len(x), 1), self.start_id), x[:, :-1]], 1)
        position = torch.arange(x.shape[1], device=x.device)[None]
        out = Rows(slice(0, x.shape[1]), scored.flatten().nonzero()[:, 0])
        score = tempered(x[scored], self.mask_id, temperature)
        nats = net(before, position, causal(x.shape[1], x.device), out=out, score=score)
        return place_nats(nats, scored, position.expand_as(x), x.shape[1])
