"""MDLM: masked diffusion with bidirectional attention (paper, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.noise import Linear, mask_by_count, mask_by_rate, scored_tokens
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.visibility import full
from ..net.conditionals import bidirectional_nats, place_nats
from ..net.denoiser import Denoiser, Rows
from ..net.head import Score
from ..sampling.loops import Chooser, any_order_plan, bidirectional
from ..sampling.request import Request, Step

SAMPLERS = {"ancestral": ("num_steps",), "first_hitting": (), "block": ("parallelism",), "order": ("order",)}
"""Samplers and the options that each takes."""


@dataclass(frozen=True)
class System:
    """alpha_t = 1 - t and the NELBO E_t[1/t sum over masked tokens of -log p(x^l | z_t)]."""

    t_min: float = 1e-3
    """Least time in training; it leaves out at most t_min times the nats of a token in a nearly clean text.
    The bound itself (not training) has no cut-off: the number of masks is drawn instead of the time."""
    mask_id: int = -1

    def __post_init__(self) -> None:
        if not 0 <= self.t_min < 1:
            raise ValueError(f"t_min is {self.t_min}; it must be at least 0 and below 1")

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum())}

    def corrupt(self, scored: Tensor, rng: Randomness, train: bool) -> tuple[Tensor, Tensor]:
        """Which tokens are masked, bool [B, L], and the weight of their nats, [B, 1]."""
        examples = rng.examples(len(scored))
        t = rng.at("time").times(examples, rng.total).to(scored.device)
        u = rng.at("mask").uniform(examples, scored.shape[1]).to(scored.device)
        if not train:
            return mask_by_count(scored, t, u)
        t = self.t_min + (1 - self.t_min) * t
        noise = Linear()
        return mask_by_rate(scored, noise.alpha(t), u), noise.weight(t)

    def terms(
        self, net: Denoiser, x: Tensor, valid: Tensor | None, given: Tensor | None, rng: Randomness, train: bool
    ) -> list[Term]:
        """The MDM term of the NELBO, one time (or number of masks) per example."""
        length = x.shape[1]
        scored = scored_tokens(x, valid, given)
        masked, weight = self.corrupt(scored, rng, train)
        z_t = torch.where(masked, self.mask_id, x)
        position = torch.arange(length, device=x.device)[None]
        rows = Rows(slice(0, length), masked.flatten().nonzero()[:, 0])
        score = Score(x[masked], self.mask_id, weight.expand_as(x)[masked])
        nats = net(z_t, position, full(length, valid, x.device), out=rows, score=score)
        return [Term("diffusion", place_nats(nats, masked, position.expand_as(x), length), scored)]

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        return any_order_plan("mdlm", SAMPLERS, request, rng, alpha_0=1.0)

    def sample(self, net: Denoiser, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """The whole sequence at every step: bidirectional attention has no cache."""
        chooser = Chooser(request.draw, rng.at("token"), self.mask_id)
        return bidirectional(net, request.x, request.valid, schedule, chooser)

    def order_nats(
        self, net: Denoiser, x: Tensor, sigma: Tensor, scored: Tensor, valid: Tensor | None = None
    ) -> Tensor:
        """Nats of the scored tokens under the order, [B, L], by one pass for each of them."""
        return bidirectional_nats(net, x, sigma, scored, self.mask_id, valid)
