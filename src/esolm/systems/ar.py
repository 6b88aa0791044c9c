"""Left to right: the token at a position is predicted from the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.noise import scored_tokens
from ..core.order import Schedule, ancestral
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.visibility import causal
from ..net.conditionals import place_nats
from ..net.denoiser import Denoiser, Rows
from ..net.head import Score
from ..sampling.loops import Chooser, left_to_right
from ..sampling.request import Request, Step

SAMPLERS: dict[str, tuple[str, ...]] = {"left_to_right": ()}
"""Samplers and the options that each takes."""


@dataclass(frozen=True)
class System:
    """The autoregressive baseline. All L tokens are scored: the first is predicted from a token set before it."""

    first: Literal["mask", "bos"] = "mask"
    """What stands before the first token."""
    mask_id: int = -1
    bos_id: int | None = None

    def __post_init__(self) -> None:
        if self.first not in ("mask", "bos"):
            raise ValueError(f"first is {self.first!r}; it must be 'mask' or 'bos'")

    @property
    def start_id(self) -> int:
        """The token before the first."""
        if self.first == "mask":
            return self.mask_id
        if self.bos_id is None:
            raise ValueError("first is 'bos', and the tokenizer has no beginning-of-sequence token: use first 'mask'")
        return self.bos_id

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"nll": int(scored.sum())}

    def terms(
        self, net: Denoiser, x: Tensor, valid: Tensor | None, given: Tensor | None, rng: Randomness, train: bool
    ) -> list[Term]:
        """-log p(x^l | x^<l) for every l."""
        batch, length = x.shape
        scored = scored_tokens(x, valid, given)
        position = torch.arange(length, device=x.device)[None]
        target, wanted = x, scored
        if valid is not None:  # padding goes last, where the causal pattern never sees it
            position = (~valid).long().argsort(stable=True)
            target, wanted = x.gather(1, position), scored.gather(1, position)
        before = torch.cat([x.new_full((batch, 1), self.start_id), target[:, :-1]], 1)
        every = valid is None and given is None
        rows = Rows(slice(0, length), None if every else wanted.flatten().nonzero()[:, 0])
        nats = net(before, position, causal(length, x.device), out=rows, score=Score(target[wanted], self.mask_id))
        return [Term("nll", place_nats(nats, wanted, position.expand_as(x), length), scored)]

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        request.check("ar", SAMPLERS, request.sampler or "left_to_right")
        prompt = request.given.long().cumprod(1).sum(1)
        if not (request.given & request.valid).sum(1).equal(prompt):
            raise ValueError("ar goes left to right: given tokens must stand at the beginning. Use an any-order system")
        if request.given_order != "ascending":
            raise ValueError(f"given_order is {request.given_order!r}; ar reads from left to right: leave it out")
        return ancestral(request.given, request.valid, rng, 0.0, None)

    def sample(self, net: Denoiser, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """One token a pass, with a cache."""
        lengths = request.valid.sum(1)
        chooser = Chooser(request.draw, rng.at("token"), self.mask_id)
        return left_to_right(net, request.x, lengths, schedule.given, chooser, self.start_id)
