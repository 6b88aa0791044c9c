"""Output of a benchmark: a table on the terminal and a JSON file."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..runtime import files


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table whose first column is text and whose other columns are numbers."""
    out = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        out.add_row(*(cell if isinstance(cell, str) else f"{cell:,.3g}" for cell in row))
    Console().print(out)


def facts() -> dict[str, Any]:
    """Describe the machine, without its name."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn_max_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "esolm": __version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def save(target: str, result: Mapping[str, Any]) -> None:
    """Write the results as JSON, atomically."""
    files.write_json(Path(target), result)
