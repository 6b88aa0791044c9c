"""The configurations of `esolm tune`: those of training, and the groups of an objective."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..training.config import RunConfig
from .options import Dpo, Grpo, Reward, Rollout


@dataclass(frozen=True)
class GrpoConfig(RunConfig):
    """A run of `esolm tune grpo`. A step samples batch.size texts, and makes grpo.updates updates from them."""

    data: str = ""
    """JSON lines with a `prompt`, or a `text` with blanks, and whatever the reward needs; none: rollout.prompt."""
    grpo: Grpo = field(default_factory=Grpo)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)


@dataclass(frozen=True)
class DpoConfig(RunConfig):
    """A run of `esolm tune dpo`. batch.size counts pairs."""

    data: str = ""
    """JSON lines with `chosen`, `rejected` and, if they have one, their `prompt`."""
    dpo: Dpo = field(default_factory=Dpo)
