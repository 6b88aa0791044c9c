"""`esolm train`: train a model or resume a run."""

from __future__ import annotations

from collections.abc import Sequence

from ..training.config import read_config, show_config


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    config, printing = read_config(argv)
    if printing:
        return show_config(config)
    from ..training.launch import launch

    return launch(config)
