"""Molecules around a scaffold: python -m experiments.constraints.scaffold MODEL [SAMPLES] > scaffold.json

MODEL writes SMILES after `>`, as in experiments/tuning. The ring stands in the text, and what hangs on it is filled in:
two blanks, each of a length that is drawn by likelihood. RDKit says which are molecules and have the ring in them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import esolm

SCAFFOLDS = {
    "benzene": (">____c1ccc(____)cc1", "c1ccccc1"),
    "pyridine": (">____c1ccc(____)nc1", "c1ccncc1"),
    "piperidine": (">____C1CCN(____)CC1", "C1CCNCC1"),
    "amide": (">____NC(=O)____", "NC=O"),
}
LETTERS = r"[A-Za-z0-9()=#\[\]@+\-\\/]+"


def verdict(texts: list[str], part: str | None) -> dict[str, Any]:
    """Shares of valid and connected molecules, of those with the part, and of different ones among these."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    pattern = Chem.MolFromSmarts(part) if part else None
    found = [Chem.MolFromSmiles(text) for text in texts]
    valid = [m for text, m in zip(texts, found, strict=True) if text and m is not None and "." not in text]
    whole = [Chem.MolToSmiles(m) for m in valid if pattern is None or m.HasSubstructMatch(pattern)]
    share = {"valid": len(valid) / len(texts), "with the part": len(whole) / len(texts)}
    return {**share, "different": len({*whole}) / max(len(whole), 1), "first": whole[:5]}


def main(model: str, samples: int) -> dict[str, Any]:
    """The verdict on free samples, and on those around each scaffold, in random order and from left to right."""
    lm, found = esolm.load(model, which="last"), dict[str, Any]()
    for mode, options in {"random order": {}, "left to right": {"sampler": "left_to_right"}}.items():
        free = lm.sample(">", num_samples=samples, seed=0, **options).texts
        found[mode] = {"free": verdict([text.removeprefix(">") for text in free], None)}
        for name, (text, part) in SCAFFOLDS.items():
            made = lm.infill(text, tokens_per_blank="1-8", regex=LETTERS, num_samples=samples, seed=0, **options).texts
            found[mode][name] = verdict([each.removeprefix(">") for each in made], part)
            print(mode, name, found[mode][name], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 500), indent=1))
