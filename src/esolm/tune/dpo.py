"""DPO: prefer one answer to another, by log-likelihoods given an order that both answers share.

Shapes: B pairs, L length, K orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.batch import Batch
from ..core.randomness import Randomness
from ..core.terms import Term
from ..likelihood.orders import draw_orders, padded
from ..metrics.samples import read_records
from ..model import LanguageModel
from ..net.protocol import Forward
from ..systems import System, as_any_order
from ..training import parallel
from .options import Dpo
from .reference import Reference
from .session import shuffled

_ROWS = "give JSON lines with `chosen` and `rejected`, and a `prompt` if they have one"


class Pair(NamedTuple):
    """Token ids of a prompt and of two answers, each with its EOS."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def read_pairs(path: str, lm: LanguageModel) -> list[Pair]:
    """The pairs of a file; raises ValueError, naming the line, for one that is none or too long."""
    text, length, found = lm.tokenizer, lm.net.config.length, []
    end = [] if text.eos_id is None else [text.eos_id]
    for number, row in read_records(Path(path), _ROWS).items():
        words = [row.get("prompt", ""), row.get("chosen"), row.get("rejected")]
        if not all(isinstance(word, str) for word in words) or not (words[1] and words[2]):
            raise ValueError(f"line {number} of {path} lacks `chosen` or `rejected`, or one is empty: {_ROWS}")
        prompt = text.encode(words[0]) if words[0] else []
        encode = text.encode_after if prompt else text.encode
        pair = Pair(prompt, *([*encode(word), *end] for word in words[1:]))
        if (longest := len(prompt) + max(len(pair.chosen), len(pair.rejected))) > length:
            raise ValueError(f"line {number} of {path} has {longest} tokens; the model was trained on {length}: cut it")
        found.append(pair)
    return found


@dataclass(frozen=True)
class PairBatches:
    """Batches of pairs: the rows of the chosen answers, then those of the rejected ones, [2 B, L]."""

    pairs: Sequence[Pair]
    size: int
    seed: int | None = None  # None: in the order of the file, once

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """The pairs first .. first + count of the step's batch."""
        count = self.size - first if count is None else count
        start = step * self.size + first
        if self.seed is None:
            numbers = list(range(start, min(start + count, len(self.pairs))))
        else:
            numbers = shuffled(start, count, len(self.pairs), self.seed)
        some = [self.pairs[i] for i in numbers]
        answers = [(pair.prompt, pair.chosen) for pair in some] + [(pair.prompt, pair.rejected) for pair in some]
        x, valid = padded([prompt + answer for prompt, answer in answers])
        lengths = torch.tensor([len(prompt) for prompt, _ in answers])
        return Batch(x, valid, torch.arange(x.shape[1]) < lengths[:, None])

    def __len__(self) -> int:
        return -(-len(self.pairs) // self.size)


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (chosen - rejected)), [B], of log p(answer) - log p_reference(answer)."""
    return -F.logsigmoid(beta * (chosen - rejected))


@dataclass
class DpoObjective:
    """The loss of pairs, as `training.loss.accumulate` takes one."""

    options: Dpo
    system: System
    reference: Reference
    sums: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.options.alpha_0 is not None:
            self.system = self.system.with_alpha_0(self.options.alpha_0)
        if self.options.estimator == "exact":
            as_any_order(self.system)

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        """As `System.counts`: the number of pairs."""
        return {"dpo": len(scored) // 2}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """As `System.terms`; in validation also the share of right pairs and the mean margin."""
        # The reference first: with LoRA and FSDP it is the sharded network itself, which may not run between the two
        # passes of a step.
        with torch.no_grad(), self.reference.active() as reference:
            before = self.log_p(reference, batch, rng)
        parallel.forget(self.reference.net)
        change = self.log_p(net, batch, rng) - before
        chosen, rejected = change.chunk(2)
        margin = (self.options.beta * (chosen - rejected)).detach()
        values: dict[str, Any] = {"accuracy": (margin > 0), "margin": margin, "chosen": chosen, "rejected": rejected}
        for name, value in (*values.items(), ("pairs", torch.ones_like(margin))):
            self.sums[name] = self.sums.get(name, 0.0) + float(value.detach().double().sum())
        loss = dpo_loss(chosen, rejected, self.options.beta)[:, None]
        every = torch.ones_like(loss, dtype=torch.bool)
        found = [Term("dpo", loss, every)]
        if not train:
            found += [Term(name, values[name][:, None].to(loss), every) for name in ("accuracy", "margin")]
        return found

    def log_p(self, net: Forward, batch: Batch, rng: Randomness) -> Tensor:
        """The log-likelihoods [2 B] of the answers given their prompts, averaged over the orders or masks.

        Uniform numbers belong to a pair and a position: with `common`, both answers take the same.
        """
        numbers, half = range(self.options.orders), len(batch.x) // 2
        sides = [batch.rows(torch.arange(half)), batch.rows(torch.arange(half, 2 * half))]
        streams = [rng, rng if self.options.common else rng.at("rejected")]
        if self.options.estimator == "exact":
            system = as_any_order(self.system)
            alpha_0 = system.order_alpha_0
            sigma = [draw_orders(side, alpha_0, own, k, False) for k in numbers for side, own in zip(sides, streams)]
            nats = system.order_nats(net, batch.repeat(len(numbers)), torch.cat(sigma))
            return -nats.sum(1).view(len(numbers), -1).mean(0)
        found = [self._bound(net, side, own.at("elbo", k)) for k in numbers for side, own in zip(sides, streams)]
        return -torch.cat(found).view(len(numbers), -1).mean(0)

    def _bound(self, net: Forward, batch: Batch, rng: Randomness) -> Tensor:
        terms = self.system.bound_over_times(net, batch, rng, independent=False)
        return torch.stack([term.nats.sum(1) for term in terms]).sum(0)
