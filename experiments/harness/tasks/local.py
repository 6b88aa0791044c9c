"""Documents of the local tasks, read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets


def pydocs(**more: Any) -> dict[str, Any]:
    """Return the sentences about Python in pydocs.jsonl."""
    lines = (Path(__file__).parent / "pydocs.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def lambada(file: str = "", **more: Any) -> dict[str, Any]:
    """Return passages, one per line; the last word of each is the target."""
    if not Path(file).is_file():
        raise ValueError(f'no file {file!r}: give it as --metadata \'{{"file": "PATH"}}\'')
    docs = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        context, _, word = line.strip().rpartition(" ")
        if context:
            docs.append({"context": context, "word": word})
    return {"test": datasets.Dataset.from_list(docs)}
