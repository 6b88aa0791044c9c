"""Toy networks and systems that the tests share.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from esolm import systems
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.net.denoiser import Denoiser, DenoiserConfig
from esolm.sampling.options import SamplingOptions
from esolm.sampling.request import Request

COUNTS = " ".join(["900 5 31 200 12 7 0 1"] * 40)
"""Of the tokens of a toy vocabulary, for systems that need to know what is frequent."""
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "ar": {"ar": {}},
    "d3pm": {
        "d3pm-absorb": {},
        "d3pm-uniform": {"noise": "uniform", "num_steps": 16, "schedule": "cosine", "hybrid": 0.01},
    },
    "diffusionbert": {
        "diffusionbert-plain": {"num_steps": 16},
        "diffusionbert": {"num_steps": 16, "token_counts": COUNTS},
    },
    "sedd": {"sedd-absorb": {}, "sedd-uniform": {"noise": "uniform"}},
    "diffusion_lm": {
        "diffusion_lm": {"num_steps": 130, "latent_width": 6},
        "diffusion_lm-word": {"num_steps": 8, "latent_width": 4, "variance": "word", "loss": "bound"},
    },
    "duo": {"duo-curriculum": {"curriculum_end": 4, "tau_start": 0.1}, "duo": {}},
    "bd3lm": {"bd3lm-4": {"block_size": 4}, "bd3lm-1": {"block_size": 1}, "bd3lm-8": {"block_size": 8}},
    "esolm": {
        "esolm-B-0.5": {"alpha_0": 0.5},
        "esolm-B-0": {"alpha_0": 0.0},
        "esolm-B-1": {"alpha_0": 1.0},
        "esolm-A-0.5": {"alpha_0": 0.5, "variant": "A"},
        "esolm-A-1": {"alpha_0": 1.0, "variant": "A"},
        "esolm-any-0.5": {"alpha_0": 0.5, "loss": "any_order"},
        "esolm-any-1": {"alpha_0": 1.0, "loss": "any_order"},
        "esolm-shift-0.5": {"alpha_0": 0.5, "query": "shift", "first": "bos", "bos_id": 1},
        "esolm-shift-0": {"alpha_0": 0.0, "query": "shift"},
        "esolm-shift-A-0.5": {"alpha_0": 0.5, "variant": "A", "query": "shift"},
        "esolm-shift-any-0.5": {"alpha_0": 0.5, "loss": "any_order", "query": "shift"},
        "esolm-shift-any-1": {"alpha_0": 1.0, "loss": "any_order", "query": "shift", "first": "bos", "bos_id": 1},
    },
}
"""Options worth a test of their own; a system that is not named here is tested as it comes."""

LENGTH = 8


def variants() -> list[tuple[str, str, dict[str, Any]]]:
    """(a label, the system's name, its options) of every system in the package."""
    found = []
    for name in systems.names():
        for label, options in VARIANTS.get(name, {name: {}}).items():
            found.append((label, name, options))
    return found


def untimed() -> list[tuple[str, str, dict[str, Any]]]:
    """The variants whose networks are not fed the time, so that they can be folded."""
    return [(label, name, options) for label, name, options in variants() if not make(name, 4, **options).timed]


def one_of_each() -> dict[str, dict[str, Any]]:
    """The options of one variant of every system in the package, by its name: the first that is named here."""
    return {name: options for _, name, options in reversed(variants())}


def flags(options: dict[str, Any]) -> list[str]:
    """The options of a system on the command line."""
    return [f"--system.{key}={value}" for key, value in options.items()]


def make(name: str, mask_id: int, **options: Any) -> Any:
    """A system whose mask is the last id, as in `network`."""
    made = systems.find(name)
    if "vocab_size" in {field.name for field in dataclasses.fields(made)}:
        options = {"vocab_size": mask_id + 1, **options}
    return made(mask_id=mask_id, **options)


def randomised(net: Denoiser, seed: int = 0) -> Denoiser:
    """Every parameter random and of visible size: nothing holds because something is zero, and context matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            fan_in = p.shape[-1] if p.dim() > 1 and name not in ("embed.weight", "places.weight") else 1
            scale = next((scale for part, scale in SCALES.items() if part in name), 1.0)
            p.copy_(1 + 0.3 * noise if "norm" in name and "bias" not in name else scale * noise / fan_in**0.5)
    return net.eval()


SCALES = {"attn_qkv": 1.5, "attn_out": 3.0, "modulation": 0.7, "bias": 0.3}
"""Strong attention and weak biases."""


SHAPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "llama": {
        "adaln": False, "heads": 4, "kv_heads": 2, "head_width": 6, "mlp_width": 11, "mlp": "swiglu", "norm": "rms",
        "mlp_bias": False, "head_bias": False, "tied": True, "rotary_factor": 8.0, "rotary_length": 16,
    },
    "qwen": {
        "adaln": False, "heads": 4, "kv_heads": 1, "head_width": 6, "mlp_width": 11, "mlp": "swiglu", "norm": "rms",
        "mlp_bias": False, "head_bias": False, "qk_norm": True, "qkv_bias": True, "rotary_factor": 2.0,
    },
    "gpt2": {
        "adaln": False, "norm_bias": True, "qkv_bias": True, "out_bias": True, "head_bias": False, "tied": True,
        "positions": "learned",
    },
    "gqa with AdaLN": {"heads": 4, "kv_heads": 2, "norm": "rms", "mlp": "swiglu", "qk_norm": True, "tied": True},
}  # fmt: skip
"""Options of the network: the paper's, those of other families, and all parts of theirs together with AdaLN."""
FAMILIES = {name: SHAPES[name] for name in ("paper", "llama", "qwen", "gpt2")}


def fitting(system: Any, vocab_size: int = 7, length: int = LENGTH, *more: Any, **sizes: Any) -> Denoiser:
    """A `network` that this system can train."""
    return network(vocab_size, length, *more, latent_width=system.latent_width, **sizes)


def network(
    vocab_size: int = 7,
    length: int = LENGTH,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **sizes: Any,
) -> Denoiser:
    """A network with random parameters; the mask is the last id of its vocabulary."""
    sizes = {"layers": 2, "width": 16, "heads": 2, "cond_width": 4, "dropout": 0.0, "mlp_ratio": 2, **sizes}
    return randomised(Denoiser(DenoiserConfig(vocab_size, length, **sizes)).to(dtype), seed)


def text(batch: int, length: int = LENGTH, vocab_size: int = 7, seed: int = 0) -> Tensor:
    """Random tokens, never the mask: [B, L]."""
    return torch.randint(vocab_size - 1, (batch, length), generator=torch.Generator().manual_seed(seed))


def permutations(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random orders [B, L]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(length, generator=generator) for _ in range(batch)])


def padding(batch: int, length: int, seed: int = 0) -> Tensor:
    """Which tokens are valid, of every length from one on, padded on the right: bool [B, L]."""
    ends = torch.randint(1, length + 1, (batch,), generator=torch.Generator().manual_seed(seed))
    ends[0] = length
    return torch.arange(length) < ends[:, None]


def values(found: Any, net: Denoiser, x: Tensor, rng: Randomness, train: bool, **kept: Tensor) -> dict[str, Tensor]:
    """The nats of every term by name; kept: valid and given, where there are any."""
    terms = found.terms(net, Batch(x, kept.get("valid"), kept.get("given")), rng, train)
    return {term.name: term.nats for term in terms}


def weights(found: Any, net: Denoiser, x: Tensor, rng: Randomness, train: bool, **kept: Tensor) -> dict[str, Tensor]:
    """The weight of every token in every term, zero where it is not scored: a network that knows nothing gives
    log(V - 1) nats to each token."""
    blank = Denoiser(dataclasses.replace(net.config)).to(net.embed.weight.dtype)
    torch.nn.init.zeros_(blank.head.weight)  # also of a tied one
    size = torch.tensor(net.config.vocab_size - 1.0, dtype=torch.float64)
    return {name: nats.detach() / size.log() for name, nats in values(found, blank, x, rng, train, **kept).items()}


def request(x: Tensor, given: Tensor, valid: Tensor, draw: Any = None, order: Any = None, **options: Any) -> Request:
    """A request whose draw and order may be objects of the test; the rest are sampling options."""
    return Request(x, given, valid, SamplingOptions(**options), draw, order)


def changed(asked: Request, **changes: Any) -> Request:
    """The request with other tensors, another draw or order, or other sampling options."""
    own = {name: changes.pop(name) for name in ("x", "given", "valid", "draw", "order") if name in changes}
    return dataclasses.replace(asked, options=dataclasses.replace(asked.options, **changes), **own)
