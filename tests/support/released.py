"""Our weights under the released names, as the authors' code loads them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from esolm.interop.released import NAMES, ROTARY, rotary
from esolm.net.denoiser import DenoiserConfig


def released_name(name: str) -> str:
    """The inverse of `our_name`."""
    for theirs, ours in NAMES:
        if name.startswith(ours) or (ours.startswith(".") and ours in name):
            return name.replace(ours, theirs)
    return name


def to_released(state: Mapping[str, Tensor], config: DenoiserConfig, prefix: str = "backbone.") -> dict[str, Tensor]:
    """A state dict of ours with the released names and order and the rotary buffer."""
    places = ("embed.", "time.", ROTARY, "blocks.", "norm.", "head.", "modulation.")
    every = {**state, ROTARY: rotary(config, state["embed.weight"].device)}
    order = sorted(every, key=lambda name: next(i for i, place in enumerate(places) if name.startswith(place)))
    return {prefix + released_name(name): every[name] for name in order}
