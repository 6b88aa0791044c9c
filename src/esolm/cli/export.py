"""`esolm export`: write a model folder with a model card."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import to_folder


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    about = "Write a model as a folder that transformers and esolm.load open, with a model card."
    written, _ = to_folder("esolm.interop.export", "export", "export RUN OUT", about, argv)
    print(f"wrote {written}")
    return 0
