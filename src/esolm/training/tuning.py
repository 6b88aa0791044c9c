"""Which weights of a network are trained: all, only those of queries, keys and values, or LoRA adapters."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.randomness import fold
from ..net.denoiser import Denoiser
from ..storage import adapters
from ..storage.adapters import DOWN, UP, Adapter

if TYPE_CHECKING:
    from .options import Tuning

LAYERS = ("attn_qkv", "attn_out", "mlp.0", "mlp.2")
"""The layers of a block that get adapters."""


def check(tuning: Tuning, init: str | None, adapter: str | None) -> None:
    """Raise ValueError if the options need a model or a package that is not there."""
    if adapter is not None and init is None:
        raise ValueError(f"adapter {adapter} needs the model that it was trained on: add --init MODEL")
    if tuning.parts != "all" and init is None:
        raise ValueError(f"tuning.parts {tuning.parts} trains a part of a model: add --init MODEL, or use all")
    if tuning.parts == "lora" and importlib.util.find_spec("peft") is None:
        raise ValueError("tuning.parts lora needs an extra package: pip install 'esolm[lora]'")


def read_adapter(folder: str, weights: dict[str, torch.Tensor], tuning: Tuning) -> Adapter:
    """The adapter to start from; raises ValueError if training cannot continue it with these options."""
    found = adapters.read(Path(folder), weights)
    if tuning.parts != "lora":
        return found  # to be merged
    alpha = found.scaling * found.rank
    if (found.rank, alpha) != (tuning.rank, tuning.alpha):
        raise ValueError(
            f"the adapter in {folder} has rank {found.rank} and alpha {alpha:g}, not {tuning.rank} and "
            f"{tuning.alpha:g}: give --tuning.rank {found.rank} --tuning.alpha {alpha:g}, or merge it first with "
            f"`esolm export MODEL OUT --adapter {folder}`"
        )
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    layers = {f"blocks.{block}.{layer}" for block in blocks for layer in LAYERS}
    if found.lora.keys() != {layer + part for layer in layers for part in (DOWN, UP)}:
        raise ValueError(
            f"the adapter in {folder} has other layers than {', '.join(LAYERS)} of every block: merge it first with "
            f"`esolm export MODEL OUT --adapter {folder}`"
        )
    if found.replaced and not tuning.embeddings:
        raise ValueError(f"the adapter in {folder} has a trained embedding: add --tuning.embeddings")
    return found


def prepare(net: Denoiser, tuning: Tuning, seed: int, adapter: Adapter | None = None) -> None:
    """Freeze what is not trained, and add LoRA adapters, in place.

    Initial adapters depend only on the seed and change no output, or are those of `adapter`.
    """
    if tuning.parts == "all":
        return
    if tuning.parts == "lora":
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(fold(seed, "adapter") >> 1)
        options: dict[str, Any] = {"r": tuning.rank, "lora_alpha": tuning.alpha, "lora_dropout": tuning.dropout}
        inject_adapter_in_model(LoraConfig(**options, target_modules=list(LAYERS)), net)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(_is_trained(name, tuning))
    if adapter is not None:
        net.load_state_dict({**adapter.lora, **adapter.replaced}, strict=False)


def _is_trained(name: str, tuning: Tuning) -> bool:
    if name.startswith("embed."):
        return tuning.embeddings
    return name.endswith((DOWN, UP)) if tuning.parts == "lora" else ".attn_qkv." in name


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def count(net: Denoiser, tuning: Tuning) -> tuple[int, int]:
    """The number of trained parameters, and of those that adapters add to the network."""
    if tuning.parts == "all":
        return sum(p.numel() for p in net.parameters()), 0
    added = 0
    if tuning.parts == "lora":
        adapted = tuple(f".{layer}.weight" for layer in LAYERS)
        shapes = [p.shape for name, p in net.named_parameters() if name.endswith(adapted)]
        added = sum(tuning.rank * (outputs + inputs) for outputs, inputs in shapes)
    return added + sum(p.numel() for name, p in net.named_parameters() if _is_trained(name, tuning)), added
