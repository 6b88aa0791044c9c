"""The notebooks of examples/: committed with the outputs of their own code, and run here with small settings."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import notebooks

KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "execution_count", "id", "metadata", "outputs", "source"},
}
OUTPUTS = {
    "stream": {"name", "output_type", "text"},
    "display_data": {"data", "metadata", "output_type"},
    "execute_result": {"data", "execution_count", "metadata", "output_type"},
}
"""What nbformat 4.5 wants of each kind."""
PRIVATE = re.compile(r"/(work|root|home|tmp|Users|mnt|var)/|[A-Z]:\\\\|localhost")
LARGEST = 300_000  # bytes

every = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def strings(value: Any) -> Iterator[str]:
    """All texts in an output, with its lines joined."""
    if isinstance(value, list):
        yield "".join(value)
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)


def test_there_are_five_and_the_readme_names_them():
    readme = (notebooks.FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(notebooks.NOTEBOOKS) == 5
    for path in notebooks.NOTEBOOKS:
        assert f"({path.name})" in readme


@every
def test_the_format_is_that_of_nbformat(path: Path):
    book = read(path)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert set(book) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in book["cells"]:
        assert set(cell) == KEYS[cell["cell_type"]]
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert all(isinstance(line, str) for line in cell["source"])
        for output in cell.get("outputs", ()):
            assert set(output) == OUTPUTS[output["output_type"]]
            assert all(isinstance(line, str) for lines in output.get("data", {}).values() for line in lines)
    assert book["cells"][0]["cell_type"] == book["cells"][-1]["cell_type"] == "markdown"


@every
def test_the_outputs_are_those_of_the_code(path: Path):
    book = read(path)
    cells = notebooks.code_of(book)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(cell["outputs"] for cell in cells)
    assert book["metadata"]["esolm"]["code"] == notebooks.fingerprint(book), "run `make notebooks`"
    shown = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", ())}
    assert "text/html" in shown or "image/svg+xml" in shown
    assert path.stat().st_size < LARGEST


@every
def test_outputs_name_no_machine(path: Path):
    for cell in notebooks.code_of(read(path)):
        for text in (text for output in cell["outputs"] for text in strings(output)):
            assert not PRIVATE.search(re.sub('base64,[^"]*', "", text)), cell["id"]


@every
def test_the_code_is_plain_python_in_short_lines(path: Path):
    for cell in notebooks.code_of(read(path)):
        ast.parse("".join(cell["source"]))
        assert all(len(line.rstrip("\n")) <= 120 for line in cell["source"]), cell["id"]


@every
def test_links_lead_to_files(path: Path):
    text = "".join(line for cell in read(path)["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert "://" in target or (path.parent / target.partition("#")[0]).exists(), target


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, small settings, and the random numbers of others left alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESOLM_NOTEBOOK", "small")
    states, threads = (random.getstate(), np.random.get_state(), torch.get_rng_state()), torch.get_num_threads()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads(threads)


@every
def test_it_runs_with_small_settings(path: Path, alone: None):
    """Their assertions are exact statements, or have a false alarm of at most 1e-6 with fixed seeds."""
    if "molecules" in path.stem:
        pytest.importorskip("rdkit")
    if "llama" in path.stem:
        pytest.importorskip("transformers")
    kept = path.read_bytes()
    cells = notebooks.code_of(notebooks.execute(path))
    assert all(cell["outputs"] for cell in cells)
    assert path.read_bytes() == kept


def test_an_error_stops_the_run(tmp_path: Path):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
    book = {"cells": [{**cell, "source": ["1 / 0"]}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "a.ipynb").write_text(json.dumps(book))
    with pytest.raises(ZeroDivisionError):
        notebooks.execute(tmp_path / "a.ipynb")


def test_outputs_are_kept_as_jupyter_keeps_them(tmp_path: Path):
    source = [
        "class Shown:\n", "    def _repr_html_(self): return '<b>x</b>'\n", "    def __repr__(self): return 'x'\n",
        "print('a')\n", "display(Shown())\n", "print('b')\n", "Shown()",
    ]  # fmt: skip
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "a.ipynb").write_text(json.dumps(book))
    (made,) = notebooks.execute(tmp_path / "a.ipynb")["cells"]
    data = {"text/plain": ["x"], "text/html": ["<b>x</b>"]}
    assert made["outputs"] == [
        {"name": "stdout", "output_type": "stream", "text": ["a\n"]},
        {"data": data, "metadata": {}, "output_type": "display_data"},
        {"name": "stdout", "output_type": "stream", "text": ["b\n"]},
        {"data": data, "execution_count": 1, "metadata": {}, "output_type": "execute_result"},
    ]


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_it_has_one_title_and_sections(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "markdown"]
    titles = [line for cell in cells for line in cell["source"] if line.startswith("# ")]
    assert titles == cells[0]["source"][:1]
    assert sum(line.startswith("## ") for cell in cells for line in cell["source"]) > 2
