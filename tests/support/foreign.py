"""A complete system outside the package, in one file: masked diffusion with a fixed mask rate, sampled left to right.

Every position is masked with the same probability, and each mask sees the tokens that are left. It is no good model,
but it is a whole one: `--system.name support.foreign.FixedRate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.noise import mask_by_rate
from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.core.terms import Term
from esolm.core.visibility import full
from esolm.net.conditionals import bidirectional_nats, place_nats
from esolm.net.denoiser import Rows
from esolm.net.head import Score
from esolm.net.protocol import Forward, Network
from esolm.sampling.chooser import Chooser
from esolm.sampling.loops import any_order_plan, bidirectional
from esolm.sampling.request import Request, Step
from esolm.systems import AnyOrder


@dataclass(frozen=True)
class FixedRate(AnyOrder):
    """Masks each token with probability `rate`, and learns to fill the masks in."""

    rate: float = 0.5
    """Probability that a token is masked."""
    mask_id: int = -1

    samplers: ClassVar = {"first_hitting": (), "left_to_right": ()}
    any_order = True
    order_alpha_0 = 1.0

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"masked": int(scored.sum())}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        x, scored = batch.x, batch.scored
        u = rng.at("mask").uniform(rng.examples(len(x)), x.shape[1]).to(x.device)
        masked = mask_by_rate(scored, 1 - self.rate, u)
        position = torch.arange(x.shape[1], device=x.device)[None]
        out = Rows(slice(0, x.shape[1]), masked.flatten().nonzero()[:, 0])
        score = Score(x[masked], self.mask_id, torch.full_like(x[masked], 1 / self.rate, dtype=torch.float32))
        z = torch.where(masked, self.mask_id, x)
        nats = net(z, position, full(x.shape[1], batch.valid, x.device), out=out, score=score)
        return [Term("masked", place_nats(nats, masked, position.expand_as(x), x.shape[1]), scored)]

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        return any_order_plan(self.name, self.samplers, request, rng, alpha_0=1.0)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        return bidirectional(net, request.x, request.valid, schedule, Chooser.of(request, rng, self.mask_id))

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        length = batch.x.shape[1]
        return net(batch.x, torch.arange(length)[None], full(length, batch.valid, batch.x.device))

    def order_nats(self, net: Forward, batch: Batch, sigma: Tensor) -> Tensor:
        return bidirectional_nats(net, batch.x, sigma, batch.scored, self.mask_id, batch.valid)
