"""A model that ends blanks itself: python -m experiments.constraints.padded WORK TRAIN VALID

Fine-tunes the bundled model on windows of stories in which one span of each of some sentences is filled up to eight
tokens with EOS, and a control on the same windows without them, by the same command. Resumes what was interrupted;
then lengths.py measures both.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import esolm
from esolm.data.manifest import Manifest, id_type
from esolm.data.packing import packing
from esolm.data.shards import chunk, write_split
from esolm.data.tokenizer import Tokenizer

from .lengths import MOST, cut_out

LENGTH, STORIES = 128, 4000
TRAINING = (
    "--batch.size 32 --batch.micro 16 --optim.lr 0.0002 --optim.warmup 20 --system.curriculum 0 --compute.threads 1"
)


def windows(text: str, tokenizer: Tokenizer, padded: bool) -> Iterator[list[int]]:
    """Sentences from a random one of each story on, the spans of some of them padded; cut at LENGTH tokens."""
    dice = random.Random(1)
    for story in text.split("<|endoftext|>")[:STORIES]:
        sentences = [s for s in story.replace("\n", " ").split(". ") if s.strip()]
        ids: list[int] = []
        for sentence in sentences[dice.randrange(max(1, len(sentences))) :]:
            ending = f"{sentence.strip().removesuffix('.')}."
            words = len(ending.split())
            case = cut_out(ending, dice, tokenizer) if 8 <= words <= 24 and dice.random() < 0.5 else None
            encode = tokenizer.encode_after if ids else tokenizer.encode
            lead = " " if ids else ""
            if case is None:
                ids += encode(lead + ending)
                continue
            pads = [tokenizer.eos_id or 0] * (MOST - len(case.tokens)) if padded else []
            ids += [*encode(lead + case.before), *case.tokens, *pads, *tokenizer.encode_after(f" {case.behind}")]
        if len(ids) > MOST:
            yield ids[: LENGTH - 1]


def write(folder: Path, files: dict[str, Path], tokenizer: Tokenizer, padded: bool) -> None:
    """Prepared data, as `esolm prepare` writes it."""
    folder.mkdir(parents=True)
    pack = packing("pad", LENGTH, tokenizer.eos_id, tokenizer.bos_id, None)
    splits = {}
    for name, path in files.items():
        rows = [*windows(path.read_text("utf-8"), tokenizer, padded)]
        made = chunk([[]] * len(rows), rows, ["-" * len(row) for row in rows])
        splits[name] = write_split(folder, name, [made], pack, id_type(tokenizer.vocab_size))
    ids = (tokenizer.vocab_size, tokenizer.mask_id, tokenizer.eos_id, tokenizer.bos_id)
    tokenizer.save(folder)
    about = {"windows": STORIES, "padded": padded}
    Manifest("windows", tokenizer.name, tokenizer.sha256, *ids, LENGTH, "pad", splits, about).save(folder)


def main() -> None:
    """Write the data, train both models, and measure them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("work", type=Path)
    options.add_argument("train", type=Path)
    options.add_argument("valid", type=Path)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--number", type=int, default=500)
    found = options.parse_args()
    tokenizer = esolm.load("stories").tokenizer
    for name in ("padded", "plain"):
        data, run = found.work / f"data-{name}", found.work / name
        if not data.exists():
            write(data, {"train": found.train, "valid": found.valid}, tokenizer, name == "padded")
        words = f"train adapt --init stories --data {data} --run {run} --steps {found.steps} {TRAINING}"
        subprocess.run([sys.executable, "-m", "esolm", *words.split()], check=True)
        measure = ["-m", "experiments.constraints.lengths", found.valid, found.work / f"{name}.jsonl", "--model", run]
        more = ["--padded"] if name == "padded" else []
        subprocess.run([sys.executable, *map(str, measure), "--number", str(found.number), *more], check=True)


if __name__ == "__main__":
    main()
