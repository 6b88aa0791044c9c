"""Samples as molecules: how many are valid SMILES, how many of those differ, and how many are not in the training set.

No single number is enough: carbon chains are all valid, and so is a copy of the training set. A sample that ends too
early is often valid too, so size is checked: a sample is whole if it is at least as large as the first percentile of
the training molecules. Uniqueness falls with the number of samples: compare equal numbers.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..runtime.progress import track
from .samples import read_samples

_SMILES = re.compile(r"[!-~]+")  # RDKit would take what follows a space as a name, and accept the rest


class Molecule(NamedTuple):
    """A molecule that RDKit parsed."""

    smiles: str  # canonical, so equal molecules have equal SMILES
    atoms: int  # without hydrogen


def molecules(file: str, train: str | None = None, field: str = "text") -> dict[str, Any]:
    """Validity, uniqueness, novelty and size of the molecules that `esolm sample --out` wrote, with standard errors.

    Args:
        file: JSON lines with `text` and `tokens`.
        train: The training set, one SMILES per line; adds novelty, and the share of samples that are valid and whole.
        field: The field that holds the SMILES: `text`, or `prediction`, which is the text without the prompt.

    Raises:
        ValueError: If a file cannot be read, or RDKit is not installed.
    """
    samples = read_samples(Path(file))
    if missing := [number for number, sample in enumerate(samples, 1) if not isinstance(sample.get(field), str)]:
        raise ValueError(f"sample {missing[0]} of {file} has no text {field!r}: choose text or prediction")
    valid = [molecule for molecule in parsed(sample[field] for sample in samples) if molecule is not None]
    unique = set(valid)
    costs = [sample["nfe"] for sample in samples if "nfe" in sample]
    found: dict[str, Any] = {"samples": len(samples), "nfe": statistics.fmean(costs) if costs else None}
    found |= share("validity", len(valid), len(samples))
    found |= share("uniqueness", len(unique), len(valid))
    if train is not None:
        seen = known(Path(train))
        small = sorted(molecule.atoms for molecule in seen)[len(seen) // 100]
        found |= share("novelty", len(unique - seen), len(unique))
        found |= share("whole", sum(molecule.atoms >= small for molecule in valid), len(samples))
    atoms = [molecule.atoms for molecule in valid]
    found["atoms"] = statistics.fmean(atoms) if atoms else None
    found["atoms_stderr"] = statistics.stdev(atoms) / math.sqrt(len(atoms)) if len(atoms) > 1 else None
    return found


def parsed(texts: Iterable[str]) -> list[Molecule | None]:
    """The molecule of each text; None where RDKit cannot parse or sanitise it, or finds no atom."""
    try:
        from rdkit import Chem, rdBase
    except ImportError as error:
        raise ValueError("molecules are parsed with RDKit: pip install 'esolm[chem]'") from error
    found: list[Molecule | None] = []
    with rdBase.BlockLogs():  # RDKit logs a line for each text that it cannot parse
        for text in texts:
            mol = Chem.MolFromSmiles(text) if _SMILES.fullmatch(text) else None
            if mol is None or not mol.GetNumAtoms():
                found.append(None)
            else:
                found.append(Molecule(Chem.MolToSmiles(mol), mol.GetNumHeavyAtoms()))
    return found


def known(path: Path) -> set[Molecule]:
    """The molecules of a file: the first word of each line; a name may follow it."""
    if not path.is_file():
        raise ValueError(f"no file {path}: give the training molecules, one SMILES per line")
    lines = path.read_text("utf-8", errors="replace").split("\n")
    texts = [words[0] for line in lines if (words := line.split())]
    found = {molecule for molecule in parsed(track(texts, "training molecules")) if molecule is not None}
    if not found:
        raise ValueError(f"{path} has no molecule: give a file with one SMILES per line")
    return found


def share(name: str, hits: int, total: int) -> dict[str, float | None]:
    """hits / total and its standard error for independent draws; None where there are too few."""
    mean = hits / total if total else None
    error = None if mean is None or total < 2 else math.sqrt(mean * (1 - mean) / (total - 1))
    return {name: mean, f"{name}_stderr": error}
