"""Samples as molecules: how many are valid SMILES, how many of those differ, and how many the training never showed.

One number alone is easily fooled: carbon chains are all valid, and so is the training set. A sample that ends too early
is often valid too, so its size counts: it is whole if 1 in 100 molecules of the training is no larger. Uniqueness falls
with the number of samples: compare equal ones.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .judge import read

_SMILES = re.compile(r"[!-~]+")  # after a space RDKit would read a name, and count what stands before it


class Molecule(NamedTuple):
    """What RDKit made of a text."""

    smiles: str  # canonical: one for each molecule
    atoms: int  # without hydrogen


def molecules(file: str, train: str | None = None, field: str = "text") -> dict[str, Any]:
    """Validity, uniqueness, novelty and size of the molecules that `esolm sample --out` wrote, with standard errors.

    Args:
        file: JSON lines with `text` and `tokens`.
        train: What the model was trained on, one SMILES a line; adds novelty, and the share of samples that are valid
            and whole.
        field: The field of the SMILES: `prediction` leaves out the prompt, `text` has it.

    Raises:
        ValueError: If a file is missing or of another kind, or RDKit is not installed.
    """
    samples = read(Path(file))
    if missing := [number for number, sample in enumerate(samples, 1) if not isinstance(sample.get(field), str)]:
        raise ValueError(f"line {missing[0]} of {file} has no text {field!r}: choose text or prediction")
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
    """The molecule of each text; None where RDKit cannot parse and sanitise it, or finds no atom."""
    try:
        from rdkit import Chem, rdBase
    except ImportError as error:
        raise ValueError("molecules are checked by RDKit: pip install 'esolm[chem]'") from error
    found: list[Molecule | None] = []
    with rdBase.BlockLogs():  # a line on standard error for each text that is none
        for text in texts:
            mol = Chem.MolFromSmiles(text) if _SMILES.fullmatch(text) else None
            if mol is None or not mol.GetNumAtoms():
                found.append(None)
            else:
                found.append(Molecule(Chem.MolToSmiles(mol), mol.GetNumHeavyAtoms()))
    return found


def known(path: Path) -> set[Molecule]:
    """The molecules of a file: the first word of each line, as a name may follow it."""
    from rich.console import Console
    from rich.progress import track

    if not path.is_file():
        raise ValueError(f"no file {path}: give the training molecules, one SMILES a line")
    lines = path.read_text("utf-8", errors="replace").split("\n")
    texts = [words[0] for line in lines if (words := line.split())]
    console = Console(stderr=True)
    shown = track(texts, "training molecules", transient=True, console=console, disable=not console.is_terminal)
    found = {molecule for molecule in parsed(shown) if molecule is not None}
    if not found:
        raise ValueError(f"{path} has no molecule: give a file with one SMILES a line")
    return found


def share(name: str, hits: int, total: int) -> dict[str, float | None]:
    """hits / total and its standard error as of independent draws; None where there are too few."""
    mean = hits / total if total else None
    error = None if mean is None or total < 2 else math.sqrt(mean * (1 - mean) / (total - 1))
    return {name: mean, f"{name}_stderr": error}
