"""Distillation: keep the left-to-right predictions of the initial model by a term of the loss.

Shapes: B batch, L length, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.randomness import Randomness
from ..core.terms import Term
from ..net.denoiser import Denoiser
from ..net.protocol import Forward
from ..runtime.distributed import Ranks
from ..storage.models import read_model
from ..systems import System
from . import parallel

if TYPE_CHECKING:
    from .config import RunConfig
    from .options import Compute


@dataclass(frozen=True)
class Teacher:
    """A frozen network whose left-to-right predictions are to be kept, and the weight of their term."""

    net: Denoiser
    system: System
    weight: float

    @classmethod
    def of(cls, config: RunConfig, compute: Compute, ranks: Ranks) -> Teacher | None:
        """The model that `init` names, on the device of this rank; None if the weight is 0."""
        if not config.distill.weight:
            return None
        assert config.init is not None  # see check
        net, system, _ = ranks.everywhere(lambda: read_model(str(config.init)))
        require_predictions(system, f"the model {config.init}")
        net.requires_grad_(False)
        parallel.shard(net, compute, ranks)
        return cls(net, system, config.distill.weight)

    def beside(self, system: System) -> Distilled:
        """The loss of a system with the term of this teacher."""
        return Distilled(system, self)

    def term(self, net: Forward, system: System, batch: Batch) -> Term:
        """weight * KL(teacher || network) of the next token, left to right on the text, at each scored position."""
        scored = batch.scored
        with torch.no_grad():
            kept = log_probabilities(self.system.next_logits(self.net, batch)[scored], system.mask_id)
        parallel.forget(self.net)
        found = log_probabilities(system.next_logits(net, batch)[scored], system.mask_id)
        kl = (kept.exp() * (kept - found)).sum(-1) * self.weight
        return Term("distill", kl.new_zeros(scored.shape).masked_scatter(scored, kl), scored)


@dataclass(frozen=True)
class Distilled:
    """The loss of a system, and the term of a teacher. The network is called twice."""

    system: System
    teacher: Teacher

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        """As `System.counts`."""
        return {**self.system.counts(scored, rng), "distill": int(scored.sum())}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """As `System.terms`."""
        return [*self.system.terms(net, batch, rng, train), self.teacher.term(net, self.system, batch)]


def log_probabilities(logits: Tensor, mask_id: int) -> Tensor:
    """Log probabilities [R, V] without the mask, in whose column they are 0; in float32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    column = torch.tensor([mask_id], device=logits.device)
    return wide.index_fill(-1, column, float("-inf")).log_softmax(-1).index_fill(-1, column, 0.0)


def check(config: RunConfig, system: System) -> None:
    """Raise ValueError if there is nothing to distil from, or the system has no left-to-right predictions."""
    if not config.distill.weight:
        return
    if config.init is None:
        raise ValueError("distill.weight needs the model whose predictions are to be kept: add --init MODEL")
    require_predictions(system, "the system of this run")


def require_predictions(system: System, what: str) -> None:
    """Raise ValueError unless the system has left-to-right predictions."""
    if not system.has_next_logits:
        raise ValueError(
            f"distill.weight needs left-to-right predictions, and {what}, {system.name}, has none: they need ar, or "
            "esolm with query shift; or omit distill.weight"
        )
