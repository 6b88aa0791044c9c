"""Read the JSON-lines files that the metrics take: samples, predictions and references."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data import corpora
from ..data.documents import Reading, watched
from ..runtime.files import read_json_lines


def read_records(path: Path, advice: str) -> dict[int, dict[str, Any]]:
    """The JSON objects of a file by line number.

    Raises ValueError, which ends with the advice, if the file is missing or empty or a line is not a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"no file {path}: {advice}")
    try:
        records = dict(read_json_lines(path))
    except ValueError as error:
        raise ValueError(f"{error}; {advice}") from error
    if not records:
        raise ValueError(f"{path} has no records: {advice}")
    return records


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of a file, each with its text and its tokens."""
    samples = read_records(path, advice := f"write samples with `esolm sample RUN --num_samples 64 --out {path}`")
    for number, sample in samples.items():
        if not (isinstance(sample.get("text"), str) and isinstance(sample.get("tokens"), list)):
            raise ValueError(f"line {number} of {path} lacks `text` or `tokens`: {advice}")
    return list(samples.values())


def read_texts(file: str, delimiter: str | None = None, limit: int | None = None) -> list[str]:
    """The texts of a file of samples or, if it is no .jsonl file with tokens, of a corpus; at most `limit`."""
    if is_samples(Path(file)):
        return [sample["text"] for sample in read_samples(Path(file))[:limit]]
    return list(itertools.islice(read_corpus(file, delimiter), limit))


def read_corpus(name: str, delimiter: str | None = None) -> Iterator[str]:
    """The texts of a corpus; lines that look like a forgotten delimiter are reported on standard error."""
    documents = corpora.corpus(name, Reading(delimiter=delimiter)).train()
    return watched((document.text for document in documents), name, "add" if delimiter is None else None)


def is_samples(path: Path) -> bool:
    """Whether the first line of a .jsonl file is a sample, with its tokens."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    return "tokens" in next(iter(read_records(path, "write samples with `esolm sample RUN --out FILE`").values()))
