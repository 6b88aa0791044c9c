"""Runs the notebooks of examples/ in this process, without Jupyter. As a script it saves them with their outputs:

    python -m support.notebooks [NAME ...]

Cells are plain Python. What they print, what `display` shows and the value of their last expression are the outputs, as
Jupyter keeps them. Each notebook runs in an empty folder of its own.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FORMATS = {"text/plain": "__repr__", "text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
"""What Jupyter shows of a value, and the methods that give it."""


class Outputs(io.StringIO):
    """The outputs of one cell, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def flush_text(self) -> None:
        """End the printed text so far."""
        if text := self.getvalue():
            self.found.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
        self.seek(0)
        self.truncate()

    def show(self, value: Any, count: int | None = None) -> None:
        """Add a value; count: of the cell whose last expression it is."""
        self.flush_text()
        ways = {kind: getattr(value, method, None) for kind, method in FORMATS.items()}
        data = {kind: lines(way()) for kind, way in ways.items() if way is not None}
        about: dict[str, Any] = {"data": data, "metadata": {}}
        if count is None:
            self.found.append({**about, "output_type": "display_data"})
        else:
            self.found.append({**about, "execution_count": count, "output_type": "execute_result"})


def lines(text: str) -> list[str]:
    """A text as notebooks store it."""
    return text.splitlines(keepends=True)


def code_of(book: dict[str, Any]) -> list[dict[str, Any]]:
    """The code cells."""
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def fingerprint(book: dict[str, Any]) -> str:
    """A hash of the code, which is saved with the outputs."""
    return hashlib.sha256("\0".join("".join(cell["source"]) for cell in code_of(book)).encode()).hexdigest()


def execute(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a run in the working directory."""
    book = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate(code_of(book), 1):
        out = Outputs()
        names["display"] = out.show
        tree = ast.parse("".join(cell["source"]), f"{path.name}[{cell['id']}]")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(out):
            exec(compile(tree, f"{path.name}[{cell['id']}]", "exec"), names)
            value = None
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"{path.name}[{cell['id']}]", "eval"), names)
        if value is not None:
            out.show(value, count)
        out.flush_text()
        cell["execution_count"], cell["outputs"] = count, out.found
    book["metadata"]["esolm"] = {"code": fingerprint(book)}
    return book


def save(path: Path) -> None:
    """Run a notebook in an empty folder and save it."""
    from esolm.runtime import files

    home, began = os.getcwd(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            book = execute(path)
        finally:
            os.chdir(home)
    files.write(path, json.dumps(book, indent=1, ensure_ascii=False) + "\n")
    print(f"{path.name}: {time.process_time() - began:.0f} s of CPU, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    for name in sys.argv[1:] or [path.stem for path in NOTEBOOKS]:
        save(FOLDER / f"{name}.ipynb")
