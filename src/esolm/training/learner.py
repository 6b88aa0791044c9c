"""The state of training: weights, AdamW's moments, averaged weights and counters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.distributed import ALONE, Ranks
from ..storage import checkpoint
from .ema import Ema
from .options import Optim
from .parallel import whole
from .tuning import trained


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """The learning rate of step 0, 1, …: linear warm-up, then a cosine down to zero, or constant with a linear end."""
    rate = optim.lr * min(1.0, (step + 1) / max(optim.warmup, 1))
    if optim.decay:
        rate *= min(1.0, (steps - step) / (optim.decay + 1))
    if optim.schedule == "cosine" and step >= optim.warmup:
        rate *= 0.5 * (1 + math.cos(math.pi * (step - optim.warmup) / max(steps - optim.warmup, 1)))
    return rate


class Learner:
    """A network with its optimiser and averaged weights after `step` steps."""

    def __init__(self, net: nn.Module, optim: Optim) -> None:
        self.net = net
        self.clip = optim.clip
        self.optimizer = torch.optim.AdamW(
            trained(net).values(),
            lr=optim.lr,
            betas=(optim.beta_1, optim.beta_2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.ema = Ema(net, optim.ema)
        self.step = 0
        self.tokens = 0  # scored so far
        self.seconds = 0.0  # trained so far
        self.metrics_bytes = 0  # the length of metrics.jsonl at this step

    def gradient_norm(self) -> Tensor:
        """Clip the gradient, and return its norm before clipping."""
        return whole(nn.utils.clip_grad_norm_(self.net.parameters(), self.clip or math.inf))

    def update(self, lr: float, tokens: int, last: bool = True) -> None:
        """Apply the accumulated gradient with AdamW, and update the averaged weights.

        last: the update ends its step; reinforcement learning may make several in a step.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += tokens
        self.ema.update(self.net, self.step + 1)
        self.step += last

    def save(
        self,
        saver: checkpoint.Saver,
        identity: Mapping[str, Any],
        metric: float | None,
        chosen: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint of this step. chosen: the options of the system that a validation has changed."""
        tensors = {
            "model": self.net.state_dict(),
            "ema": self.ema.state(self.net),
            "optimizer": {
                f"{name}/{key}": value
                for name, p in self.net.named_parameters()
                for key, value in self.optimizer.state.get(p, {}).items()
            },
        }
        state = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "metrics_bytes": self.metrics_bytes,
            "metric": metric,
            "threads": torch.get_num_threads(),
            "identity": identity,
            **({"chosen": chosen} if chosen else {}),
        }
        return saver.save(self.step, tensors, state)

    def restore(self, folder: Path, identity: Mapping[str, Any], ranks: Ranks = ALONE) -> dict[str, Any]:
        """Load the checkpoint in `folder` and return its state; raises ValueError first if it is of another run."""
        state = ranks.everywhere(lambda: self._check(folder, identity, ranks))
        parameters, moments = dict(self.net.named_parameters()), {}
        for name, shape in checkpoint.shapes(folder, "optimizer").items():
            parameter, _, key = name.rpartition("/")
            p = parameters[parameter].detach()
            value = torch.zeros_like(p) if shape == p.shape else torch.zeros(shape, device=p.device)
            self.optimizer.state[parameters[parameter]][key] = moments[name] = value
        targets = {"model": self.net.state_dict(), "ema": self.ema.state(self.net), "optimizer": moments}
        for stem, tensors in targets.items():
            checkpoint.fill(folder, stem, tensors, ranks.world == 1)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.metrics_bytes = state["metrics_bytes"]
        return state

    def _check(self, folder: Path, identity: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
        """The state of a checkpoint of this run, after verifying its files; each rank verifies some of them."""
        state = checkpoint.read(folder)
        checkpoint.check_identity(folder, state, identity)
        checkpoint.verify(folder, sorted(state["files"])[ranks.rank :: ranks.world])
        model, ema = (checkpoint.shapes(folder, stem) for stem in ("model", "ema"))
        expected = {name: t.shape for name, t in self.net.state_dict().items()}
        wrong = [name for name in expected.keys() | model.keys() if expected.get(name) != model.get(name)]
        if wrong or model != ema:
            raise ValueError(f"{folder} has another architecture: {', '.join(sorted(wrong)[:5])} differ")
        return state
