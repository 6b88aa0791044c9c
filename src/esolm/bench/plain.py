"""Reference training step: a dense mask for every pattern, a separate pass for each input, logits of all rows.

It feeds the same rows as our step. The authors' step for Eso-LM also feeds the clean tokens of z and is slower still.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..core.terms import token_nats, total
from ..core.visibility import Packed, Visibility
from ..net.denoiser import Denoiser, DenoiserConfig, Rows, modulate, modulated_norm
from ..net.head import Score
from ..net.rotary import rotary_table
from ..runtime.machine import autocast, keep_memory, settle
from ..systems import System, find


class PlainDenoiser(Denoiser):
    """The same network without the optimisations."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, position: Tensor, visibility: Visibility | Packed, *, out: Rows, score: Score, **rest: Any
    ) -> Tensor:
        """Return the nats of the rows `out`."""
        if isinstance(visibility, Packed):
            shapes = [(part.batch, part.visibility.rank.shape[1]) for part in visibility.parts]
            sizes = [batch * slots for batch, slots in shapes]
            inputs = zip(tokens[0].split(sizes), position[0].split(sizes), shapes, visibility.parts, strict=True)
            logits = torch.cat([self.everywhere(t.view(s), p.view(s), v.visibility) for t, p, s, v in inputs])
        else:
            logits = self.everywhere(tokens, position, visibility)
        logits = logits.view(*tokens.shape, -1)
        nats = token_nats(out.select(logits).flatten(0, -2), score.target, score.exclude)
        return nats if score.weight is None else nats * score.weight

    def everywhere(self, tokens: Tensor, position: Tensor, visibility: Visibility) -> Tensor:
        """Return the logits of all slots, [B * N, V]."""
        h, cond = self.embed(tokens), self.condition(None)
        rotary = rotary_table(position, self.config, h.dtype)
        visibility = replace(visibility, kind="labels")
        for block in self.blocks:
            h = block(h, cond, rotary, visibility)
        return self.head(modulated_norm(h, self.norm, *modulate(self, cond, 2))).flatten(0, 1)


def training_step(system: System, net: Denoiser, x: Tensor, precision: str) -> Callable[[int], None]:
    """Return a function that runs training step number `i`."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=True)
    scored = torch.ones_like(x, dtype=torch.bool)

    def step(i: int) -> None:
        rng = Randomness(fold(1, i), 0, len(x))
        with autocast(x.device, precision):
            terms = system.terms(net, Batch(x), rng, True)
        total(terms, system.counts(scored, rng)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak(config: DenoiserConfig, name: str, options: dict[str, Any], batch: int, precision: str, plain: bool) -> float:
    """Return the peak memory in bytes that two training steps add to a new process, with weights and AdamW's state."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_peak, args=(queue, config, name, options, batch, precision, plain))
    process.start()
    found = queue.get(timeout=600)
    process.join()
    return found


def _peak(
    queue: Any, config: DenoiserConfig, name: str, options: dict[str, Any], batch: int, precision: str, plain: bool
) -> None:
    settle()
    keep_memory()
    x = torch.randint(0, config.vocab_size - 1, (batch, config.length))
    system = find(name)(mask_id=config.vocab_size - 1, **options)
    before = _highest()
    net = (PlainDenoiser if plain else Denoiser)(config)
    step = training_step(system, net, x, "float32" if plain else precision)
    step(0)
    step(1)
    queue.put(_highest() - before)


def _highest() -> float:
    """Return the peak resident memory of this process in bytes."""
    with contextlib.suppress(OSError):  # on Linux ru_maxrss starts at the parent's peak
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
