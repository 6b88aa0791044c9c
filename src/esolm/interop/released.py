"""Released checkpoints of this family: parameter names, network sizes, and the system in the stored configuration."""

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
from ..net.rotary import frequencies
from ..storage import folder
from ..systems import System, find
from .families import CausalCheckpoint

SYSTEMS = ("ar", "mdlm", "bd3lm", "esolm", "udlm", "duo", "sedd")
UNIFORM = ("udlm", "duo")
"""Systems with uniform noise, which ranges over all ids, the mask or padding included."""
TIMED = (*UNIFORM, "sedd")
"""Systems whose networks are fed the time."""
NAMES = (
    ("vocab_embed.embedding", "embed.weight"),
    ("sigma_map.mlp.", "time."),
    ("output_layer.norm_final.", "norm."),
    ("output_layer.linear.", "head."),
    ("output_layer.adaLN_modulation.", "modulation."),
    (".adaLN_modulation.", ".modulation."),
)
"""Parts of the released parameter names and of ours."""
ROTARY = "rotary_emb.inv_freq"
BUFFERS = (ROTARY, "sampling_eps_min", "sampling_eps_max")
"""Entries of a released state dict that are not parameters."""
MODES = {"B": {"diffusion": "causal", "sequential": "causal"}, "A": {"diffusion": "mixed2", "sequential": "mixed"}}
"""Attention patterns of the variants of Eso-LM, named as in its repository."""


@dataclass(frozen=True)
class ReleasedCheckpoint:
    """A state dict with the released names, in parameter order, and the stored configuration."""

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


def rotary(config: DenoiserConfig, device: torch.device) -> Tensor:
    """The frequencies of the rotary embedding, a buffer in the released networks."""
    return frequencies(config, torch.float32, device)


def make_net(found: ReleasedCheckpoint) -> Denoiser:
    """The network of a checkpoint. Its sizes come from the tensors and must agree with the stored configuration."""
    state, stated_sizes = found.state, _stated_sizes(found)
    for name in ("vocab_embed.embedding", "blocks.0.mlp.0.weight"):
        if name not in state or state[name].dim() != 2:
            raise ValueError(
                f"{found.path} has no matrix {name}: it is not of this family. It has {', '.join(state)!s:.200}"
            )
    ours = {our_name(name): tensor for name, tensor in state.items() if not name.endswith(BUFFERS)}
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
        if name in stated_sizes and name in sizes and stated_sizes[name] != sizes[name]:
            raise ValueError(
                f"the configuration of {found.path} has {name} {stated_sizes[name]}, and its tensors have "
                f"{sizes[name]}: they belong to different networks"
            )
    missing = [name for name in ("heads", "length") if name not in sizes and name not in stated_sizes]
    if missing:
        raise ValueError(f"{found.path} does not name {' and '.join(missing)}: its configuration is incomplete")
    sizes = {"heads": stated_sizes.get("heads"), **sizes}
    config = DenoiserConfig(length=stated_sizes["length"], dropout=stated_sizes.get("dropout", 0.1), **sizes)
    net = Denoiser(config)
    folder.take(net, ours, found.path)
    if ROTARY in state:
        theirs = state[ROTARY].float()
        if not torch.allclose(theirs, rotary(config, theirs.device), rtol=1e-4):
            raise ValueError(f"{found.path} has a rotary embedding with a base other than {config.rotary_base:g}")
    return net.eval()


def _stated_sizes(found: ReleasedCheckpoint) -> dict[str, Any]:
    """The sizes in the stored configuration, by our names; Lightning's are under `model.`."""
    names = {
        "width": ("hidden_size", "hidden_dim"), "layers": ("n_blocks",), "heads": ("n_heads",),
        "cond_width": ("cond_dim",), "length": ("model_length", "length"), "vocab_size": ("vocab_size",),
        "dropout": ("dropout",),
    }  # fmt: skip
    stored: dict[str, Any] = {}
    for ours, theirs in names.items():
        values = [found.config.get(f"{place}{name}") for name in theirs for place in ("model.", "")]
        values = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if values:
            stored[ours] = values[0]
    if not found.state.keys() & {"sigma_map.mlp.0.weight"}:
        stored.pop("cond_width", None)
    return stored


def make_system(found: ReleasedCheckpoint | CausalCheckpoint, chosen: Mapping[str, Any]) -> System:
    """The system named in the stored configuration or else in the options; never a guess."""
    stored = {"name": "ar", "first": "bos"} if isinstance(found, CausalCheckpoint) else stated(found)
    options = {}
    for key, value in {**dict.fromkeys(chosen), **stored}.items():
        if value is not None and chosen.get(key) is not None and chosen[key] != value:
            option = "system" if key == "name" else key
            raise ValueError(f"--{option} is {chosen[key]!r}, and in {found.path} {value!r}: leave it out")
        options[key] = chosen.get(key) if value is None else value
    name = options.pop("name")
    if name is None:
        raise ValueError(f"{found.path} does not name its system: give --system, one of {', '.join(SYSTEMS)}")
    wanted = {"esolm": ("alpha_0", "variant"), "bd3lm": ("block_size",)}.get(name, ())
    for key, value in options.items():
        if key in wanted and value is None:
            raise ValueError(f"{found.path} does not name its {key}, which {name} needs: give --{key}")
        if key in chosen and key not in wanted and value is not None:
            raise ValueError(f"{key} is {value!r}, but {name} has no {key}: leave --{key} out")
    made = {key: value for key, value in options.items() if value is not None}
    if name in UNIFORM or made.get("noise") == "uniform":
        made["noise_mask"] = True
    if name == "ar":  # released ones start with the beginning-of-text token unless the configuration says otherwise
        made.setdefault("first", "bos")
    return find(name)(**made)


def stated(found: ReleasedCheckpoint) -> dict[str, Any]:
    """The name and options of the system that the stored configuration has."""
    config, path = found.config, found.path
    kind = config.get("algo.name") or config.get("model_type")
    if kind is None and "graph.type" in config:  # the SEDD repository names its process
        kind = "sedd"
    if kind is None:  # the MDLM repository stores a parameterization
        kind = {"subs": "mdlm"}.get(config.get("parameterization", ""), config.get("parameterization"))
    if kind is None:
        return {}
    name = _name(config, str(kind).lower())
    process = "uniform" if name in UNIFORM else "absorbing_state"
    if name not in SYSTEMS or config.get("diffusion", process) != process:
        raise ValueError(f"{path} has the system {kind!r}, which esolm does not support: choose {', '.join(SYSTEMS)}")
    for key in ("algo.time_conditioning", "time_conditioning"):
        if (stated_time := config.get(key)) is not None and bool(stated_time) is not (name in TIMED):
            raise ValueError(f"{path} was trained with {key} {stated_time}, which esolm does not support for {name}")
    stored: dict[str, Any] = {"name": name}
    if name == "bd3lm":
        stored["block_size"] = _resolved(config, "block_size")
    if name == "sedd":
        stored |= _sedd(path, config)
    if name == "ar" and config.get("algo.prepend_token") in ("mask", "bos"):
        stored["first"] = config["algo.prepend_token"]
    if name == "esolm" and "algo.alpha_0" in config:
        stored |= {"alpha_0": float(config["algo.alpha_0"]), **_variant(path, config)}
    return stored


def _name(config: Mapping[str, Any], kind: str) -> str:
    """Our name of a system. Duo's names have suffixes for stages of training, all of one process and network."""
    if kind == "bd3lm" and config.get("causal") is True:
        return "ar"
    if kind in ("duo_base", "distillation"):
        return "duo"
    discrete = config.get("T") or 0  # the number of steps; 0 is continuous time
    if kind == "d3pm" and config.get("diffusion") == "uniform" and not discrete:
        return "udlm"  # in its repository, a parameterization of one system
    return kind


def _sedd(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Process and schedule of SEDD; in other repositories it is absorbing and log-linear."""
    noise, schedule = config.get("graph.type", "absorb"), config.get("noise.type", "loglinear")
    if noise not in ("absorb", "uniform") or schedule not in ("loglinear", "geometric"):
        raise ValueError(
            f"{path} has the process {noise!r} and the schedule {schedule!r}, which esolm does not support"
        )
    if config.get("model.scale_by_sigma", noise == "absorb") is not (noise == "absorb"):
        raise ValueError(
            f"{path} was trained with another scale_by_sigma than the authors', which esolm does not support"
        )
    stored = {"noise": noise, "schedule": schedule}
    for key in ("sigma_min", "sigma_max") if schedule == "geometric" else ():
        if f"noise.{key}" in config:
            stored[key] = float(config[f"noise.{key}"])
    return stored


def _resolved(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key, with an interpolation resolved."""
    value = config.get(key)
    match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return config.get(match[1]) if match else value


def _variant(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The variant, A or B, by the attention patterns of the phases in use; and kappa."""
    stored, alpha_0 = {key.removeprefix("algo."): value for key, value in config.items()}, float(config["algo.alpha_0"])
    used = [name for name, there in (("diffusion", alpha_0 > 0), ("sequential", alpha_0 < 1)) if there]
    fits = [v for v, modes in MODES.items() if all(stored.get(f"{name}_attn_mode") == modes[name] for name in used)]
    ordered = alpha_0 > 0 and stored.get("diffusion_shuffle") is not True
    ordered |= fits == ["B"] and 0 < alpha_0 < 1 and stored.get("sequential_shuffle") is not True
    if not fits or ordered or stored.get("keep_clean_unshuffled") or stored.get("keep_masks_unshuffled"):
        found = {key: value for key, value in stored.items() if key.endswith(("_attn_mode", "shuffle", "unshuffled"))}
        raise ValueError(f"{path} is neither variant A nor B of the paper: it was trained with {found}")
    kappa = stored.get("batch_split")
    options: dict[str, Any] = {"variant": fits[0]}
    if isinstance(kappa, float) and 0 < kappa < 1 and 0 < alpha_0 < 1:
        options["kappa"] = kappa
    return options
