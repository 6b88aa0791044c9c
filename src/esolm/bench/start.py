"""Time of a new process from the shell to its first sample, by phase."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from ..data.tokenizer import from_json
from ..storage import folder
from ..systems import find
from .latency import network
from .report import table

PHASES = ("start Python", "import torch", "import esolm", "load", "sample")
SCRIPT = """
import sys, time
times = [time.time()]
def mark(): times.append(time.time())
import torch; mark()
import esolm; mark()
lm = esolm.load(sys.argv[1], precision=sys.argv[2]); mark()
lm.sample(length=int(sys.argv[3]), alpha_0=1.0, num_steps=int(sys.argv[4])); mark()
print(*times)
"""


def run(
    layers: int = 12,
    width: int = 768,
    vocab_size: int = 50258,
    length: int = 256,
    num_steps: int = 64,
    rounds: int = 5,
    precision: str = "float32",
) -> dict[str, Any]:
    """Time new processes that load a model from the page cache and sample from it.

    Args:
        layers: number of blocks.
        width: width of the network, a multiple of 64.
        vocab_size: vocabulary size, including the mask token.
        length: sample length.
        num_steps: sampling steps.
        rounds: number of new processes.
        precision: float32, bf16, int8 or auto.
    """
    found: dict[str, list[float]] = {name: [] for name in (*PHASES, "esolm sample")}
    with tempfile.TemporaryDirectory() as home:
        model = Path(home, "model")
        model.mkdir()
        write(model, layers, width, vocab_size, length)
        arguments = (str(model), precision, str(length), str(num_steps))
        options = (f"--precision={precision}", f"--length={length}", f"--num_steps={num_steps}", "--alpha_0=1")
        for i in range(rounds + 1):
            start = time.time()
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True
            )
            marks = [start, *map(float, done.stdout.split())]
            begin = time.time()
            command = [sys.executable, "-m", "esolm", "sample", str(model), *options]
            subprocess.run(command, capture_output=True, check=True)
            if i:  # the first round fills the page cache
                found["esolm sample"].append(time.time() - begin)
                for name, one, two in zip(PHASES, marks, marks[1:], strict=False):
                    found[name].append(two - one)
    seconds = {name: round(statistics.median(times), 3) for name, times in found.items()}
    records = ({"phase": name, "seconds": value} for name, value in seconds.items())
    table(f"new process, {layers} x {width}, {precision}", {"phase": "phase", "seconds": "seconds"}, records)
    return {"seconds": seconds}


def write(model: Path, layers: int, width: int, vocab_size: int, length: int) -> None:
    """Write a model folder with random weights and a vocabulary of numbers."""
    words = {f"w{i}": i for i in range(vocab_size - 1)}
    core = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    system = find("esolm")(alpha_0=1.0, mask_id=vocab_size - 1)
    text = from_json(core.to_str(), "numbers")
    if text.vocab_size != vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}, but the tokenizer has {text.vocab_size} entries: choose a larger one"
        )
    folder.write(model, network(layers, width, vocab_size, length), system, text)
