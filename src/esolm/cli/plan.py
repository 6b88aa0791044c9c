"""`esolm plan`: memory, speed and traffic of a training run on many GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from ..training.plan import run as plan


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return plan(argv)
