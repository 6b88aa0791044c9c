"""`esolm consolidate`: merge a sharded checkpoint into single files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..storage import checkpoint
from . import COMMANDS
from .parsing import parse, parser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    made = parser("consolidate RUN|CHECKPOINT", COMMANDS["consolidate"])
    made.add_argument("folder", type=str, help="A checkpoint, or a run to consolidate all its checkpoints.")
    folder = Path(parse(made, argv)["folder"])
    root = folder / "checkpoints"
    found = [root / checkpoint.name_of(step) for step in checkpoint.list_steps(root)] or [folder]
    for each in found:
        print(checkpoint.consolidate(each))
    return 0
