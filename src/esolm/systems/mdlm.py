"""MDLM: masked diffusion with bidirectional attention (paper, section 2.2).

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.float64 import to_device
from ..core.noise import LinearSchedule, mask_by_count, mask_by_rate
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.visibility import full
from ..net.conditionals import bidirectional_nats, bidirectional_schedule_nats, place_nats
from ..net.denoiser import Rows
from ..net.head import Score
from ..net.protocol import Forward, Network
from ..sampling import confidence
from ..sampling.approximate import passes_of
from ..sampling.chooser import Chooser
from ..sampling.loops import any_order_plan, bidirectional
from ..sampling.request import Request, Step
from . import AnyOrder


@dataclass(frozen=True)
class MDLM(AnyOrder):
    """alpha_t = 1 - t and the NELBO E_t[1/t sum over masked tokens of -log p(x^l | z_t)]."""

    weights: Literal["elbo", "unit"] = "elbo"
    """Weights of the nats of masked tokens in training: the NELBO's 1/t, or 1. The bound always has the NELBO's."""
    t_min: float = 1e-3
    """Smallest time in training with the NELBO's weights; the cut-off omits at most t_min times the nats of a token in
    a nearly clean text. The bound itself has no cut-off: it draws the number of masks instead of the time."""
    mask_id: int = -1

    samplers: ClassVar = {
        "ancestral": ("num_steps",),
        "first_hitting": (),
        "block": ("parallelism",),
        "order": ("order",),
        "confidence": ("num_steps", "confidence", "block_length", "cache", "refresh", "freeze"),
        "threshold": ("tau", "confidence", "block_length", "cache", "refresh", "freeze"),
    }
    any_order = True
    order_alpha_0 = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.t_min < 1:
            raise ValueError(f"t_min is {self.t_min}; it must be at least 0 and below 1")
        if self.weights not in ("elbo", "unit"):
            raise ValueError(f"weights is {self.weights!r}; it must be elbo or unit")

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum())}

    def corrupt(self, scored: Tensor, rng: Randomness, train: bool) -> tuple[Tensor, Tensor]:
        """Which tokens are masked, bool [B, L], and the weight of their nats, [B, 1]."""
        examples = rng.examples(len(scored))
        t = to_device(rng.at("time").times(examples, rng.total), scored.device)
        u = to_device(rng.at("mask").uniform(examples, scored.shape[1]), scored.device)
        if not train:
            return mask_by_count(scored, t, u)
        unit, noise = self.weights == "unit", LinearSchedule()
        t = t if unit else self.t_min + (1 - self.t_min) * t
        return mask_by_rate(scored, noise.alpha(t), u), torch.ones_like(t) if unit else noise.weight(t)

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """The MDM term of the NELBO, with one time (or number of masks) per example."""
        x, valid, _ = batch
        length = x.shape[1]
        scored = batch.scored
        masked, weight = self.corrupt(scored, rng, train)
        z_t = torch.where(masked, self.mask_id, x)
        position = torch.arange(length, device=x.device)[None]
        rows = Rows(slice(0, length), masked.flatten().nonzero()[:, 0])
        score = Score(x[masked], self.mask_id, weight.expand_as(x)[masked])
        nats = net(z_t, position, full(length, valid, x.device), out=rows, score=score)
        return [Term("diffusion", place_nats(nats, masked, position.expand_as(x), length), scored)]

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        if request.options.sampler in confidence.SAMPLERS:
            return confidence.plan(self.name, self.samplers, request, rng)
        return any_order_plan(self.name, self.samplers, request, rng, alpha_0=1.0)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Every step runs the whole sequence, unless an approximate cache is requested: attention is bidirectional."""
        choose, options = Chooser.of(request, rng, self.mask_id), request.options
        if options.sampler in confidence.SAMPLERS:
            passes = passes_of(net, request.valid, options)
            rule = confidence.Rule.of(options)
            return confidence.unmask(passes, request.x, schedule, choose, rule, options.block_length)
        return bidirectional(net, request.x, request.valid, schedule, choose)

    def logits(self, net: Forward, batch: Batch, sigma: Tensor | None = None) -> Tensor:
        if sigma is not None:
            raise ValueError("sigma is an order of positions, and mdlm sees all of them at once: leave it out")
        length = batch.x.shape[1]
        position = torch.arange(length, device=batch.x.device)[None]
        return net(batch.x, position, full(length, batch.valid, batch.x.device))

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        return dataclasses.replace(self, t_min=0.0, weights="elbo").terms(net, batch, rng, train=independent)

    def order_nats(self, net: Forward, batch: Batch, sigma: Tensor) -> Tensor:
        """One pass for each scored token."""
        return bidirectional_nats(net, batch.x, sigma, batch.scored, self.mask_id, batch.valid)

    def schedule_nats(self, net: Forward, x: Tensor, schedule: Schedule, temperature: float = 1.0) -> Tensor:
        """One row of the pass for each step of each text."""
        return bidirectional_schedule_nats(net, x, schedule, self.mask_id, temperature)
