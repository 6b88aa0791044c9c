"""`esolm convert`: convert a published checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .parsing import Writing, parse

_COMMAND = Writing(
    "esolm.interop.convert",
    "convert",
    "convert FILE.ckpt|FILE.gguf|FOLDER|HUB-NAME OUT",
    "Convert a published checkpoint into a model folder, without executing anything from it.",
)
make_parser = _COMMAND.make_parser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse(make_parser(), argv)
    as_json = options.pop("json")
    model = _COMMAND.call(options)
    from ..interop.convert import report
    from .info import describe_model

    print(json.dumps(describe_model(Path(options["out"])), indent=1) if as_json else report(model, options["out"]))
    return 0
