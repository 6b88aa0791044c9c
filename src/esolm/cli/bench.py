"""`esolm bench`: measure speed on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench import main


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return main(argv)
