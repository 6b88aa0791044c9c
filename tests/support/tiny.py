"""Data, commands and systems so small that a run takes a second. As a script: a run that kills itself."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from esolm import cli
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import Term
from esolm.data.manifest import Manifest, Shard, Split
from esolm.data.tokenizer import tokenizer
from esolm.net.protocol import Forward
from esolm.storage import checkpoint
from esolm.systems import System
from esolm.systems.mdlm import MDLM
from esolm.training import trainer

LENGTH = 16


def make_data(folder: Path, seed: int = 0, length: int = LENGTH) -> Path:
    """Prepared data of random bytes: 64 sequences to train on and 5 to validate."""
    folder.mkdir(parents=True)
    text = tokenizer("bytes")
    text.save(folder)
    rng = np.random.default_rng(seed)
    splits = {}
    for name, n in (("train", 64), ("valid", 5)):
        rows = rng.integers(97, 105, (n, length)).astype("<u2")
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
        shard = Shard(f"{name}.bin", n, hashlib.sha256(rows.tobytes()).hexdigest())
        splits[name] = Split(n, 0, n, rows.size, 0, rows.size, (shard,))
    ids = (text.vocab_size, text.mask_id, text.eos_id, text.bos_id)
    Manifest("random", "bytes", text.sha256, *ids, length, "wrap", splits, {}).save(folder)
    return folder


def interrupt_after(monkeypatch, step: int, number: int = signal.SIGINT) -> None:
    """Raise the signal in the middle of a step."""
    original = trainer.accumulate

    def interrupted(net, system, source, index, *rest):
        if index == step - 1:
            signal.raise_signal(number)
        return original(net, system, source, index, *rest)

    monkeypatch.setattr(trainer, "accumulate", interrupted)


def command(data: Path, run: Path, *more: str) -> list[str]:
    """The words of `esolm train` for 12 logged steps, with validation and a checkpoint every 4."""
    options = {
        "data": data, "run": run, "steps": 12, "log_every": 1, "net.layers": 2, "net.width": 16, "net.heads": 2,
        "net.cond_width": 8, "net.dropout": 0.1, "batch.size": 8, "batch.micro": 4, "optim.lr": 0.01,
        "optim.warmup": 2, "optim.schedule": "constant", "validation.every": 4, "validation.batch_size": 4,
        "saving.every": 4, "compute.threads": 1, "compute.precision": "float32", "compute.device": "cpu",
    }  # fmt: skip
    return ["train", "demo", *(f"--{key}={value}" for key, value in options.items()), *more]


def outcome(run: Path) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """All tensors of the last checkpoint, and the records of metrics.jsonl without their times."""
    folder = checkpoint.latest(run / "checkpoints")
    assert folder is not None
    tensors = {f"{path.stem}/{k}": t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return tensors, [{key: value for key, value in record.items() if key != "time"} for record in records]


def assert_same(one: Path, other: Path) -> None:
    """Check that both runs ended with the same bits."""
    (a, a_records), (b, b_records) = outcome(one), outcome(other)
    assert a_records == b_records
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


def contents(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@dataclass(frozen=True)
class Exploding(System):
    """MDLM with a second term that is NaN from the given training call on."""

    at: int = 6
    mask_id: int = -1
    calls: ClassVar = [0]
    samplers: ClassVar = {}

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return {"diffusion": int(scored.sum()), "wild": int(scored.sum())}

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        self.calls[0] += train
        (calm,) = MDLM(mask_id=self.mask_id).terms(net, batch, rng, train)
        wild = calm.nats * (float("nan") if self.calls[0] >= self.at else 1.0)
        return [calm, Term("wild", wild, calm.valid)]


def kill_inside(function: str, call: int) -> None:
    """Kill this process after the n-th call of the named function of checkpoint.py."""
    original, calls = getattr(checkpoint, function), [0]

    def deadly(*args, **kwargs):
        result = original(*args, **kwargs)
        calls[0] += 1
        if calls[0] >= call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(checkpoint, function, deadly)


if __name__ == "__main__":
    if sys.argv[1] != "-":
        kill_inside(sys.argv[1], int(sys.argv[2]))
    sys.exit(cli.main(sys.argv[3:]))
