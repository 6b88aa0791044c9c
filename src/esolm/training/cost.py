"""Cost model of a training step: operations, memory and traffic, counted instead of measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..core.visibility import Packed, Part, Visibility
from ..net.denoiser import Denoiser, DenoiserConfig, Rows
from ..net.head import CHUNK, WHOLE, RowLoss, Scoring, VectorPass
from ..systems import System
from .options import Compute, Tuning
from .tuning import count as count_trained

EVERYTHING = Tuning()


@dataclass
class PassCounts:
    """What forward passes compute."""

    rows: float = 0.0  # rows that go through the blocks
    logit_rows: float = 0.0  # rows that get logits
    pairs: float = 0.0  # query-key pairs in one block
    last_pairs: float = 0.0  # and in the last block
    padding: float = 0.0  # rows that only reduce the number of shapes: neither seen nor scored
    soft_rows: float = 0.0  # rows that are fed as probabilities of all tokens
    timed_rows: float = 0.0  # rows with logits that have a time of their own, for which the last block modulates each

    def scaled(self, factor: float) -> PassCounts:
        """The counts of `factor` times as many passes or examples."""
        return PassCounts(*(value * factor for value in dataclasses.astuple(self)))

    def flops(self, config: DenoiserConfig) -> float:
        """Floating-point operations; in the last block only rows with logits go past the keys and values."""
        per_row, keys_values = 2 * config.block_weights, 2 * config.width * 2 * config.sizes.keys
        pair = 4 * config.sizes.queries
        blocks = (config.layers - 1) * (self.rows * per_row + pair * self.pairs)
        last = self.rows * keys_values + self.logit_rows * (per_row - keys_values) + pair * self.last_pairs
        return blocks + last + self.ends(config)

    def ends(self, config: DenoiserConfig) -> float:
        """The operations before the first block and after the last one."""
        width, embedding = config.width, config.latent_width or config.width
        table = 2 * embedding * config.vocab_size
        between = 0 if config.latent_width is None else 2 * width * (width + embedding)
        modulation = 2 * config.cond_width * 8 * width if config.adaln else 0
        rows = self.rows * between + self.logit_rows * (between + table)
        return rows + self.soft_rows * table + self.timed_rows * modulation


class CountingNet(nn.Module):
    """A network that computes nothing and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = PassCounts()

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        visibility: Visibility | Packed,
        *,
        out: Rows,
        score: Scoring | None = None,
        time: Tensor | None = None,
        **rest: Any,
    ) -> Tensor:
        """Zeros in place of nats."""
        asked = torch.arange(out.select(tokens[..., None]).numel()) if out.index is None else out.index
        whole = () if isinstance(visibility, Packed) else (Part(tokens.shape[0], visibility, out.span),)
        counts, first = self.counts, 0
        for batch, seen, span in visibility.parts if isinstance(visibility, Packed) else whole:
            every, last = seen.dense(), seen.dense(span)
            copies = batch // every.shape[0]  # one label may be common to all rows where another is not
            counts.pairs += float(every.sum()) * copies
            counts.last_pairs += float(last.sum()) * copies
            end = first + batch * seen.rank.shape[1]
            if seen.num_z and seen.kind != "block":  # z rows without logits are padding
                counts.padding += batch * seen.num_z - int(((asked >= first) & (asked < end)).sum())
            first = end
        counts.rows += tokens.shape[0] * tokens.shape[1]
        counts.logit_rows += len(asked)
        counts.timed_rows += 0 if time is None else len(asked)
        columns = score.columns if isinstance(score, RowLoss | VectorPass) else None
        return torch.zeros(len(asked)) if columns is None else torch.zeros(len(asked), columns)


@torch.no_grad()
def count(system: System, x: Tensor, rounds: int) -> PassCounts:
    """The mean counts of training steps on x, after any curriculum, over `rounds` draws of noise."""
    net, system = CountingNet(), system.at_step(1 << 62)
    for i in range(rounds):
        system.terms(net, Batch(x), Randomness(fold(1, i), 0, len(x)), True)
    return net.counts.scaled(1 / rounds)


@dataclass(frozen=True)
class MemoryUse:
    """Peak bytes of one process."""

    weights: float
    gradients: float
    moments: float  # of AdamW
    average: float
    gathered: float  # weights gathered by FSDP, or gradient buckets of DDP
    activations: float
    head: float  # logits and their gradient

    @property
    def total(self) -> float:
        """The sum."""
        return sum(dataclasses.astuple(self))


class ParameterCounts(NamedTuple):
    """Numbers of parameters."""

    every: int
    trained: int


def tuned_parameters(config: DenoiserConfig, tuning: Tuning) -> ParameterCounts:
    """The number of parameters of the network with its adapters, and of those that are trained."""
    with torch.device("meta"):
        net = Denoiser(config)
    trained, added = count_trained(net, tuning)
    return ParameterCounts(sum(p.numel() for p in net.parameters()) + added, trained)


def parameters(config: DenoiserConfig) -> tuple[int, int]:
    """The number of parameters of the network and of one block."""
    with torch.device("meta"):
        net = Denoiser(config)
    whole, block = (sum(p.numel() for p in part.parameters()) for part in (net, net.blocks[0]))
    return whole, block


def activations(config: DenoiserConfig, counts: PassCounts, compute: Compute) -> float:
    """Bytes that one pass keeps for its backward pass; with recomputation, those of one block and all block inputs.

    A block keeps of each row: the inputs of both norms and, for AdaLN's gates, both residual updates in float32; in the
    precision of matrix products the outputs of the norms, q, k and v before and after the rotation, the mixed values
    twice, and both sides of the GELU, or SwiGLU's gate before and after SiLU, its value and their product; and two
    dropout masks. A norm of q and k keeps its output too. Not counted: the attention weights that full and causal
    attention keep for training in bf16 on a CPU, at most 64 MB a block.
    """
    low, sizes, width = 2 if compute.precision == "bf16" else 4, config.sizes, config.width
    turned = (config.positions == "rotary") + config.qk_norm
    kept = 2 * width + (1 + turned) * (sizes.queries + sizes.keys) + sizes.keys + 2 * sizes.queries
    kept += (4 if config.mlp == "swiglu" else 2) * sizes.inner
    stream = (16 if config.adaln else 8) * width
    whole = counts.rows * (stream + low * kept + (2 * width if config.dropout else 0))
    ends = soft_bytes(config, counts, low) + timed_bytes(config, counts) + latent_bytes(config, counts, low)
    if compute.checkpoint_blocks:
        return config.layers * 4 * width * counts.rows + whole + ends
    # In the last block: its input and the norm of it, k before and after the rotation, v.
    inputs = counts.rows * (4 * width + low * (width + (2 + turned) * sizes.keys))
    return (config.layers - 1) * whole + inputs + counts.logit_rows / counts.rows * (whole - inputs) + ends


def soft_bytes(config: DenoiserConfig, counts: PassCounts, low: int) -> float:
    """Bytes of rows that are fed as probabilities in float32, and of their copy for matrix products in bf16."""
    return counts.soft_rows * config.vocab_size * (4 if low == 4 else 6)


def timed_bytes(config: DenoiserConfig, counts: PassCounts) -> float:
    """Bytes that a pass keeps more if examples have times: the outputs of all norms, since no scale can be folded into
    a weight, and in the last block and norm the condition of each row with its shifts, scales and gates."""
    last = counts.timed_rows * 4 * (config.cond_width + 8 * config.width + 3 * config.width)
    norms = counts.timed_rows / max(counts.logit_rows, 1) * counts.rows * 4 * config.width * (2 * config.layers + 1)
    return last + norms if config.adaln else 0.0


def latent_bytes(config: DenoiserConfig, counts: PassCounts, low: int) -> float:
    """Bytes that a pass on noisy embeddings keeps outside of the blocks: embeddings before and after the noise, and
    what the MLPs before and after the blocks keep."""
    if config.latent_width is None:
        return 0.0
    return counts.rows * (low * config.width + 12 * config.latent_width) + counts.logit_rows * low * config.width


def head_bytes(config: DenoiserConfig, counts: PassCounts, compute: Compute) -> float:
    """Bytes of the logits and their gradient, or of one chunk of them and the gradient of the output layer."""
    logits = counts.logit_rows * config.vocab_size
    if logits <= WHOLE:
        return logits * 4 * 3
    low = 2 if compute.precision == "bf16" else 4
    return CHUNK * config.vocab_size * (4 + low) + config.vocab_size * config.width * (4 + (low if low < 4 else 0))


def memory(
    config: DenoiserConfig, counts: PassCounts, compute: Compute, world: int, tuning: Tuning = EVERYTHING
) -> MemoryUse:
    """The memory of one of `world` processes in a pass with these counts."""
    (every, trained), (_, block) = tuned_parameters(config, tuning), parameters(config)
    sharded = compute.parallel == "fsdp" and world > 1
    held, learned = ((n / world if sharded else n) for n in (every, trained))
    low = 2 if compute.gather == "bf16" else 4
    gathered = 0.0
    if sharded:  # embedding and head stay gathered; one block is used while the next one arrives
        gathered = low * (every - config.layers * block + 2 * block) + 4 * block
    elif world > 1:
        gathered = 4.0 * trained
    state = (0.0,) * 4 if sharded and compute.offload else (4 * held, 4 * learned, 8 * learned, 4 * learned)
    return MemoryUse(*state, gathered, activations(config, counts, compute), head_bytes(config, counts, compute))


def traffic(config: DenoiserConfig, compute: Compute, world: int, passes: int, tuning: Tuning = EVERYTHING) -> float:
    """Bytes that each process sends in a step of so many micro-batches."""
    every, trained = tuned_parameters(config, tuning)
    if world == 1:
        return 0.0
    ring = (world - 1) / world
    if compute.parallel == "ddp":
        return 2 * ring * 4 * trained
    return passes * ring * (every * 2 * (2 if compute.gather == "bf16" else 4) + 4 * trained)
