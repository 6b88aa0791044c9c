"""UDLM: diffusion with uniform noise in continuous time (Schiff et al. 2025).

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..core.batch import Batch
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..core.uniform import Uniform
from ..net.protocol import Forward, Network
from ..sampling.chain import chain_plan
from ..sampling.request import Request, Step
from . import System, _uniform


@dataclass(frozen=True)
class UDLM(System):
    """Tokens turn into random ones with alpha_t = 1 - (1 - eps) t, and the network predicts the clean ones.

    Noise cannot mark what is given: the network sees no difference between a given token and a noisy one. Prompts and
    infilling are therefore outside of what a model learned, unless it was trained on data with given tokens.
    """

    t_min: float = 1e-3
    """Smallest time in training and in the integral of the bound."""
    eps: float = 1e-3
    """alpha_1, the share of tokens that are still clean at t = 1."""
    bound: Literal["strict", "authors"] = "strict"
    """strict: an upper bound, with two passes. authors: the mean of the integrand over t, which omits what happens
    before t_min and is therefore a little lower; for comparisons with published tables."""
    noise_mask: bool = False
    """Whether the mask id is one of the tokens that noise draws, as in the released checkpoints."""
    mask_id: int = -1
    vocab_size: int = -1

    samplers: ClassVar = {"ancestral": ("num_steps",)}
    masks = False
    timed = True

    def __post_init__(self) -> None:
        _uniform.check(self.t_min, self.eps, self.bound)

    @property
    def noise(self) -> Uniform:
        """The states of the noise."""
        return _uniform.states(self.vocab_size, self.mask_id, self.noise_mask)

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum())}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """The NELBO, with one time per example."""
        mean = train or self.bound == "authors"
        return _uniform.nelbo(net, batch, rng, self.noise, self.eps, self.t_min, mean)

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        mean = self.bound == "authors"
        return _uniform.nelbo(net, batch, rng, self.noise, self.eps, self.t_min, mean, independent)

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        return chain_plan(self.name, self.samplers, request)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """Every step draws all positions again; the last one leaves clean tokens."""
        return _uniform.sample(net, request, schedule, rng, self.noise, self.eps, self.mask_id)
