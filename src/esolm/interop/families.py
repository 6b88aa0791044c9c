"""Left-to-right models of other families, as transformers stores them: their configuration and parameter names in ours.

Llama, Mistral, Qwen2, Qwen3 and GPT-2.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import Tokenizer
from ..net.denoiser import Denoiser, DenoiserConfig
from ..storage import folder

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2",
}
"""Architectures of transformers that can be converted, and their `model_type`."""


class Names(NamedTuple):
    """Parameter names of a family: the prefix of block i's, and for each layer of ours the ones it is made of."""

    blocks: str
    inside: dict[str, tuple[str, ...]]
    outside: dict[str, str]


LLAMA = Names(
    "model.layers.{}.",
    {
        "norm1": ("input_layernorm",),
        "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
        "attn_out": ("self_attn.o_proj",),
        "norm2": ("post_attention_layernorm",),
        "mlp.0": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.2": ("mlp.down_proj",),
    },
    {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
)
GPT2 = Names(
    "transformer.h.{}.",
    {
        "norm1": ("ln_1",),
        "attn_qkv": ("attn.c_attn",),
        "attn_out": ("attn.c_proj",),
        "norm2": ("ln_2",),
        "mlp.0": ("mlp.c_fc",),
        "mlp.2": ("mlp.c_proj",),
    },
    {"embed": "transformer.wte", "places": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
)
BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Entries of a stored state dict that are no parameters."""


@dataclass(frozen=True)
class CausalCheckpoint:
    """A state dict and a configuration as transformers stores them."""

    path: Path
    family: str
    config: dict[str, Any]
    state: dict[str, Tensor]
    tokenizer: Tokenizer | None
    about: dict[str, Any] = field(default_factory=lambda: {"weights": "released"})

    def number(self, name: str) -> Any:
        """A size that the configuration must have; raises ValueError."""
        value = self.config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"the configuration of {self.path} has {name} {value!r}; it must be a number")
        return value

    def refuse(self, name: str, advice: str) -> ValueError:
        """The error for an option of the configuration that esolm does not have."""
        return ValueError(f"{self.path} has {name} {self.config.get(name)!r}, which esolm does not support: {advice}")


def family_of(config: Mapping[str, Any]) -> str | None:
    """The family that a config.json names, or None."""
    names = config.get("architectures")
    return FAMILIES.get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None


def make_causal(found: CausalCheckpoint, words: Tokenizer, length: int | None = None) -> tuple[Denoiser, Tokenizer]:
    """The network of a checkpoint, and the tokenizer with as many ids.

    words: the tokenizer, with a mask. If that is the id after the network's last, the embedding and the output layer
    get a row for it, the mean of the trained ones; a network with more rows than ids gives unused ids to the tokenizer.
    """
    if found.config.get("quantization_config") is not None:
        raise found.refuse("quantization_config", "convert the unquantised model, or a GGUF file of it")
    config = gpt2_config(found, length) if found.family == "gpt2" else llama_config(found, length)
    ours = renamed(found, config)
    rows, ids = config["vocab_size"], words.vocab_size
    check_words(found, rows, words)
    if ids > rows:
        config["vocab_size"] = ids
        for name in ("embed.weight", "head.weight"):
            if name in ours:
                mean = ours[name][trained_rows(ours[name])].float().mean(0, keepdim=True)
                ours[name] = torch.cat([ours[name], mean.to(ours[name].dtype)])
    net = Denoiser(DenoiserConfig(**config))
    folder.take(net, ours, found.path)
    words = words if ids >= rows else words.widened(rows)
    start = found.config.get("bos_token_id")
    if words.bos_id == words.eos_id and isinstance(start, int) and start < rows:
        words.bos_id = start  # the tokenizer has no BOS of its own, as Qwen's
    if words.core.num_special_tokens_to_add(False):
        words.core.post_processor = None  # the system puts BOS before a text itself
    return net.eval(), words


def trained_rows(matrix: Tensor) -> Tensor:
    """Which rows of an embedding or output layer, [V, W], can have been trained, bool [V].

    This needs no text. The output layer gives the same gradient to all tokens that do not occur in training, so their
    rows become equal: more than half of those of stories15M, and they would dominate a mean. Rows are left out if they
    are zero, or within 1 % of a row with about the same norm. Rows that were never updated at all are random and cannot
    be recognised. If nothing is left, all rows count.
    """
    rows = matrix.float()
    norm = rows.norm(dim=1)
    order = norm.argsort()  # equal rows become neighbours
    apart = rows[order].diff(dim=0).norm(dim=1) > 0.01 * norm[order[1:]]
    trained = norm > 0
    trained[order[1:]] &= apart
    trained[order[:-1]] &= apart
    return trained if trained.any() else torch.ones_like(trained)


def check_words(found: CausalCheckpoint, rows: int, words: Tokenizer) -> None:
    """Raise ValueError for a tokenizer that cannot be the model's, and report special ids that differ.

    Published models have unused rows: their number is rounded up to a multiple of at most 128, or they are a few
    percent (Qwen 0.3, DeepSeek 2.3). A chat model and its tokenizer may end texts with different tokens.
    """
    ids = words.vocab_size
    own = ids - 1 if words.mask_id == ids - 1 else ids  # without a mask after the last id
    if own > rows or rows - own >= max(128, rows // 10):
        raise ValueError(
            f"{found.path} has {rows} ids and tokenizer {words.name} {own}: give the --tokenizer that it was trained "
            "with"
        )
    bos = None if words.bos_id == words.eos_id else words.bos_id  # EOS stands in for a BOS that is not there
    for role, id in (("bos_token_id", bos), ("eos_token_id", words.eos_id)):
        stated = found.config.get(role)
        known = stated if isinstance(stated, list) else [stated]
        if stated is not None and id is not None and id not in known:
            print(
                f"the {role} of {found.path} is {stated}, and that of tokenizer {words.name} {id}: make sure that it "
                "is the one that the model was trained with",
                file=sys.stderr,
            )


def llama_config(found: CausalCheckpoint, length: int | None) -> dict[str, Any]:
    """Fields of `DenoiserConfig` for Llama, Mistral and Qwen; raises ValueError for what esolm does not have."""
    config, family = found.config, found.family
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise found.refuse("hidden_act", f"it must be silu, not {act}")
    width, heads = found.number("hidden_size"), found.number("num_attention_heads")
    length = _length(found, "max_position_embeddings", length)
    _check_window(found, length)
    bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    return {
        "vocab_size": found.number("vocab_size"),
        "length": length,
        "layers": found.number("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_width": config.get("head_dim") or width // heads,
        "mlp_width": found.number("intermediate_size"),
        "mlp": "swiglu",
        "mlp_bias": bool(config.get("mlp_bias", False)) and family == "llama",
        "norm": "rms",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "qk_norm": family == "qwen3",
        "qkv_bias": bias or family == "qwen2",
        "out_bias": bias,
        "head_bias": False,
        "tied": _tied(found, LLAMA),
        "adaln": False,
        "dropout": 0.0,
        **_rotary(found),
    }


def gpt2_config(found: CausalCheckpoint, length: int | None) -> dict[str, Any]:
    """Fields of `DenoiserConfig` for GPT-2; raises ValueError for what esolm does not have."""
    config = found.config
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise found.refuse("activation_function", "it must be gelu_new")
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.get(name, usual) != usual:
            raise found.refuse(name, f"it must be {usual}")
    if config.get("add_cross_attention"):
        raise found.refuse("add_cross_attention", "only models without an encoder can be converted")
    return {
        "vocab_size": found.number("vocab_size"),
        "length": _length(found, "n_positions", length),
        "layers": found.number("n_layer"),
        "width": found.number("n_embd"),
        "heads": found.number("n_head"),
        "mlp_width": config.get("n_inner") or 4 * found.number("n_embd"),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "norm_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "head_bias": False,
        "tied": _tied(found, GPT2),
        "positions": "learned",
        "adaln": False,
        "dropout": 0.0,
    }


def _length(found: CausalCheckpoint, name: str, length: int | None) -> int:
    most = found.number(name)
    if length is not None and not 1 <= length <= most:
        raise ValueError(f"length is {length}; it must be from 1 to {most}, the {name} of {found.path}")
    return most if length is None else length


def _tied(found: CausalCheckpoint, names: Names) -> bool:
    stated = found.config.get("tie_word_embeddings")
    return f"{names.outside['head']}.weight" not in found.state if stated is None else bool(stated)


def _check_window(found: CausalCheckpoint, length: int) -> None:
    """Raise ValueError if a layer's sliding window is narrower than the length."""
    config, window = found.config, found.config.get("sliding_window")
    slides = found.family == "mistral" or bool(config.get("use_sliding_window"))
    if isinstance(layers := config.get("layer_types"), list):
        slides = "sliding_attention" in layers
    if slides and window is not None and window < length:
        raise found.refuse("sliding_window", f"it is narrower than the length of {length}; give --length {window}")


def _rotary(found: CausalCheckpoint) -> dict[str, Any]:
    """The rotary embedding: `rope_theta` and `rope_scaling`, or since transformers 5 `rope_parameters`."""
    config = found.config
    stored = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or stored
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{found.path} has rope_type {kind!r}, which esolm does not support: only linear and llama3")
    if config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise found.refuse("partial_rotary_factor", "the whole head must be rotated")
    made = {"rotary_base": float(stored.get("rope_theta", config.get("rope_theta", 10000.0)))}
    needed = {"linear": {"rotary_factor": "factor"}, "llama3": LLAMA3}.get(kind, {})
    for ours, theirs in needed.items():
        if not isinstance(scaling.get(theirs), int | float):
            raise ValueError(f"{found.path} has {kind} rope scaling without {theirs}: its configuration is incomplete")
        made[ours] = scaling[theirs]
    return made


LLAMA3 = {
    "rotary_factor": "factor",
    "rotary_low": "low_freq_factor",
    "rotary_high": "high_freq_factor",
    "rotary_length": "original_max_position_embeddings",
}


def renamed(found: CausalCheckpoint, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict with our names: q, k and v in one matrix, gate and up in another, GPT-2's transposed.

    Raises ValueError, with the names of the file, for weights that are missing or have another shape.
    """
    names = GPT2 if found.family == "gpt2" else LLAMA
    left = {name: tensor for name, tensor in found.state.items() if not name.endswith(BUFFERS)}
    if names is GPT2 and "wte.weight" in left:  # stored without the head, as on the hub
        left = {f"transformer.{name}": tensor for name, tensor in left.items()}
    if config["tied"]:
        left.pop(f"{names.outside['head']}.weight", None)
    if "transformer.wpe.weight" in left:
        left["transformer.wpe.weight"] = left["transformer.wpe.weight"][: config["length"]]
    sources: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in names.outside.items()}
    for i in range(config["layers"]):
        inside = names.inside.items()
        sources |= {f"blocks.{i}.{ours}": tuple(names.blocks.format(i) + t for t in theirs) for ours, theirs in inside}
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Denoiser(DenoiserConfig(**config)).state_dict().items()}
    parts = {name: [f"{each}.{kind}" for each in sources[layer]]
             for name in shapes for layer, _, kind in [name.rpartition(".")]}  # fmt: skip
    if missing := [theirs for each in parts.values() for theirs in each if theirs not in left]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{found.path} lacks {', '.join(missing[:3])}{more}, which its configuration asks for: the model is "
            "incomplete, get it again"
        )
    ours: dict[str, Tensor] = {}
    for name, (rows, *columns) in shapes.items():
        turned = names is GPT2 and bool(columns) and name.startswith("blocks.")
        tensors = {theirs: left.pop(theirs).t() if turned else left.pop(theirs) for theirs in parts[name]}
        for theirs, size in zip(tensors, _rows(name, rows, config), strict=True):
            if (shape := tuple(tensors[theirs].shape)) != (size, *columns):
                wanted = (size, *columns)
                raise ValueError(
                    f"{found.path}: {theirs} has the shape {shape[::-1] if turned else shape} instead of "
                    f"{wanted[::-1] if turned else wanted}, which follows from its configuration: get the model again"
                )
        ours[name] = torch.cat(list(tensors.values())) if len(tensors) > 1 else next(iter(tensors.values()))
    return ours | left  # what is left has no place, and is named in an error


def _rows(name: str, rows: int, config: Mapping[str, Any]) -> list[int]:
    """The rows of each part of a matrix: q, k and v, gate and up, or the whole."""
    if "kv_heads" not in config or not ("attn_qkv" in name or "mlp.0" in name):
        return [rows]
    if "mlp.0" in name:
        return [rows // 2] * 2
    width = config["head_width"]
    return [config["heads"] * width, *[config["kv_heads"] * width] * 2]
