"""The options of a training run in small groups; each function takes the group it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def _require(name: str, value: float, low: float, advice: str = "") -> None:
    if value < low:
        raise ValueError(f"{name} is {value}, must be at least {low}{advice and ': ' + advice}")


@dataclass(frozen=True)
class Batching:
    """How many examples one step takes."""

    size: int = 512
    """Examples in one step, over all its micro-batches."""
    micro: int | None = None
    """Examples in one forward and backward pass of a process; divides the size. Null: all that it has of a batch."""

    def __post_init__(self) -> None:
        _require("batch.size", self.size, 1)
        _require("batch.micro", self.pass_size, 1)
        if self.size % self.pass_size:
            near = [d for d in range(1, self.size + 1) if self.size % d == 0]
            near = sorted(sorted(near, key=lambda d: abs(d - self.pass_size))[:3])
            raise ValueError(f"batch.micro {self.micro} does not divide batch.size {self.size}: choose one of {near}")

    @property
    def pass_size(self) -> int:
        """Examples in one pass."""
        return self.size if self.micro is None else self.micro

    def passes(self, rank: int = 0, world: int = 1) -> list[tuple[int, int]]:
        """First example and number of examples of each pass of one process among `world`."""
        if self.size % world:
            raise ValueError(f"batch.size {self.size} does not divide among {world} processes: use a multiple of it")
        share = self.size // world
        size = min(self.pass_size, share)
        if share % size:
            raise ValueError(
                f"batch.micro {self.micro} does not divide the {share} examples of one of {world} processes"
            )
        return [(first, size) for first in range(rank * share, (rank + 1) * share, size)]


@dataclass(frozen=True)
class Optim:
    """How AdamW moves the weights."""

    lr: float = 3e-4
    """Learning rate after the warm-up."""
    warmup: int = 2500
    """Steps over which the learning rate rises from zero."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a cosine down to zero at the last step."""
    beta_1: float = 0.9
    """Decay of AdamW's first moment."""
    beta_2: float = 0.999
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    ema: float = 0.9999
    """Decay of the averaged weights that validation and sampling use."""

    def __post_init__(self) -> None:
        for name in ("lr", "warmup", "weight_decay", "clip"):
            _require(f"optim.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class Compute:
    """Where and how the arithmetic runs."""

    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, `mps`."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """`bf16` is autocast with float32 weights; `auto` takes it where the machine is fast at it."""
    compile: bool = False
    """Pass the network through torch.compile."""
    checkpoint_blocks: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    threads: int | None = None
    """CPU threads; null leaves PyTorch's choice. Another number may round differently."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: `ddp` keeps all weights on every process, `fsdp` shards weights, moments and averages."""
    gather: Literal["float32", "bf16"] = "float32"
    """Type in which `fsdp` gathers weights; gradients are always summed in float32."""
    offload: bool = False
    """Keep the shards of `fsdp` in the memory of the CPU."""
    timeout: float = 600.0
    """Seconds after which a process that waits for another one ends the job."""

    def __post_init__(self) -> None:
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"compute.parallel is {self.parallel!r}; it must be ddp or fsdp")
        if self.gather not in ("float32", "bf16"):
            raise ValueError(f"compute.gather is {self.gather!r}; it must be float32 or bf16")
        if self.parallel != "fsdp" and (self.gather != "float32" or self.offload):
            raise ValueError(
                "compute.gather and compute.offload are of FSDP: give --compute.parallel fsdp, or leave them out"
            )
        if self.timeout <= 0:
            raise ValueError(f"compute.timeout is {self.timeout}, must be above 0")


@dataclass(frozen=True)
class Validation:
    """How often the bound on the validation split is measured."""

    every: int = 1000
    """Steps between validations; 0 validates only after the last step."""
    batches: int | None = None
    """Batches of the validation split to score; null scores all of it."""
    batch_size: int = 32
    """Examples in one validation batch."""

    def __post_init__(self) -> None:
        _require("validation.every", self.every, 0)
        _require("validation.batch_size", self.batch_size, 1)
        _require("validation.batches", 1 if self.batches is None else self.batches, 1)


@dataclass(frozen=True)
class Saving:
    """How often a checkpoint is written and how many are kept."""

    every: int = 1000
    """Steps between checkpoints; 0 saves only after the last step and on SIGINT or SIGTERM."""
    keep: int = 2
    """How many of the latest checkpoints stay; the best by validation always stays."""

    def __post_init__(self) -> None:
        _require("saving.every", self.every, 0)
        _require("saving.keep", self.keep, 1, "resuming needs the latest one")


@dataclass(frozen=True)
class Corpus:
    """What the data folder is prepared from: used to say how when it is missing, and by `esolm demo`."""

    source: str = ""
    """A corpus as `esolm prepare` names it."""
    tokenizer: str = "bpe:4096"
    """A tokenizer as `esolm prepare` names it."""
    length: int = 256
    """Tokens in one example."""
