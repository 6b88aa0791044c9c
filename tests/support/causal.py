"""Tiny random models of other families, made by transformers, and GGUF files of them as llama.cpp writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import processors
from torch import Tensor

from esolm.data import tokenizer as make_tokenizer

BYTES, BOS, EOS, VOCABULARY, LENGTH = 256, 256, 257, 258, 24
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "bos_token_id": BOS,
    "eos_token_id": EOS, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1000.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "llama-biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 6}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 12, "num_key_value_heads": 1}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY,
         "bos_token_id": BOS, "eos_token_id": EOS},
    ),
}  # fmt: skip
GGUF_SIZES: dict[str, dict[str, Any]] = {
    name: {"intermediate_size": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    for name in ("llama", "llama-3", "qwen2", "qwen3")
}
GGUF_SIZES["llama-3"] |= {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}
GGUF_SIZES["qwen3"] |= {"head_dim": 16}
"""Of whole blocks of 32; Llama 3's original length is not stored in a file."""


def make(name: str, **sizes: Any) -> Any:
    """A model with random weights that are large enough for every part to matter."""
    import transformers

    architecture, more = MODELS[name]
    cls = getattr(transformers, architecture)
    options = {**(more if name == "gpt2" else {**SIZES, **more}), **sizes}
    torch.manual_seed(0)
    model = cls(cls.config_class(**options)).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key or "ln_" in key:
                p.add_(0.3 * torch.randn(p.shape))
            else:
                p.normal_(std=0.5 if p.dim() == 1 or "wpe" in key else 1.5 * p.shape[-1] ** -0.5)
    return model


def core() -> tokenizers.Tokenizer:
    """Byte b is id b; then BOS and EOS."""
    made = make_tokenizer("bytes").core
    plain = tokenizers.Tokenizer(made.model)
    plain.pre_tokenizer, plain.decoder = made.pre_tokenizer, made.decoder
    plain.add_special_tokens(["<s>", "</s>"])
    plain.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])  # as Llama's
    return plain


def write(model: Any, folder: Path, bos: bool = True, **options: Any) -> None:
    """Write a model and a tokenizer of bytes as transformers does."""
    import transformers

    model.save_pretrained(folder, **options)
    roles = {"bos_token": "<s>"} if bos else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core(), eos_token="</s>", **roles).save_pretrained(folder)
    if not bos:
        text = (folder / "tokenizer.json").read_text().replace("<s>", "<start>")
        (folder / "tokenizer.json").write_text(text)


def save(name: str, folder: Path, **options: Any) -> Any:
    model = make(name)
    write(model, folder, **options)
    return model


def write_gguf(model: Any, path: Path, kind: str, architecture: str | None = None, words: str = "gpt2") -> float:
    """Write a GGUF file; rounds the weights of the model to those in it, and returns the largest change."""
    import gguf

    family = model.config.model_type
    writer = gguf.GGUFWriter(str(path), architecture or family)
    metadata(writer, model.config)
    tokens = [model_token(core(), i) for i in range(VOCABULARY)]
    writer.add_tokenizer_model(words)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * BYTES + [3, 3])
    writer.add_token_merges([])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), 2)
    changed = 0.0
    for name, p in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        t, turned = p.clone(), family == "gpt2" and p.dim() == 2 and ".h." in name
        t = t.t().contiguous() if turned else permuted(name, t, model.config)
        quantised = gguf.GGMLQuantizationType[kind if t.dim() == 2 and "wpe" not in name else "F32"]
        data = gguf.quants.quantize(t.numpy(), quantised)
        found = torch.from_numpy(gguf.quants.dequantize(data, quantised).copy()).view(t.shape)
        found = found.t() if turned else permuted(name, found, model.config, back=True)
        changed = max(changed, float((found - p).abs().max()))
        p.copy_(found)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=quantised)
    if "llama3" in str(getattr(model.config, "rope_parameters", "")):
        writer.add_tensor("rope_freqs.weight", divisors(model).numpy())
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return changed


def metadata(writer: Any, config: Any) -> None:
    writer.add_block_count(2)
    writer.add_context_length(LENGTH)
    if config.model_type == "gpt2":
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)


def permuted(name: str, t: Tensor, config: Any, back: bool = False) -> Tensor:
    """Llama's q and k with rotated pairs as neighbours, and back."""
    if config.model_type != "llama" or not ("q_proj" in name or "k_proj" in name):
        return t
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    split = (heads, t.shape[0] // heads // 2, 2) if back else (heads, 2, t.shape[0] // heads // 2)
    return t.reshape(*split, *t.shape[1:]).swapaxes(1, 2).reshape(t.shape).contiguous()


def divisors(model: Any) -> Tensor:
    """Of each rotary frequency, as llama.cpp stores them."""
    scaled = model.model.rotary_emb.inv_freq
    plain = model.config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
    return (plain / scaled).float()


def model_token(words: tokenizers.Tokenizer, i: int) -> str:
    token = words.id_to_token(i)
    assert token is not None
    return token
