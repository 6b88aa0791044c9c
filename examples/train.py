"""Train a small Eso-LM from Python, watch its metrics, and sample from it.

    python examples/train.py [STEPS] [FOLDER]

The corpus is the documentation of the running Python, so nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import esolm
from esolm.data import prepare

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 750
folder = Path(sys.argv[2] if len(sys.argv) > 2 else "example")

prepare("pydocs", folder / "data", tokenizer="bpe:384", length=64)

config = esolm.RunConfig.preset(
    "demo",
    data=folder / "data",
    run=folder / "run",
    steps=steps,
    optim={"lr": 4e-3},
    validation={"every": 50, "batches": 4},
)


def watch(record: dict[str, Any]) -> None:
    """Print each validation."""
    if "validation" in record:
        print(f"step {record['step']}: perplexity {record['validation']['perplexity']:.1f}")


outcome = esolm.Trainer(config, quiet=True).fit(callbacks=[watch])
print(f"trained {outcome.step} steps; the checkpoint is {outcome.checkpoint}")

lm = esolm.load(folder / "run")
print(lm.sample("The ", alpha_0=1.0, num_steps=16, seed=0).texts[0])
