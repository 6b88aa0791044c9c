"""Effect of low precision on a trained model: KL divergence from float32 and perplexity, on real text.

Shapes: L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from ..core.batch import Batch
from ..core.randomness import Randomness
from ..core.terms import token_nats
from ..core.visibility import Packed, Visibility
from ..data import Loader
from ..model import load
from ..net.cache import KVCache
from ..net.denoiser import Rows
from ..net.head import Score, Scoring
from ..net.protocol import Network, trainable
from ..systems import System, as_any_order
from .latency import networks
from .report import named, table


def log_probabilities(net: Network, system: System, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of each position given those before it in the order, [L, V], and its token, [L].

    x [1, L]. The rows are in the order in which the system computes them. A system that is left to right has one order,
    whatever sigma is. Raises ValueError if the system has no order.
    """
    seen = _Logits(net)
    as_any_order(system).order_nats(seen, Batch(x), sigma)
    logits = torch.cat(seen.logits).double()
    logits[:, system.mask_id] = float("-inf")
    return logits.log_softmax(-1), torch.cat(seen.targets)


class _Logits:
    """Calls a network that is asked for nats, and keeps the logits behind them and their targets."""

    def __init__(self, net: Network) -> None:
        self.net, self.logits, self.targets = net, list[Tensor](), list[Tensor]()

    def __call__(
        self,
        tokens: Tensor,
        position: Tensor,
        visibility: Visibility | Packed,
        time: Tensor | None = None,
        cache: KVCache | None = None,
        out: Rows | None = None,
        score: Scoring | None = None,
    ) -> Tensor:
        """The call with an empty cache, which makes it a native pass."""
        assert isinstance(score, Score)
        logits = self.net(tokens, position, visibility, time, self.net.new_cache(*tokens.shape[:2]), out)
        self.logits.append(logits.flatten(0, -2).clone())
        self.targets.append(score.target)
        return token_nats(self.logits[-1], score.target, score.exclude)


def compare(exact: Tensor, low: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(exact || low) and the nats of the target under `low`, [L] each; inputs are log probabilities [L, V]."""
    difference = torch.where(exact.isinf(), 0, exact - low)
    return (exact.exp() * difference).sum(-1), -low.gather(1, target[:, None])[:, 0]


def run(run: str, data: str, sequences: int = 32, split: str = "valid", which: str = "best") -> dict[str, Any]:
    """Measure the KL divergence from float32 and the perplexity of lower precisions, under random orders of real text.

    Args:
        run: run, checkpoint or model; one that is left to right is measured in that order.
        data: folder written by `esolm prepare`.
        sequences: number of sequences, each with its own order.
        split: train or valid.
        which: checkpoint of the run, best or last.
    """
    lm = load(run, which=which)
    nets = networks(trainable(lm.net), ["float32", "bf16", "int8", "int4"], native=True)
    source = Loader(data, split, 1, shuffle=False)
    kl: dict[str, list[Tensor]] = {name: [] for name in nets}
    nats: dict[str, list[Tensor]] = {name: [] for name in nets}
    with torch.inference_mode():
        for i in track(range(min(sequences, len(source))), transient=True):
            x = source.batch(i).x
            sigma = Randomness(i).uniform(torch.zeros(1, dtype=torch.long), x.shape[1]).argsort(-1)
            if lm.system.exact:
                sigma = torch.arange(x.shape[1])[None]
            found = {name: log_probabilities(net, lm.system, x, sigma) for name, net in nets.items()}
            for name, (low, target) in found.items():
                for values, new in zip((kl, nats), compare(found["float32"][0], low, target), strict=True):
                    values[name].append(new)
    result, base = {}, torch.cat(nats["float32"])
    for name in nets:
        change = torch.cat(nats[name]) - base
        per_sequence = torch.stack([t.mean() for t in change.split(len(nats[name][0]))])
        error = per_sequence.std() / len(per_sequence) ** 0.5
        result[name] = {
            "kl_nats_per_token": float(f"{torch.cat(kl[name]).mean():.4g}"),
            "perplexity": round(math.exp(torch.cat(nats[name]).mean()), 4),
            "perplexity_change": float(f"{math.expm1(change.mean()):.3g}"),
            "perplexity_change_error": float(f"{error:.2g}") if len(per_sequence) > 1 else None,
        }
    columns = {"precision": "name", "KL to float32": "kl_nats_per_token:.2e", "perplexity": "perplexity:.3f"}
    table(f"{len(base):,} tokens", {**columns, "change": "perplexity_change:+.3%"}, named(result))
    return {"tokens": len(base), "precisions": result}
