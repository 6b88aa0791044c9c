"""The sizes and parts of a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple


class Sizes(NamedTuple):
    """The sizes of a block, with those that the configuration leaves out."""

    heads: int
    kv_heads: int
    head_width: int
    inner: int  # of the MLP, after its activation

    @property
    def queries(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.kv_heads * self.head_width


@dataclass(frozen=True)
class DenoiserConfig:
    """Sizes and parts of the network, by default those of the paper. With other values it is a Llama, Qwen, Mistral or
    GPT-2."""

    vocab_size: int
    """Size of the vocabulary, including the mask."""
    length: int = 1024
    """Tokens in a training sequence."""
    layers: int = 12
    """Number of blocks."""
    width: int = 768
    """Width of the embeddings and of every block."""
    heads: int = 12
    """Heads of the attention."""
    cond_width: int = 128
    """Width of the time condition of AdaLN."""
    adaln: bool = True
    """Condition every block on the time (fed zero by masked diffusion); False is the plain AR transformer."""
    dropout: float = 0.1
    """Dropout of what attention and MLP add, in training."""
    mlp_ratio: int = 4
    """Inner width of the MLP, as a multiple of the width, unless mlp_width gives it."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    init: Literal["paper", "gpt2"] = "paper"
    """Initial weights: the paper's, with a zero output layer, or GPT-2's, which learn far more in a few hundred steps.
    AdaLN's modulation starts at zero in both."""
    kv_heads: int | None = None
    """Heads of keys and values, a divisor of `heads`, each shared by several queries; null: as many as `heads`."""
    head_width: int | None = None
    """Width of a head; null: width / heads."""
    mlp_width: int | None = None
    """Inner width of the MLP; null: mlp_ratio times the width."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """The MLP: GELU (its tanh approximation), or SwiGLU, with a SiLU gate."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    norm_eps: float = 1e-5
    """What LayerNorm and RMSNorm add to the variance."""
    norm_bias: bool = False
    """Whether LayerNorm has a bias."""
    qk_norm: bool = False
    """RMSNorm of each head of queries and keys, before the rotation."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have a bias."""
    out_bias: bool = False
    """Whether the output projection of the attention has a bias."""
    mlp_bias: bool = True
    """Whether the layers of the MLP have a bias."""
    head_bias: bool = True
    """Whether the output layer has a bias."""
    tied: bool = False
    """Use the embedding as the weight of the output layer."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary embedding of queries and keys, or one learned vector for each of the `length` positions."""
    rotary_factor: float = 1.0
    """Divides the rotary frequencies: all of them, or with rotary_length only those of long waves, as Llama 3 does."""
    rotary_length: int | None = None
    """The length before Llama 3's scaling; null: linear scaling."""
    rotary_low: float = 1.0
    """Llama 3's scaling divides frequencies with fewer than so many waves in rotary_length by the whole factor."""
    rotary_high: float = 4.0
    """Llama 3's scaling keeps frequencies with more than so many waves in rotary_length."""
    latent_width: int | None = None
    """Width of the embedding of a system that adds noise to embeddings, which sets it. Two small MLPs lead from it to
    the width of the network and back, and the embedding is the weight of the output layer. Null: that of the network.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be {' or '.join(map(repr, allowed))}")
        for name in POSITIVE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.norm_eps <= 0 or self.rotary_factor <= 0 or self.rotary_base <= 0:
            raise ValueError("norm_eps, rotary_factor and rotary_base must be above 0")
        if self.rotary_length is not None and not 0 < self.rotary_low < self.rotary_high:
            raise ValueError(f"rotary_low is {self.rotary_low}; it must be above 0 and below {self.rotary_high}")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.positions == "rotary" and self.sizes.head_width % 2:
            if self.head_width is None:
                raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
            raise ValueError(f"head_width is {self.head_width}; the rotary embedding needs an even one")
        if self.heads % self.sizes.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; it must divide heads, which is {self.heads}")
        if self.norm == "rms" and self.norm_bias:
            raise ValueError("norm_bias is True, and RMSNorm has no bias: use norm 'layer', or leave it out")

    @property
    def sizes(self) -> Sizes:
        """The sizes of a block."""
        head_width = self.width // self.heads if self.head_width is None else self.head_width
        inner = self.mlp_ratio * self.width if self.mlp_width is None else self.mlp_width
        return Sizes(self.heads, self.heads if self.kv_heads is None else self.kv_heads, head_width, inner)

    @property
    def block_weights(self) -> int:
        """Numbers in the matrices of a block that every row is multiplied by."""
        s = self.sizes
        return self.width * (2 * s.queries + 2 * s.keys + s.inner * (3 if self.mlp == "swiglu" else 2))


def with_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored fields of a configuration, and the defaults of those that did not exist when it was stored."""
    return {f.name: f.default for f in dataclasses.fields(DenoiserConfig) if f.default is not MISSING} | dict(stored)


CHOICES = {
    "init": ("paper", "gpt2"),
    "mlp": ("gelu", "swiglu"),
    "norm": ("layer", "rms"),
    "positions": ("rotary", "learned"),
}
POSITIVE = (
    "vocab_size", "length", "layers", "width", "heads", "cond_width", "mlp_ratio", "kv_heads", "head_width",
    "mlp_width", "rotary_length", "latent_width",
)  # fmt: skip
