"""GRPO: the clipped policy gradient with group advantages, and a KL divergence from a reference.

Shapes: B batch, L length, P prompts, G samples of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.order import Schedule
from ..core.randomness import Randomness
from ..core.terms import Term
from ..net.protocol import Forward
from .estimators import Estimator
from .options import Grpo
from .rollout import Counted

EPS = 1e-4
"""Added to the standard deviation of a group."""
LARGEST = 40.0
"""Logarithms of ratios stop here, and so do their gradients: the ratio of a whole sample may overflow, and infinity
times the zero gradient of what is clipped is NaN."""


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """Advantages [P, G] of rewards [P, G], NaN where a reward failed: such a sample has advantage 0, and the others are
    compared without it.

    normalised: over the group's standard deviation. centred: minus the mean of the others. raw: the reward.
    """
    known = rewards.isfinite()
    count = known.sum(1, keepdim=True)
    values = torch.where(known, rewards, 0.0)
    if kind == "raw":
        return values
    change = torch.where(known, values - values.sum(1, keepdim=True) / count.clamp_min(1), 0.0)
    if kind == "centred":
        return change * count / (count - 1).clamp_min(1)
    deviation = (change.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    return change / (deviation + EPS)


def shared(rewards: Tensor, texts: Sequence[str]) -> Tensor:
    """Rewards [B] of texts; equal texts have an equal share of theirs."""
    counts = Counter(texts)
    return rewards / torch.tensor([counts[text] for text in texts])


def k3(log_p: Tensor, reference: Tensor) -> Tensor:
    """Estimates KL(p || reference) of each token by one token drawn from p; its mean is exact, and it is at least 0."""
    difference = reference - log_p
    return difference.exp() - difference - 1


def surrogate(log_p: Tensor, old: Tensor, drawn: Tensor, advantage: Tensor, options: Grpo) -> tuple[Tensor, Tensor]:
    """The clipped loss of each token, [B, L], and where clipping removed its gradient, bool [B, L].

    advantage: [B]. The loss of a whole sample is spread evenly over its tokens.
    """
    change = torch.where(drawn, log_p - old, 0.0)
    high = options.clip if options.clip_high is None else options.clip_high
    if options.ratio != "token":
        change = change.sum(1, keepdim=True)
        if options.ratio == "geometric":
            change = change / drawn.sum(1, keepdim=True).clamp_min(1)
    ratio = change.clamp_max(LARGEST).exp()
    plain, clipped = ratio * advantage[:, None], ratio.clamp(1 - options.clip, 1 + high) * advantage[:, None]
    loss, cut = -torch.minimum(plain, clipped), (clipped < plain).expand_as(drawn) & drawn
    if options.ratio == "token":
        return torch.where(drawn, loss, 0.0), cut
    return torch.where(drawn, loss / drawn.sum(1, keepdim=True).clamp_min(1), 0.0), cut


@dataclass
class GrpoObjective:
    """The objective of some rollouts, sample `first` and those after it, as `training.loss.accumulate` takes one.

    `old` is filled in by the first update, whose ratios are therefore exactly 1.
    """

    options: Grpo
    estimator: Estimator
    schedule: Schedule
    advantage: Tensor  # [B]
    first: int = 0
    reference: Tensor | None = None  # log-probabilities [B, L] of the reference
    old: Tensor | None = None  # log-probabilities [B, L] of the weights that drew the samples
    sums: dict[str, float] = field(default_factory=dict)

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        """As `System.counts`."""
        number = len(scored) if self.options.per == "sequence" else int(scored.sum())
        return {"policy": number, **({} if self.reference is None else {"kl": number})}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """As `System.terms`."""
        rows = slice(rng.first - self.first, rng.first - self.first + len(batch.x))
        counted, drawn = Counted(net), batch.scored
        log_p = self.estimator(counted, batch, self.schedule.rows(rows), rng)
        if self.old is None:
            self.old = torch.full((len(self.advantage), batch.x.shape[1]), torch.nan).to(log_p)
        if self.old[rows].isnan().any():
            self.old[rows] = log_p.detach()
        loss, cut = surrogate(log_p, self.old[rows], drawn, self.advantage[rows].to(log_p), self.options)
        found = [Term("policy", loss, drawn)]
        kl = None
        if self.reference is not None:
            kl = torch.where(drawn, k3(log_p, self.reference[rows].to(log_p)), 0.0)
            found.append(Term("kl", self.options.beta * kl, drawn))
        values = {"clipped": cut, "nats": -log_p.detach(), **({} if kl is None else {"kl": kl.detach()})}
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.double().sum())
        self.sums["fed"] = self.sums.get("fed", 0.0) + counted.tokens
        return found
