"""Run folders with random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from esolm.data.tokenizer import tokenizer
from esolm.storage import checkpoint
from support import toy


def make_run(folder: Path, name: str = "esolm", seed: int = 0, length: int = 8, **options: Any) -> Path:
    """A run folder as `esolm train` leaves it, with random weights."""
    text = tokenizer("bytes")
    system = toy.make(name, text.mask_id, **options)
    net = toy.fitting(system, text.vocab_size, length, torch.float32, seed, layers=1)
    identity = {"net": dataclasses.asdict(net.config), "system": {"name": name, **dataclasses.asdict(system)}}
    tensors = {"model": net.state_dict(), "ema": net.state_dict()}
    checkpoint.save(folder / "checkpoints", 1, tensors, {"identity": identity, "metric": None}, 1)
    text.save(folder)
    return folder
