"""Log-likelihoods of samples: exact given their schedule, and the estimates that others use.

Shapes: B batch, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..net.protocol import Forward
from ..systems import System
from .options import Grpo, Rollout


@dataclass(frozen=True)
class Estimator:
    """A log-likelihood of samples, as a sum over their tokens."""

    system: System
    kind: str = "exact"
    segments: int = 8
    draws: int = 4
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.kind == "elbo" and self.temperature != 1:
            raise ValueError(f"temperature is {self.temperature}: the estimator elbo has none, use 1 or exact")

    @classmethod
    def of(cls, options: Grpo, system: System, rollout: Rollout) -> Estimator:
        """The estimator that the options name, of samples as rollouts draw them: the elbo has their alpha_0 too."""
        if options.estimator == "elbo" and rollout.alpha_0 is not None:
            system = system.with_alpha_0(rollout.alpha_0)
        return cls(system, options.estimator, options.segments, options.draws, rollout.temperature)

    def __call__(self, net: Forward, batch: Batch, schedule: Schedule, rng: Randomness) -> Tensor:
        """The log-probability of each drawn token, zero elsewhere, [B, L]. Differentiable.

        exact: as the sampler drew it. onepass and stepmerge: as it would be drawn if the schedule had one step, or
        `segments`. elbo: each token's part of the bound, the mean of `draws`; schedule is not used.
        """
        if self.kind == "elbo":
            return torch.stack([-self._bound(net, batch, rng.at("elbo", n)) for n in range(self.draws)]).mean(0)
        most = {"onepass": 1, "stepmerge": self.segments}.get(self.kind)
        if most is not None:
            schedule = schedule.merged(most)
        return -self.system.schedule_nats(net, batch.x, schedule, self.temperature)

    def _bound(self, net: Forward, batch: Batch, rng: Randomness) -> Tensor:
        terms = self.system.bound_over_times(net, batch.trimmed(), rng, independent=False)
        return torch.stack([term.nats for term in terms]).sum(0)
