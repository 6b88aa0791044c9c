"""GGUF files of Llama, Mistral, Qwen and GPT-2, read as data: dequantised, with the names that transformers has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from ..data import Tokenizer
from ..data.tokenizer import from_json
from .families import CausalCheckpoint

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Layers in a GGUF file, and in transformers' Llama."""
GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
"""Values of general.architecture; Mistral's is llama."""
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
GPT2_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
ROPE_FREQS = "rope_freqs.weight"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"llama-bpe": WORDS.format(digits="{1,3}") + SPACES, "qwen2": WORDS.format(digits="") + SPACES}
"""Regular expressions of pre-tokenizers, by tokenizer.ggml.pre."""
CONTROL, USER_DEFINED = 3, 4


def read_gguf(path: Path) -> CausalCheckpoint:
    """Read a GGUF file; raises ValueError if it is damaged or of another architecture."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"reading {path} needs the package gguf: `pip install 'esolm[gguf]'`") from error
    try:
        reader = GGUFReader(str(path))
        fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, OSError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a GGUF file, or is damaged: {error}") from error
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(f"{path} has the architecture {family!r}; it must be one of {', '.join(FAMILIES)}")
    state = {tensor.name: dequantised(tensor) for tensor in reader.tensors}
    config = stated_config(path, family, fields, state)
    names = GPT2_NAMES if family == "gpt2" else NAMES
    renamed = {_name(name, names, family): tensor for name, tensor in state.items()}
    if family == "gpt2":
        renamed = {name: t.t() if ".h." in name and t.dim() == 2 else t for name, t in renamed.items()}
    elif family == "llama":
        renamed = {name: unpermuted(name, t, config) for name, t in renamed.items()}
    about = {"weights": "dequantised" if any(t.tensor_type > 1 for t in reader.tensors) else "released"}
    return CausalCheckpoint(path, family, config, renamed, stored_tokenizer(path, fields), about)


def dequantised(tensor: Any) -> Tensor:
    """A tensor of the file in float32."""
    from gguf import quants

    try:
        return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
    except (NotImplementedError, ValueError) as error:
        kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
        raise ValueError(f"{tensor.name} is stored as {kind}, which the package gguf cannot read: {error}") from error


def stated_config(path: Path, family: str, fields: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Any]:
    """The configuration as transformers would store it."""
    if fields.get(f"{family}.expert_count"):
        raise ValueError(f"{path} has {family}.expert_count, which esolm does not support: only dense models")
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    config = {ours: fields[key] for name, ours in sizes.items() if (key := f"{family}.{name}") in fields}
    if "token_embd.weight" not in state:
        raise ValueError(f"{path} has no token_embd.weight: it holds no language model")
    config["vocab_size"] = state["token_embd.weight"].shape[0]
    config |= {f"{role}_token_id": fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
    if fields.get(f"{family}.attention.sliding_window"):
        config |= {"sliding_window": fields[f"{family}.attention.sliding_window"], "use_sliding_window": True}
    kind = fields.get(f"{family}.rope.scaling.type", "none")
    if kind != "none":
        config["rope_scaling"] = {"rope_type": kind, "factor": fields.get(f"{family}.rope.scaling.factor")}
    if ROPE_FREQS in state:
        config["rope_scaling"] = llama3_scaling(path, config, state.pop(ROPE_FREQS))
    return config


def llama3_scaling(path: Path, config: dict[str, Any], divisors: Tensor) -> dict[str, Any]:
    """Llama 3's scaling, of which the file has only the divisor of each frequency; raises ValueError for another."""
    base, old, low, high = config.get("rope_theta", 10000.0), 8192, 1.0, 4.0  # of all of Meta's models
    waves = old * base ** -(torch.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    factor = float(divisors.max())
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / divisors, kept + (1 - kept) / factor, rtol=1e-3):
        raise ValueError(f"{path} has {ROPE_FREQS} other than those of Llama 3, which esolm does not support")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": old}  # fmt: skip


def _name(name: str, names: dict[str, str], family: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; unknown names stay."""
    layer, _, kind = name.rpartition(".")
    if layer.startswith("blk."):
        _, number, layer = layer.split(".", 2)
        prefix = f"{'transformer.h' if family == 'gpt2' else 'model.layers'}.{number}."
        return f"{prefix}{names[layer]}.{kind}" if layer in names else name
    return f"{names[layer]}.{kind}" if layer in names else name


def unpermuted(name: str, t: Tensor, config: dict[str, Any]) -> Tensor:
    """Undo the order of q and k in Llama files, where rotated pairs are neighbours: to pairs (i, i + D/2)."""
    heads = config["num_attention_heads"]
    if ".k_proj." in name:
        heads = config.get("num_key_value_heads", heads)
    elif ".q_proj." not in name:
        return t
    return t.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def stored_tokenizer(path: Path, fields: dict[str, Any]) -> Tokenizer | None:
    """The byte-level BPE tokenizer in the file; None if it is of another kind, or split by an unknown rule."""
    pre = fields.get("tokenizer.ggml.pre", "default")
    known = pre in SPLITS or pre in ("gpt-2", "default", "smollm")
    if fields.get("tokenizer.ggml.model") != "gpt2" or not known:
        return None
    tokens, merges = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.merges", [])
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pre in SPLITS:
        first = [pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")]
    core.pre_tokenizer = pre_tokenizers.Sequence([*first, whole])
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    added = [(token, kind) for token, kind in zip(tokens, kinds) if kind in (CONTROL, USER_DEFINED)]
    core.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
    roles = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "mask_token": "mask_token_id"}
    ids = {role: fields.get(f"tokenizer.ggml.{key}") for role, key in roles.items()}
    declared = {role: tokens[i] for role, i in ids.items() if i is not None and i < len(tokens)}
    found = from_json(core.to_str(), path.stem, declared)
    found.chat_template = fields.get("tokenizer.chat_template")
    return found
