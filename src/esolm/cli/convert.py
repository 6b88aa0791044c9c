"""`esolm convert`: convert a published checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from ..interop.convert import convert, report
from .parsing import to_folder


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    about = "Convert a published checkpoint into a model folder, without executing anything from it."
    options = to_folder(convert, "convert FILE.ckpt|FOLDER|HUB-NAME OUT", about, argv)
    print(report(convert(**options), options["out"]))
    return 0
