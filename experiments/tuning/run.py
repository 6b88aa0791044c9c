"""Rewards with the exact likelihood: python -m experiments.tuning.run WORK --corpora FOLDER [--size pilot].

Runs whatever is missing in the folder WORK, resumes what was interrupted, and writes result.json and figures beside
this file, or with --out elsewhere. --only molecules, sudoku, estimators or dpo runs a part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.tuning import measure, report

ESTIMATORS = ("exact", "onepass", "stepmerge")
ORDERS = {"random": "first_hitting --rollout.alpha_0 1", "left_to_right": "left_to_right"}
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "net": "--net.layers 3 --net.width 128 --net.heads 4 --batch.size 64 --optim.lr 0.0014",
        "steps": 3000, "grpo_steps": 100, "grpo_batch": 128, "seeds": (0, 1), "samples": 1000, "sequences": 256,
        "sudoku_steps": 1500, "sudoku_grpo_steps": 100, "puzzles": 400,
    },
    "pilot": {
        "net": "--net.layers 2 --net.width 96 --net.heads 4 --batch.size 32 --optim.lr 0.002",
        "steps": 2500, "grpo_steps": 60, "grpo_batch": 128, "seeds": (0,), "samples": 250, "sequences": 64,
        "sudoku_steps": 600, "sudoku_grpo_steps": 60, "puzzles": 100,
    },
    "smoke": {
        "net": "--net.layers 1 --net.width 32 --net.heads 2 --batch.size 8 --validation.batches 1",
        "steps": 2, "grpo_steps": 2, "grpo_batch": 8, "seeds": (0,), "samples": 4, "sequences": 4,
        "sudoku_steps": 2, "sudoku_grpo_steps": 2, "puzzles": 4,
    },
}  # fmt: skip
"""full: what the README reports; pilot: half an hour on one core; smoke: seconds, for the tests."""


def esolm(words: str, makes: Path | None = None) -> None:
    """Run a command of esolm, unless what it makes exists."""
    if makes is None or not makes.exists():
        print(f"esolm {words}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "esolm", *split(words)], check=True)


def split(words: str) -> list[str]:
    import shlex

    return shlex.split(words)


def trained(work: Path, name: str, words: str) -> Path:
    """The run of a training command; a finished one answers at once."""
    done = work / "done" / name
    if not done.exists():
        esolm(words)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
    return work / "runs" / name


def molecules_base(work: Path, corpora: Path, size: dict[str, Any]) -> Path:
    """The model that GRPO starts from, as in experiments/molecules."""
    moses = corpora / "moses"
    esolm(
        f"prepare text:{moses}/train.100k.smi {work}/data/smiles --valid text:{moses}/valid.5k.smi "
        "--packing conditional --separator '>' --target_length 40 --tokenizer bpe:320 --length 41",
        work / "data" / "smiles",
    )
    words = f"train laptop-esolm --data {work}/data/smiles --run {work}/runs/base --system.alpha_0 0.25 {size['net']}"
    return trained(work, "base", f"{words} --steps {size['steps']} --validation.every 2000 --saving.every 250")


def molecules(work: Path, corpora: Path, size: dict[str, Any]) -> dict[str, Any]:
    """GRPO on molecules at alpha_0 = 0.25 in 16 steps and left to right after them, for each estimator and seed."""
    base = molecules_base(work, corpora, size)
    train = corpora / "moses" / "train.100k.smi"
    found = {"base": evaluated(work, base, train, "base", size["samples"]), "runs": {}}
    for estimator, seed in itertools.product(ESTIMATORS, size["seeds"]):
        name = f"grpo-{estimator}-{seed}"
        run = trained(
            work, name,
            f"tune grpo {base} {work}/runs/{name} --reward molecules --reward.options '{{\"atoms\": {measure.ATOMS}}}' "
            f"--reward.workers 1 --rollout.prompt '>' --rollout.num_steps 16 --grpo.estimator {estimator} "
            f"--seed {seed} --steps {size['grpo_steps']} --batch.size {size['grpo_batch']} "
            f"--batch.micro {min(64, size['grpo_batch'])} --grpo.group {min(16, size['grpo_batch'])} "
            f"--grpo.beta 0.05 --grpo.copies share --grpo.updates 2 --optim.lr 3e-4 --validation.every 0 "
            f"--rollout.batch_size {size['grpo_batch']}",
        )  # fmt: skip
        after = evaluated(work, run, train, name, size["samples"])
        found["runs"][name] = {"curve": measure.curve(run), "after": after}
    return found


def evaluated(work: Path, model: Path, train: Path, name: str, number: int) -> dict[str, Any]:
    """Samples of the last weights as molecules: validity, size, uniqueness, novelty and QED."""
    file = work / "samples" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    esolm(
        f"sample {model} --which last --prompt '>' --num_steps 16 --num_samples {number} --batch_size 250 --out {file}",
        file,
    )
    return measure.molecules(file, train)


def grids() -> list[str]:
    """All 288 solved 4 x 4 sudokus."""
    from esolm.tune.rewards import UNITS

    found: list[str] = [""]
    for cell in range(16):
        units = [unit for unit in UNITS if cell in unit]
        found = [
            grid + digit
            for grid in found
            for digit in "1234"
            if all(i >= cell or grid[i] != digit for unit in units for i in unit)
        ]
    return found


def sudoku(work: Path, corpora: Path, size: dict[str, Any]) -> dict[str, Any]:
    """A model of spoiled grids learns to solve puzzles, filled in in random order or from left to right."""
    files = sudoku_files(work, size["puzzles"])
    esolm(
        f"prepare text:{files['grids']} {work}/data/sudoku --valid text:{files['held']} --packing conditional "
        "--separator '>' --target_length 17 --tokenizer bytes --length 18",
        work / "data" / "sudoku",
    )
    base = trained(
        work, "sudoku",
        f"train laptop-esolm --data {work}/data/sudoku --run {work}/runs/sudoku --system.loss any_order "
        f"--system.alpha_0 1 --system.mixture [0,1] --net.layers 2 --net.width 64 --net.heads 4 --batch.size 32 "
        f"--steps {size['sudoku_steps']} --validation.every 0 --validation.batches 1 --saving.every 250",
    )  # fmt: skip
    found: dict[str, Any] = {"base": measure.solved(base, files["valid"]), "runs": {}}
    for (order, sampler), seed in itertools.product(ORDERS.items(), size["seeds"]):
        name = f"sudoku-{order}-{seed}"
        run = trained(
            work, name,
            f"tune grpo {base} {work}/runs/{name} --reward sudoku --reward.workers 1 --data {files['puzzles']} "
            f"--rollout.valid {files['valid']} --rollout.blank _ --rollout.sampler {sampler} --seed {seed} "
            f"--steps {size['sudoku_grpo_steps']} --batch.size {size['grpo_batch']} "
            f"--grpo.group {min(16, size['grpo_batch'])} --grpo.beta 0.05 --grpo.updates 2 --optim.lr 3e-4 "
            f"--validation.every 0 --rollout.batch_size {size['grpo_batch']}",
        )  # fmt: skip
        found["runs"][name] = {"curve": measure.curve(run), "after": measure.solved(run, files["valid"])}
    return found


def sudoku_files(work: Path, puzzles: int) -> dict[str, Path]:
    """Spoiled grids to train on, and puzzles of other grids, written once."""
    draw, folder = random.Random(0), work / "sudoku"
    names = {"grids": "grids.smi", "held": "held.smi", "puzzles": "puzzles.jsonl", "valid": "valid.jsonl"}
    files = {key: folder / name for key, name in names.items()}
    if files["valid"].exists():
        return files
    folder.mkdir(parents=True, exist_ok=True)
    every = grids()
    draw.shuffle(every)
    known, train, valid = every[:144], every[144:216], every[216:]
    spoiled = [
        "".join(draw.choice("1234") if draw.random() < 0.1 else c for c in draw.choice(known)) for _ in range(20000)
    ]
    files["grids"].write_text("".join(f"{grid}\n" for grid in spoiled))
    files["held"].write_text("".join(f"{grid}\n" for grid in valid))
    for key, source in (("puzzles", train), ("valid", valid)):
        rows = []
        for _ in range(puzzles):
            grid, kept = draw.choice(source), set(draw.sample(range(16), 6))
            puzzle = "".join(c if i in kept else "_" for i, c in enumerate(grid))
            rows.append({"text": f">{puzzle}", "puzzle": puzzle.replace("_", ".")})
        files[key].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def estimators(work: Path, corpora: Path, size: dict[str, Any]) -> dict[str, Any]:
    """Bias and standard deviation of each estimate on samples of the molecules' model."""
    return measure.estimators(molecules_base(work, corpora, size), size["sequences"])


def dpo(work: Path, corpora: Path, size: dict[str, Any]) -> dict[str, Any]:
    """What common orders save of the variance of DPO's margin, on pairs of molecules and spoiled ones."""
    base = molecules_base(work, corpora, size)
    file = work / "pairs.jsonl"
    if not file.exists():
        draw, rows = random.Random(0), []
        lines = (corpora / "moses" / "valid.5k.smi").read_text().split()[: max(2 * size["sequences"], 64)]
        for text in lines:
            letters = list(text)
            i, j = sorted(draw.sample(range(len(text)), 2))
            letters[i], letters[j] = letters[j], letters[i]
            if text != (other := "".join(letters)) and len(text) < 50:
                rows.append({"prompt": ">", "chosen": text, "rejected": other})
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = trained(
        work, "dpo",
        f"tune dpo {base} {work}/runs/dpo --data {file} --steps {min(60, size['grpo_steps'])} --batch.size 16 "
        "--validation.every 0 --validation.batches 4 --optim.lr 3e-4",
    )  # fmt: skip
    return measure.margins(base, run, file, size["sequences"])


PARTS = {"molecules": molecules, "sudoku": sudoku, "estimators": estimators, "dpo": dpo}


def main(argv: list[str] | None = None) -> None:
    """Run the parts that were asked for, and write their results."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("work", type=Path)
    options.add_argument("--corpora", type=Path, required=True)
    options.add_argument("--size", choices=SIZES, default="full")
    options.add_argument("--only", choices=PARTS, action="append")
    options.add_argument("--out", type=Path, default=Path(__file__).parent)
    found = options.parse_args(argv)
    path = found.out / "result.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    for name in found.only or PARTS:
        results[name] = {"size": found.size, **PARTS[name](found.work, found.corpora, SIZES[found.size])}
        found.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    report.write(results, found.out)


if __name__ == "__main__":
    main()
