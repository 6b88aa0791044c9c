"""What a training step asks of the network and the machine, counted instead of computed: operations, bytes, traffic."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..core.visibility import Packed, Part, Visibility
from ..net.denoiser import Denoiser, DenoiserConfig, Rows
from ..net.head import CHUNK, WHOLE
from ..systems import System
from .options import Compute


@dataclass
class Work:
    """Of forward passes."""

    fed: float = 0.0  # rows that go through the blocks
    asked: float = 0.0  # rows that go through the head
    pairs: float = 0.0  # slots that see each other, in a block
    last: float = 0.0  # and in the last one
    fill: float = 0.0  # rows that are fed to have few shapes, and neither seen nor scored

    def flops(self, config: DenoiserConfig) -> float:
        """Floating-point operations; past the keys and values of the last block only the asked rows go on."""
        width = config.width
        per_row = 2 * width**2 * (4 + 2 * config.mlp_ratio)
        past = 2 * width**2 * 2
        blocks = (config.layers - 1) * (self.fed * per_row + 4 * width * self.pairs)
        ends = self.fed * past + self.asked * (per_row - past) + 4 * width * self.last
        return blocks + ends + self.asked * 2 * width * config.vocab_size


class Counter(nn.Module):
    """Stands for a network, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def forward(
        self, tokens: Tensor, position: Tensor, visibility: Visibility | Packed, *, out: Rows, **rest: Any
    ) -> Tensor:
        """Nats of zero."""
        asked = torch.arange(out.select(tokens[..., None]).numel()) if out.index is None else out.index
        whole = () if isinstance(visibility, Packed) else (Part(tokens.shape[0], visibility, out.span),)
        first = 0
        for batch, seen, span in visibility.parts if isinstance(visibility, Packed) else whole:
            copies = batch // seen.rank.shape[0]
            self.work.pairs += float(seen.dense().sum()) * copies
            self.work.last += float(seen.dense(span).sum()) * copies
            end = first + batch * seen.rank.shape[1]
            if seen.num_z and seen.kind != "block":  # of these z slots only those that are asked for are seen
                self.work.fill += batch * seen.num_z - int(((asked >= first) & (asked < end)).sum())
            first = end
        self.work.fed += tokens.shape[0] * tokens.shape[1]
        self.work.asked += len(asked)
        return torch.zeros(len(asked))


@torch.no_grad()
def count(system: System, x: Tensor, rounds: int) -> Work:
    """The mean over the draws of some training steps on x."""
    net: Any = Counter()
    for i in range(rounds):
        system.terms(net, Batch(x), Randomness(fold(1, i), 0, len(x)), True)
    work = net.work
    return Work(*(value / rounds for value in dataclasses.astuple(work)))


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at the moment of most."""

    weights: float
    gradients: float
    moments: float  # of AdamW
    average: float
    gathered: float  # weights that FSDP has put together, or buckets that DDP sums in
    activations: float
    head: float  # logits and what their gradient needs

    @property
    def total(self) -> float:
        """All of it."""
        return sum(dataclasses.astuple(self))


def parameters(config: DenoiserConfig) -> tuple[int, int]:
    """Of the whole network and of one block."""
    with torch.device("meta"):
        net = Denoiser(config)
    return tuple(sum(p.numel() for p in part.parameters()) for part in (net, net.blocks[0]))  # type: ignore


def activations(config: DenoiserConfig, work: Work, compute: Compute) -> float:
    """Bytes that one pass keeps for its backward pass, or of a block that is recomputed.

    Rows of width W that a block keeps: the two inputs of the norms and the two changes of the residual in float32; in
    the precision of products the outputs of the norms, q, k and v before and after the rotation, the mixed values
    twice, and both sides of the GELU; and two masks of dropout.
    """
    low = 2 if compute.precision == "bf16" else 4
    block = 4 * 4 + low * (2 + 5 + 2 + 2 * config.mlp_ratio) + (2 if config.dropout else 0)
    whole = config.width * work.fed * block
    if compute.checkpoint_blocks:
        return config.layers * 4 * config.width * work.fed + whole
    fed = config.width * work.fed * (4 + low * 4)  # in the last block: its input, k, v and their rotation
    return (config.layers - 1) * whole + fed + work.asked / work.fed * (whole - fed)


def head_bytes(config: DenoiserConfig, work: Work, compute: Compute) -> float:
    """Logits at once with their gradient, or a chunk of them beside the gradient of the output layer."""
    logits = work.asked * config.vocab_size
    if logits <= WHOLE:
        return logits * 4 * 3
    low = 2 if compute.precision == "bf16" else 4
    return CHUNK * config.vocab_size * (4 + low) + config.vocab_size * config.width * (4 + (low if low < 4 else 0))


def memory(config: DenoiserConfig, work: Work, compute: Compute, world: int) -> Memory:
    """Of one process among `world`, in a pass that asks for `work`."""
    every, block = parameters(config)
    sharded = compute.parallel == "fsdp" and world > 1
    held = every / world if sharded else every
    low = 2 if compute.gather == "bf16" else 4
    gathered = 0.0
    if sharded:  # the ends of the network stay; of the blocks, one is used while the next arrives
        gathered = low * (every - config.layers * block + 2 * block) + 4 * block
    elif world > 1:
        gathered = 4.0 * every
    state = (0.0,) * 4 if sharded and compute.offload else (4 * held, 4 * held, 8 * held, 4 * held)
    return Memory(*state, gathered, activations(config, work, compute), head_bytes(config, work, compute))


def traffic(config: DenoiserConfig, compute: Compute, world: int, passes: int) -> float:
    """Bytes that each process sends in a step."""
    every, _ = parameters(config)
    if world == 1:
        return 0.0
    ring = (world - 1) / world
    if compute.parallel == "ddp":
        return 2 * ring * 4 * every
    return passes * ring * every * (2 * (2 if compute.gather == "bf16" else 4) + 4)
