"""The option groups of a training run. Each function takes only the group it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def _require(name: str, value: float, low: float, advice: str = "") -> None:
    if value < low:
        raise ValueError(f"{name} is {value}; it must be at least {low}{advice and ': ' + advice}")


@dataclass(frozen=True)
class Batching:
    """The number of examples in a step and in a micro-batch."""

    size: int = 512
    """Examples in one step, over all ranks and micro-batches."""
    micro: int | None = None
    """Examples in one micro-batch of one rank; must divide the size. Null: the whole share of the rank."""

    def __post_init__(self) -> None:
        _require("batch.size", self.size, 1)
        _require("batch.micro", self.micro_size, 1)
        if self.size % self.micro_size:
            near = [d for d in range(1, self.size + 1) if self.size % d == 0]
            near = sorted(sorted(near, key=lambda d: abs(d - self.micro_size))[:3])
            raise ValueError(f"batch.micro {self.micro} does not divide batch.size {self.size}: choose one of {near}")

    @property
    def micro_size(self) -> int:
        """Examples in one micro-batch."""
        return self.size if self.micro is None else self.micro

    def micro_batches(self, rank: int = 0, world: int = 1) -> list[tuple[int, int]]:
        """The first example and the number of examples of each micro-batch of one rank."""
        if self.size % world:
            raise ValueError(f"batch.size {self.size} does not divide among {world} processes: use a multiple")
        share = self.size // world
        size = min(self.micro_size, share)
        if share % size:
            raise ValueError(
                f"batch.micro {self.micro} does not divide the {share} examples of each of {world} processes"
            )
        return [(first, size) for first in range(rank * share, (rank + 1) * share, size)]


@dataclass(frozen=True)
class Optim:
    """AdamW, its learning rate, and the average of the weights."""

    lr: float = 3e-4
    """Learning rate after the warm-up."""
    warmup: int = 2500
    """Steps over which the learning rate rises from zero."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a cosine down to zero at the last step."""
    decay: int = 0
    """Under the constant schedule, the number of last steps over which the learning rate falls linearly to zero."""
    beta_1: float = 0.9
    """Decay of AdamW's first moment."""
    beta_2: float = 0.999
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    clip: float = 1.0
    """Clip the gradient to this norm; 0 does not clip."""
    ema: float = 0.9999
    """Decay of the exponential moving average of the weights, which validation and sampling use."""

    def __post_init__(self) -> None:
        for name in ("lr", "warmup", "decay", "weight_decay", "clip"):
            _require(f"optim.{name}", getattr(self, name), 0)
        if self.decay and self.schedule == "cosine":
            raise ValueError(f"optim.decay is {self.decay}, but a cosine falls by itself: leave one of them out")


@dataclass(frozen=True)
class Tuning:
    """Which weights are trained, with --init."""

    parts: Literal["all", "qkv", "lora"] = "all"
    """All weights; only the projections to queries, keys and values; or LoRA adapters on the linear layers of the
    blocks (`pip install 'esolm[lora]'`)."""
    rank: int = 16
    """Rank of the LoRA matrices."""
    alpha: float = 32.0
    """LoRA adds alpha / rank times the product of its matrices to a weight."""
    dropout: float = 0.0
    """Dropout of the inputs of LoRA."""
    embeddings: bool = False
    """With `qkv` and `lora`: also train the embedding of tokens, among them the mask, and so a tied output layer."""

    def __post_init__(self) -> None:
        if self.parts not in ("all", "qkv", "lora"):
            raise ValueError(f"tuning.parts is {self.parts!r}; it must be all, qkv or lora")
        _require("tuning.rank", self.rank, 1)
        if self.alpha <= 0:
            raise ValueError(f"tuning.alpha is {self.alpha}; it must be above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"tuning.dropout is {self.dropout}; it must be at least 0 and below 1")
        if self.parts != "lora" and (self.rank, self.alpha, self.dropout) != (16, 32.0, 0.0):
            raise ValueError(
                "tuning.rank, tuning.alpha and tuning.dropout need LoRA: add --tuning.parts lora, or leave them out"
            )
        if self.parts == "all" and self.embeddings:
            raise ValueError("tuning.embeddings needs tuning.parts qkv or lora: all trains the embedding anyway")


@dataclass(frozen=True)
class Distill:
    """Distillation from the initial model, with --init."""

    weight: float = 0.0
    """Weight of the KL divergence from the left-to-right predictions of the initial model, in the loss; 0 is none."""

    def __post_init__(self) -> None:
        _require("distill.weight", self.weight, 0)


@dataclass(frozen=True)
class Compute:
    """Device, precision and parallelism."""

    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, `mps`."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """`bf16` is autocast with float32 weights; `auto` uses it where it is faster."""
    compile: bool = False
    """Compile the network with torch.compile."""
    checkpoint_blocks: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    threads: int | None = None
    """CPU threads; null uses PyTorch's choice. Another number may round differently."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: `ddp` keeps all weights on every rank; `fsdp` shards weights, gradients, moments and averages."""
    gather: Literal["float32", "bf16"] = "float32"
    """Type in which `fsdp` gathers weights; gradients are always reduced in float32."""
    offload: bool = False
    """Keep the shards of `fsdp` in CPU memory."""
    timeout: float = 600.0
    """Seconds after which a rank that waits for another one ends the job."""

    def __post_init__(self) -> None:
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"compute.parallel is {self.parallel!r}; it must be ddp or fsdp")
        if self.gather not in ("float32", "bf16"):
            raise ValueError(f"compute.gather is {self.gather!r}; it must be float32 or bf16")
        if self.parallel != "fsdp" and (self.gather != "float32" or self.offload):
            raise ValueError(
                "compute.gather and compute.offload need FSDP: add --compute.parallel fsdp, or leave them out"
            )
        if self.threads is not None:
            _require("compute.threads", self.threads, 1, "null uses PyTorch's choice")
        if self.timeout <= 0:
            raise ValueError(f"compute.timeout is {self.timeout}; it must be above 0")


@dataclass(frozen=True)
class Validation:
    """How often and on how much data the model is validated."""

    every: int = 1000
    """Steps between validations; 0 validates only after the last step."""
    batches: int | None = None
    """Batches of the validation split to score; null scores all of it."""
    batch_size: int = 32
    """Examples in one validation batch."""
    alpha_0: tuple[float, ...] = ()
    """Also report the loss at these values of alpha_0."""

    def __post_init__(self) -> None:
        _require("validation.every", self.every, 0)
        _require("validation.batch_size", self.batch_size, 1)
        _require("validation.batches", 1 if self.batches is None else self.batches, 1)


@dataclass(frozen=True)
class Saving:
    """How often checkpoints are written and how many are kept."""

    every: int = 1000
    """Steps between checkpoints; 0 saves only after the last step and on SIGINT or SIGTERM."""
    keep: int = 2
    """Latest checkpoints to keep; the best one by validation loss is always kept."""

    def __post_init__(self) -> None:
        _require("saving.every", self.every, 0)
        _require("saving.keep", self.keep, 1, "resuming needs the latest one")


@dataclass(frozen=True)
class CorpusOptions:
    """How the data folder is prepared: `esolm demo` uses these, and the error for a missing folder shows them."""

    source: str = ""
    """The corpus, as `esolm prepare` takes it."""
    tokenizer: str = "bpe:4096"
    """The tokenizer, as `esolm prepare` takes it."""
    length: int = 256
    """Tokens in one example."""
    vocab_size: int | None = None
    """Ids of the tokenizer, the mask included, for `esolm plan`; training takes them from the data."""
    options: str = ""
    """Further options of `esolm prepare`, for the error."""


@dataclass(frozen=True)
class Cluster:
    """The GPUs to plan for, and what is assumed about them."""

    gpus: int = 8
    """Number of GPUs, one process each."""
    gpu_memory: float = 80e9
    """Memory of each GPU, in bytes."""
    tflops: float = 400.0
    """Peak of each GPU in dense bf16 TFLOP/s."""
    efficiency: float = 0.4
    """Share of the peak that training reaches."""

    def __post_init__(self) -> None:
        for name in ("gpus", "gpu_memory", "tflops"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency}; it must be above 0 and at most 1")
