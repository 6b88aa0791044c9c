"""Fixed outputs, recorded before the packages were rearranged: losses, samples and scores of every system.

Everything goes through the command line and `esolm.load`, so that the recording does not depend on how the package is
built inside. `python tests/golden/test_recorded.py` records again; do that only for a change that is meant to change
numbers, and say so in the changelog.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import esolm
from esolm.cli import main

HERE = Path(__file__).parent / "recorded"
SYSTEMS = {
    "ar": "--system.name=ar",
    "mdlm": "--system.name=mdlm",
    "bd3lm": "--system.name=bd3lm --system.block_size=4",
    "esolm-0.5": "--system.alpha_0=0.5 --system.loss=two_term",
    "esolm-1": "--system.alpha_0=1 --system.loss=two_term",
    "esolm-any": "--system.alpha_0=0.5 --system.loss=any_order",
    "esolm-a": "--system.alpha_0=0.5 --system.variant=A --system.loss=two_term",
}
SIZE = (
    "--steps=6 --log_every=1 --net.layers=2 --net.width=16 --net.heads=2 --net.cond_width=8 --net.dropout=0.1 "
    "--batch.size=8 --batch.micro=4 --optim.lr=0.01 --optim.warmup=2 --optim.schedule=constant --validation.every=3 "
    "--validation.batch_size=4 --saving.every=3 --compute.threads=1 --compute.precision=float32 --compute.device=cpu"
)
SAMPLES = {
    "ar": ["--num_samples=2"],
    "mdlm": [
        "--num_samples=2",
        "--num_samples=2 --num_steps=4 --top_p=0.9",
        "--num_samples=1 --sampler=block --parallelism=4",
    ],
    "bd3lm": ["--num_samples=2", "--num_samples=2 --num_steps=8 --top_k=5"],
    "esolm-0.5": [
        "--num_samples=3 --prompt=ab",
        "--num_samples=2 --num_steps=4 --alpha_0=1 --temperature=0.7",
        "--num_samples=2 --sampler=left_to_right",
        "--num_samples=2 --sampler=speculative",
        "--num_samples=2 --sampler=speculative --window=3 --top_p=0.8",
        "--num_samples=2 --sampler=block --parallelism=3 --given_order=random --prompt=cd",
    ],
    "esolm-any": ["--num_samples=2 --num_steps=8"],
    "esolm-a": ["--num_samples=2 --num_steps=8"],
}
SCORES = {
    "ar": ["", "--estimator=iw --num_orders=4"],
    "mdlm": ["--num_draws=2", "--estimator=any-order --num_sequences=3"],
    "bd3lm": [""],
    "esolm-0.5": [
        "",
        "--estimator=iw --num_orders=4",
        "--estimator=jackknife --num_orders=4 --antithetic=true",
        "--alpha_0=0",
    ],
    "esolm-1": ["", "--estimator=any-order --num_orders=2"],
    "esolm-any": ["", "--estimator=iw --num_orders=3"],
    "esolm-a": [""],
}
STORIES = [
    {"num_samples": 2, "alpha_0": 1.0, "num_steps": 8, "length": 24, "seed": 3},
    {"num_samples": 1, "sampler": "speculative", "length": 32, "seed": 1, "top_p": 0.9},
    {
        "num_samples": 2,
        "sampler": "left_to_right",
        "length": 20,
        "prompt": "It was a dark night, and",
        "temperature": 0,
    },
]
TEXTS = ["She opened the letter.", "She letter the opened."]


def run(command: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(command.split()) == 0, command
    return out.getvalue()


def corpus() -> str:
    """A text that a linear congruential generator spells: no library decides it."""
    state, words = 1, []
    for _ in range(3000):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        words.append("abcdefgh"[state >> 61] * (1 + (state >> 50) % 3))
    return "\n\n".join(" ".join(words[i : i + 60]) for i in range(0, 3000, 60))


def training(folder: Path) -> dict[str, Any]:
    """Losses of a few steps of every system, and what the models then say."""
    (folder / "corpus.txt").write_text(corpus())
    data = folder / "data"
    run(f"prepare text:{folder / 'corpus.txt'} {data} --tokenizer bytes --length 16 --lines true")
    found: dict[str, Any] = {"data": json.loads((data / "manifest.json").read_text())["fingerprint"]}
    for name, options in SYSTEMS.items():
        where = folder / name
        run(f"train demo --data={data} --run={where} {SIZE} {options}")
        lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        found[name] = {
            "losses": [line["terms"] for line in lines if "terms" in line],
            "validation": [line["validation"]["terms"] for line in lines if "validation" in line],
            "samples": {
                o: json.loads(run(f"sample {where} --json --precision=float32 {o}"))["tokens"]
                for o in SAMPLES.get(name, [])
            },
            "scores": {
                o: [
                    (r["nats"], r["terms"])
                    for r in json.loads(run(f"score {where} {data} --num_sequences=8 --json {o}"))
                ]
                for o in SCORES[name]
            },
        }
    return found


def stories() -> dict[str, Any]:
    """What the bundled model writes and says of texts."""
    lm = esolm.load("stories")
    found = {str(i): lm.sample(**options).tokens for i, options in enumerate(STORIES)}
    blanks = lm.infill("She ____ the letter and ____.", tokens_per_blank=3, num_samples=2, top_p=0.9, seed=5)
    return {"samples": found, "infill": blanks.tokens}


def record() -> dict[str, Any]:
    """All of it, as JSON holds it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(json.dumps({"training": training(Path(folder)), "stories": stories()}))


def close(found: Any, expected: Any, where: str = "") -> None:
    """Equal, and numbers to rounding: machines sum in different orders."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            close(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected)):
            close(one, other, f"{where}/{i}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-5), where
    else:
        assert found == expected, where


def test_losses_samples_and_scores_are_those_recorded() -> None:
    close(record(), json.loads((HERE / "outputs.json").read_text()))


OLD_SAMPLES = [
    [86, 43, 197, 232, 41, 111, 13, 1, 100, 111, 213, 198, 59, 64, 8, 67],
    [256, 32, 238, 8, 32, 209, 256, 103, 15, 19, 147, 190, 104, 97, 223, 239],
]
"""What the code before the move drew from the run and the model that it had written."""


@pytest.mark.parametrize("name", ["old_run", "old_model"])
def test_old_folders_load_and_sample_as_they_did(name: str) -> None:
    assert esolm.load(HERE / name).sample(num_samples=2, num_steps=5, seed=4).tokens == OLD_SAMPLES


def test_an_old_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(corpus())
    shutil.copytree(HERE / "old_run", tmp_path / "run")
    run(f"prepare text:{tmp_path / 'corpus.txt'} {tmp_path / 'data'} --tokenizer bytes --length 16 --lines true")
    size = SIZE.replace("--steps=6", "--steps=8")
    run(f"train demo --data={tmp_path / 'data'} --run={tmp_path / 'run'} {size} {SYSTEMS['esolm-0.5']}")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "terms" in line] == [1, 2, 3, 4, 5, 6, 7, 8]


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    (HERE / "outputs.json").write_text(json.dumps(record(), indent=1) + "\n")
    sys.exit(0)
