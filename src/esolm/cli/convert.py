"""`esolm convert`: convert a published checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import to_folder


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    about = "Convert a published checkpoint into a model folder, without executing anything from it."
    usage = "convert FILE.ckpt|FILE.gguf|FOLDER|HUB-NAME OUT"
    model, options = to_folder("esolm.interop.convert", "convert", usage, about, argv)
    from ..interop.convert import report

    print(report(model, options["out"]))
    return 0
