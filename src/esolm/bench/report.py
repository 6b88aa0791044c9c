"""Running a benchmark: its results with the facts of the machine, as tables on the terminal and as a JSON file."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..runtime import files
from ..runtime.machine import keep_memory, settle
from . import find


def measure(name: str, *, threads: int | None = None, **options: Any) -> dict[str, Any]:
    """Run a benchmark with this number of threads, by default PyTorch's."""
    settle()
    keep_memory()
    if threads:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of new processes
    about = {"bench": name, "options": {**options, "threads": threads}, "machine": facts()}
    return {**about, **find(name)(**options)}


def table(title: str, columns: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> None:
    """Print a table with one row per record; the first column is text.

    columns: title -> key of the record, optionally with a format as in "share:.1%". Quartiles are printed as a range,
    and a missing value as an empty cell.
    """
    out = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right")
    for record in records:
        out.add_row(*(_cell(record, *key.partition(":")[::2]) for key in columns.values()))
    Console().print(out)


def _cell(record: Mapping[str, Any], key: str, form: str) -> str:
    value = record.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    return "{:.3g}-{:.3g}".format(*value) if isinstance(value, list) else format(value, form or ",.3g")


def named(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records by name as a list, each with its name, for `table`."""
    return [{"name": name, **record} for name, record in records.items()]


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
