"""LoRA adapters as tensors: merged into weights, and as folders of peft. Nothing here needs peft.

    adapter_config.json adapter_model.safetensors

In a checkpoint, as in the network that peft has changed, the layer `blocks.0.attn_qkv` has the weights
`blocks.0.attn_qkv.base_layer.weight`, `….lora_A.default.weight` and `….lora_B.default.weight`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..net.denoiser import Denoiser
from ..runtime import files

DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OUTSIDE = "base_model.model.net."
"""The prefix of the network in an adapter of a transformers model, which peft writes and expects."""
PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "use_dora": False, "lora_bias": False,
    "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip
"""What must be so in adapter_config.json, if it is there: the adapter adds scaling * B A to weights."""


class Adapter(NamedTuple):
    """The matrices of an adapter, named as in the network, and the weights that replace others."""

    lora: dict[str, Tensor]
    replaced: dict[str, Tensor]
    rank: int
    scaling: float

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a network with this adapter merged into them."""
        return merge({**weights, **self.replaced, **self.lora}, self.scaling)


def merge(state: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The weights of the plain network: W + scaling * B A where a layer has an adapter."""
    merged = {}
    for name, tensor in state.items():
        if name.endswith((DOWN, UP)):
            continue
        name = name.replace(".base_layer.", ".")
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and layer + DOWN in state:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            change = state[layer + UP].to(wide) @ state[layer + DOWN].to(wide)
            tensor = (tensor.to(wide) + scaling * change).to(tensor.dtype)
        merged[name] = tensor
    return merged


def apply(net: Denoiser, folder: Path) -> None:
    """Merge the adapter in `folder` into the weights of a network, in place."""
    weights = net.state_dict()
    net.load_state_dict(read(folder, weights).merged(weights))


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter of peft."""
    return (folder / CONFIG).is_file()


def write(folder: Path, state: Mapping[str, Tensor], tuning: Mapping[str, Any], base: str | None) -> None:
    """Write the adapter of a checkpoint into an existing folder, as peft does.

    state: of a network with adapters. tuning: the options of the run. base: the model that was tuned.
    """
    kept = {name: t for name, t in state.items() if name.endswith((DOWN, UP))}
    layers = {re.sub(r"^blocks\.\d+\.", "", name.removesuffix(DOWN)) for name in kept if name.endswith(DOWN)}
    saved = ["embed"] if tuning["embeddings"] else []
    kept |= {f"{name}.weight": state[f"{name}.weight"] for name in saved}
    alpha = tuning["alpha"]
    config = {
        **PLAIN,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": tuning["dropout"],
        "modules_to_save": saved or None,
        "r": tuning["rank"],
        "target_modules": sorted(layers),
        "task_type": None,
    }
    named = {OUTSIDE + name.replace(".default.", "."): t for name, t in kept.items()}
    files.save_tensors(folder / WEIGHTS, named, {"format": "pt"})
    files.write_json(folder / CONFIG, config, indent=2, sort_keys=True)


def read(folder: Path, weights: Mapping[str, Tensor]) -> Adapter:
    """Read an adapter for a network with these weights; raises ValueError if it is not LoRA, or of another network."""
    if not is_adapter(folder):
        raise ValueError(f"{folder} is not an adapter: it has no {CONFIG}. `esolm export` writes one from a LoRA run")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with (folder / WEIGHTS).open("rb"):  # safetensors does not say why it cannot open a file
            stored = load_file(folder / WEIGHTS)
        odd = [f"{key} is {config[key]!r}" for key, value in PLAIN.items() if (config.get(key) or value) != value]
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except OSError as error:
        raise files.unreadable(folder / WEIGHTS, error) from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the adapter in {folder} cannot be read ({error!r}): write it again") from error
    if odd:
        raise ValueError(f"the adapter in {folder} is not plain LoRA: {', '.join(odd)}. Merge it with peft instead")
    named = {_inside(name): tensor for name, tensor in stored.items()}
    lora = {name: tensor for name, tensor in named.items() if name.endswith((DOWN, UP))}
    replaced = {name: tensor for name, tensor in named.items() if name not in lora}
    if wrong := [*_misfits(lora, weights, rank), *_others(replaced, weights)]:
        raise ValueError(f"the adapter in {folder} is of another network: {'; '.join(wrong[:5])}. Give its own model")
    return Adapter(lora, replaced, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _inside(name: str) -> str:
    """The name in the network of a tensor of an adapter file."""
    name = name.removeprefix("base_model.model.").removeprefix("net.")
    return re.sub(r"\.lora_([AB])\.weight$", r".lora_\1.default.weight", name)


def _misfits(lora: Mapping[str, Tensor], weights: Mapping[str, Tensor], rank: int) -> list[str]:
    """The layers whose matrices do not fit the network, each with the reason."""
    wrong = []
    for layer in dict.fromkeys(name.removesuffix(DOWN).removesuffix(UP) for name in lora):
        expected = weights.get(f"{layer}.weight")
        found = [tuple(lora[layer + part].shape) if layer + part in lora else None for part in (DOWN, UP)]
        if expected is None:
            wrong.append(f"there is no layer {layer}")
        elif found != [(rank, expected.shape[1]), (expected.shape[0], rank)]:
            wrong.append(f"{layer} has the shape {tuple(expected.shape)} here, rank {rank}, and matrices {found} there")
    return wrong


def _others(replaced: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    fits = {name for name, t in replaced.items() if name in weights and weights[name].shape == t.shape}
    return [f"{name} has no such counterpart here" for name in replaced if name not in fits]
