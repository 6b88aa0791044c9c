"""`esolm consolidate`: merge a sharded checkpoint into single files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import COMMANDS
from .parsing import add_json, parse, parser


def make_parser() -> Any:
    """The parser."""
    made = parser("consolidate RUN|CHECKPOINT", COMMANDS["consolidate"])
    made.add_argument("folder", type=str, help="A checkpoint, or a run to consolidate all its checkpoints.")
    add_json(made)
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse(make_parser(), argv)
    from ..storage import checkpoint

    folder = Path(options["folder"])
    root = folder / "checkpoints"
    found = [root / checkpoint.name_of(step) for step in checkpoint.list_steps(root)] or [folder]
    written = [str(checkpoint.consolidate(each)) for each in found]
    print(json.dumps({"paths": written}) if options["json"] else "\n".join(written))
    return 0
