"""`esolm infill`: fill in the blanks of a text."""

from __future__ import annotations

from collections.abc import Sequence

from .parsing import parse
from .sample import infill, infill_parser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return infill(parse(infill_parser(), argv))
