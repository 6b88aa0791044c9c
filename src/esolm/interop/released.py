"""What a released checkpoint of this family is: its names and ours, its network, and the system that it says it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Tokenizer
from ..net.denoiser import Denoiser, DenoiserConfig
from ..storage import folder
from ..systems import System, find

SYSTEMS = ("ar", "mdlm", "bd3lm", "esolm")
NAMES = (
    ("vocab_embed.embedding", "embed.weight"),
    ("sigma_map.mlp.", "time."),
    ("output_layer.norm_final.", "norm."),
    ("output_layer.linear.", "head."),
    ("output_layer.adaLN_modulation.", "modulation."),
    (".adaLN_modulation.", ".modulation."),
)
"""Parts of the released names and of ours."""
ROTARY = "rotary_emb.inv_freq"
BUFFERS = (ROTARY, "sampling_eps_min", "sampling_eps_max")
"""What a released state holds besides parameters."""


MODES = {"B": {"diffusion": "causal", "sequential": "causal"}, "A": {"diffusion": "mixed2", "sequential": "mixed"}}
"""Attention patterns of the variants of Eso-LM, as its repository calls them."""


@dataclass(frozen=True)
class Source:
    """A released checkpoint: its state in the released names, in the order of its parameters, and what it says."""

    path: Path
    state: dict[str, Tensor]
    config: dict[str, Any]  # dotted keys
    tokenizer: Tokenizer | None
    about: dict[str, Any] = field(default_factory=dict)


def our_name(name: str) -> str:
    """`blocks.0.adaLN_modulation.bias` -> `blocks.0.modulation.bias`."""
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def released_name(name: str) -> str:
    """The inverse of `our_name`."""
    for theirs, ours in NAMES:
        if name.startswith(ours) or (ours.startswith(".") and ours in name):
            return name.replace(ours, theirs)
    return name


def to_released(state: Mapping[str, Tensor], config: DenoiserConfig, prefix: str = "backbone.") -> dict[str, Tensor]:
    """A state of ours in the released names and order, with the rotary buffer: what the authors' code loads."""
    places = ("embed.", "time.", ROTARY, "blocks.", "norm.", "head.", "modulation.")
    every = {**state, ROTARY: rotary(config, state["embed.weight"].device)}
    order = sorted(every, key=lambda name: next(i for i, place in enumerate(places) if name.startswith(place)))
    return {prefix + released_name(name): every[name] for name in order}


def rotary(config: DenoiserConfig, device: torch.device) -> Tensor:
    """The frequencies of the rotary embedding, which the released networks keep as a buffer."""
    width = config.width // config.heads
    return config.rotary_base ** -(torch.arange(0, width, 2, device=device) / width)


def make_net(found: Source) -> Denoiser:
    """The network of a source, its sizes read from the tensors and compared with what the source says."""
    state, said = found.state, _said(found)
    ours = {our_name(name): tensor for name, tensor in state.items() if not name.endswith(BUFFERS)}
    for name, dims in {"embed.weight": 2, "blocks.0.mlp.0.weight": 2}.items():
        if name not in ours or ours[name].dim() != dims:
            raise ValueError(
                f"{found.path} has no {released_name(name)}: it is not of this family. It has {', '.join(state)!s:.200}"
            )
    size, width = ours["embed.weight"].shape
    layers = 1 + max(int(match[1]) for name in ours if (match := re.match(r"blocks\.(\d+)\.", name)))
    sizes: dict[str, Any] = {
        "vocab_size": size,
        "width": width,
        "layers": layers,
        "mlp_ratio": ours["blocks.0.mlp.0.weight"].shape[0] // width,
        "adaln": any(name.startswith("time.") for name in ours),
    }
    if sizes["adaln"]:
        sizes["cond_width"] = ours["time.2.weight"].shape[0] if "time.2.weight" in ours else 1
    if ROTARY in state:
        sizes["heads"] = width // (2 * state[ROTARY].shape[0])
    for name in ("vocab_size", "width", "layers", "heads", "cond_width"):
        if name in said and name in sizes and said[name] != sizes[name]:
            raise ValueError(f"{found.path} says {name} is {said[name]}, and its tensors say {sizes[name]}")
    missing = [name for name in ("heads", "length") if name not in sizes and name not in said]
    if missing:
        raise ValueError(f"{found.path} does not say {' and '.join(missing)}: its configuration is not complete")
    sizes = {"heads": said.get("heads"), **sizes}
    config = DenoiserConfig(length=said["length"], dropout=said.get("dropout", 0.1), **sizes)
    net = Denoiser(config)
    folder.take(net, ours, found.path)
    if ROTARY in state:
        theirs = state[ROTARY].float()
        if not torch.allclose(theirs, rotary(config, theirs.device), rtol=1e-4):
            raise ValueError(f"{found.path} has another rotary embedding than base {config.rotary_base:g}")
    return net.eval()


def _said(found: Source) -> dict[str, Any]:
    """Sizes that the source names, by our names; those of Lightning stand under `model.`."""
    names = {
        "width": ("hidden_size", "hidden_dim"), "layers": ("n_blocks",), "heads": ("n_heads",),
        "cond_width": ("cond_dim",), "length": ("model_length", "length"), "vocab_size": ("vocab_size",),
        "dropout": ("dropout",),
    }  # fmt: skip
    said: dict[str, Any] = {}
    for ours, theirs in names.items():
        values = [found.config.get(f"{place}{name}") for name in theirs for place in ("model.", "")]
        values = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if values:
            said[ours] = values[0]
    if not found.state.keys() & {"sigma_map.mlp.0.weight"}:
        said.pop("cond_width", None)
    return said


def make_system(found: Source, asked: Mapping[str, Any]) -> System:
    """The system that the source says it is or, where it says nothing, that was asked for; never a guess."""
    said = stated(found)
    options = {}
    for key, value in {**dict.fromkeys(asked), **said}.items():
        if value is not None and asked.get(key) is not None and asked[key] != value:
            raise ValueError(f"{key} {asked[key]!r} was asked for, and {found.path} says {value!r}: leave it out")
        options[key] = asked.get(key) if value is None else value
    name = options.pop("name")
    if name is None:
        raise ValueError(f"{found.path} does not say what system it is: give --system, one of {', '.join(SYSTEMS)}")
    wanted = {"esolm": ("alpha_0", "variant"), "bd3lm": ("block_size",)}.get(name, ())
    for key, value in options.items():
        if key in wanted and value is None:
            raise ValueError(f"{found.path} does not say its {key}, and {name} needs it: give --{key}")
        if key in asked and key not in wanted and value is not None:
            raise ValueError(f"{key} is {value!r}; {name} has none: leave --{key} out")
    made = {key: value for key, value in options.items() if value is not None}
    if name == "ar":  # the released ones begin with the beginning of text, unless they say otherwise
        made.setdefault("first", "bos")
    return find(name)(**made)


def stated(found: Source) -> dict[str, Any]:
    """Name and options of the system, as far as the stored configuration says them."""
    config, path = found.config, found.path
    kind = config.get("algo.name") or config.get("model_type")
    if kind is None:  # the MDLM repository: by its parameterization
        kind = {"subs": "mdlm"}.get(config.get("parameterization", ""), config.get("parameterization"))
    if kind is None:
        return {}
    name = str(kind).lower()
    if name == "bd3lm" and config.get("causal") is True:
        name = "ar"
    if name.startswith(("duo", "distillation", "ot-finetune")):
        raise ValueError(f"{path} is of Duo ({kind!r}), which esolm does not have: choose {', '.join(SYSTEMS)}")
    if name not in SYSTEMS or config.get("diffusion", "absorbing_state") != "absorbing_state":
        raise ValueError(f"{path} is of system {kind!r}, which esolm does not have: choose {', '.join(SYSTEMS)}")
    for key in ("algo.time_conditioning", "time_conditioning"):
        if config.get(key) is True:
            raise ValueError(f"{path} was trained with {key}: esolm has networks whose time is zero")
    said: dict[str, Any] = {"name": name}
    if name == "bd3lm":
        said["block_size"] = _resolved(config, "block_size")
    if name == "ar" and config.get("algo.prepend_token") in ("mask", "bos"):
        said["first"] = config["algo.prepend_token"]
    if name == "esolm" and "algo.alpha_0" in config:
        said |= {"alpha_0": float(config["algo.alpha_0"]), **_variant(path, config)}
    return said


def _resolved(config: Mapping[str, Any], key: str) -> Any:
    """A value; of an interpolation, that of the key which it names."""
    value = config.get(key)
    match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return config.get(match[1]) if match else value


def _variant(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A or B, by the attention patterns of the phases that there are; and kappa."""
    said, alpha_0 = {key.removeprefix("algo."): value for key, value in config.items()}, float(config["algo.alpha_0"])
    used = [name for name, there in (("diffusion", alpha_0 > 0), ("sequential", alpha_0 < 1)) if there]
    fits = [v for v, modes in MODES.items() if all(said.get(f"{name}_attn_mode") == modes[name] for name in used)]
    ordered = alpha_0 > 0 and said.get("diffusion_shuffle") is not True
    ordered |= fits == ["B"] and 0 < alpha_0 < 1 and said.get("sequential_shuffle") is not True
    if not fits or ordered or said.get("keep_clean_unshuffled") or said.get("keep_masks_unshuffled"):
        found = {key: value for key, value in said.items() if key.endswith(("_attn_mode", "shuffle", "unshuffled"))}
        raise ValueError(f"{path} is neither variant A nor B of the paper: it was trained with {found}")
    kappa = said.get("batch_split")
    options: dict[str, Any] = {"variant": fits[0]}
    if isinstance(kappa, float) and 0 < kappa < 1 and 0 < alpha_0 < 1:
        options["kappa"] = kappa
    return options
