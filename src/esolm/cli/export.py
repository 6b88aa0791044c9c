"""`esolm export`: write a model folder with a model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .parsing import Writing, parse

_COMMAND = Writing(
    "esolm.interop.export",
    "export",
    "export RUN OUT",
    "Write a model as a folder that transformers and esolm.load open, with a model card.",
)
make_parser = _COMMAND.make_parser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse(make_parser(), argv)
    as_json = options.pop("json")
    written = _COMMAND.call(options)
    print(json.dumps({"path": str(written)}) if as_json else f"wrote {written}{unfinished(Path(options['run']))}")
    return 0


def unfinished(run: Path) -> str:
    """A remark for a run that has steps left; nothing otherwise."""
    from ..storage import checkpoint
    from ..training import runs

    last = checkpoint.latest(run / "checkpoints") if runs.is_run(run) else None
    if last is None:
        return ""
    step, steps = checkpoint.read_state(last)["step"], runs.read_config(run)["steps"]
    return f" (its training is unfinished: step {step} of {steps})" if step < steps else ""
