"""Train a small Eso-LM from Python, watch its metrics, and sample from it.

    python examples/train.py [CORPUS] [FOLDER] [STEPS]

The default corpus is the documentation of the running Python, so nothing is downloaded: about two minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import esolm
from esolm.data import prepare

corpus, folder, steps = [*sys.argv[1:], *("pydocs", "example", "750")[len(sys.argv) - 1 :]]

prepare(corpus, Path(folder, "data"), tokenizer="bpe:384", length=64)
config = esolm.RunConfig.preset(
    "demo",
    data=Path(folder, "data"),
    run=Path(folder, "run"),
    steps=int(steps),
    optim={"lr": 4e-3},
    validation={"every": 50, "batches": 4},
)


def watch(record: dict[str, Any]) -> None:
    """Print each validation."""
    if "validation" in record:
        print(f"step {record['step']}: perplexity {record['validation']['perplexity']:.1f}")


outcome = esolm.Trainer(config, quiet=True).fit(callbacks=[watch])
print(f"trained {outcome.step} steps; the checkpoint is {outcome.checkpoint}")
print(esolm.load(Path(folder, "run")).sample("The ", alpha_0=1.0, num_steps=16, seed=0).texts[0])
