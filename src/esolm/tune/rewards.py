"""The built-in rewards.

A reward is a function of a list of texts and a list of their rows of data that returns, for each text, a number or a
dict of parts of which one is the `reward`; or a class whose instances are called so. Keyword arguments go to the
function in each call, and to the class once.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]
Parts = dict[str, float]
LONGEST = 200
"""Characters of an arithmetic expression."""


class Molecules:
    """QED of a text that is a valid, connected and new molecule of at least `atoms` heavy atoms; 0 otherwise.

    train: a file with known molecules, one SMILES per line; they are not new, and by default `atoms` is their first
    percentile. Without the least size, fragments such as `CC` would be the easiest valid samples.
    """

    def __init__(self, atoms: int | None = None, train: str | None = None) -> None:
        from ..metrics.molecules import known, parsed

        seen = known(Path(train)) if train is not None else set()
        self.parsed, self.seen = parsed, {molecule.smiles for molecule in seen}
        self.atoms = atoms or (sorted(molecule.atoms for molecule in seen)[len(seen) // 100] if seen else 10)

    def __call__(self, texts: Sequence[str], rows: Rows) -> list[Parts]:
        from rdkit import Chem
        from rdkit.Chem import QED

        found: list[Parts] = []
        for molecule in self.parsed(texts):
            whole = molecule is not None and molecule.atoms >= self.atoms and "." not in molecule.smiles
            new = molecule is not None and molecule.smiles not in self.seen
            qed = QED.qed(Chem.MolFromSmiles(molecule.smiles)) if molecule is not None and whole else 0.0
            parts = {"valid": molecule is not None, "whole": whole, "new": new, "qed": qed}
            found.append({"reward": qed * new, **{name: float(part) for name, part in parts.items()}})
        return found


def regex(texts: Sequence[str], rows: Rows, *, pattern: str) -> list[float]:
    """1 for a text that matches the pattern from its beginning to its end."""
    return [float(re.fullmatch(pattern, text, re.DOTALL) is not None) for text in texts]


def sudoku(texts: Sequence[str], rows: Rows, *, partial: float = 0.0) -> list[Parts]:
    """1 for a 4 x 4 grid whose rows, columns and boxes hold 1 to 4 and that keeps the digits of the row's `puzzle`;
    space, > and | are ignored.

    partial: the weight of the share of the twelve rows, columns and boxes that are right, in place of the rest.
    """
    found = []
    for text, row in zip(texts, rows, strict=True):
        grid = re.sub(r"[\s>|]", "", text)
        kept = all(a == b for a, b in zip(grid, re.sub(r"\s", "", str(row.get("puzzle", "")))) if b in "1234")
        right = sum(sorted(grid[i] for i in unit) == list("1234") for unit in UNITS) if len(grid) == 16 else 0
        solved, share = float(right == len(UNITS) and kept), right / len(UNITS) if kept else 0.0
        found.append({"reward": (1 - partial) * solved + partial * share, "solved": solved, "units": share})
    return found


_BOXES = [[r * 4 + c for r in (i, i + 1) for c in (j, j + 1)] for i in (0, 2) for j in (0, 2)]
UNITS = [
    *([r * 4 + c for c in range(4)] for r in range(4)),
    *([r * 4 + c for r in range(4)] for c in range(4)),
    *_BOXES,
]
"""The cells of each row, column and box of a 4 x 4 sudoku."""


def countdown(texts: Sequence[str], rows: Rows) -> list[Parts]:
    """1 for an expression of +, -, *, / and brackets that uses each of the row's `numbers` once and gives its `target`;
    what follows an equals sign is ignored."""
    found = []
    for text, row in zip(texts, rows, strict=True):
        value, used = _calculated(text.partition("=")[0].strip())
        allowed = value is not None and sorted(used) == sorted(int(number) for number in row["numbers"])
        found.append({"reward": float(allowed and value == int(row["target"])), "allowed": float(allowed)})
    return found


_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _calculated(text: str) -> tuple[Fraction | None, list[int]]:
    """The value of an expression and the numbers in it; None if it is none."""
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        raise ValueError("not an expression")

    try:
        return value(ast.parse(text[: LONGEST + 1], mode="eval").body) if len(text) <= LONGEST else None, used
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None, used


class Judge:
    """Minus the nats per token of a text under an outside model, at least `floor`; an empty text gets the floor.

    model: a causal language model for transformers, as in `esolm judge`. A judge likes repetition: watch the samples.
    """

    def __init__(self, model: str, floor: float = -10.0, max_tokens: int | None = None) -> None:
        from ..metrics.outside_models import load_causal

        self.outside, self.floor, self.max_tokens = load_causal(model, "cpu"), floor, max_tokens

    def __call__(self, texts: Sequence[str], rows: Rows) -> list[Parts]:
        from ..metrics.judge import judged_nats

        judged = judged_nats(self.outside, texts, len(texts), max_tokens=self.max_tokens)
        means = (judged.nats / judged.counts.clamp_min(1)).tolist()
        counts = judged.counts.tolist()
        return [
            {"reward": max(self.floor, -nats) if count else self.floor, "judged": count}
            for nats, count in zip(means, counts, strict=True)
        ]


BUILT_IN: dict[str, Any] = {
    "molecules": Molecules, "regex": regex, "sudoku": sudoku, "countdown": countdown, "judge": Judge,
}  # fmt: skip
