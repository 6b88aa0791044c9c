"""The documentation of the running Python as a corpus that needs no download, read with `ast` without imports."""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
_SHORTEST = 80  # characters; shorter docstrings add little to the name


def name() -> str:
    """The name of the corpus, with the Python version: results are comparable only within one version."""
    return f"pydocs-{platform.python_version()}"


@cache
def files() -> tuple[tuple[str, Path], ...]:
    """The source files of the standard library with their relative names, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {p.relative_to(root): p for p in root.rglob("*.py")}
    chosen = {r.as_posix(): p for r, p in found.items() if not _SKIPPED & set(r.parts)}
    if not chosen:
        raise ValueError(
            f"no source files of the standard library in {root}: give another corpus, for example a text file"
        )
    return tuple(sorted(chosen.items()))


@cache
def sha256() -> str:
    """A hash of all source files."""
    digest = hashlib.sha256()
    for file, path in files():
        digest.update(file.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def documents() -> tuple[str, ...]:
    """One document per topic of the language reference and per module with docstrings."""
    return tuple(text for file, path in files() for text in _documents(file, path))


def _documents(file: str, path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_bytes())
    if file == "pydoc_data/topics.py":
        yield from _topics(tree)
        return
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    text = "\n\n".join(_docstrings(tree, module))
    if text:
        yield text + "\n"


def _topics(tree: ast.Module) -> Iterator[str]:
    values = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    for value in values:
        if isinstance(value, ast.Dict):
            yield from (text for _, text in sorted(ast.literal_eval(value).items()))


def _docstrings(node: ast.AST, qualified: str) -> Iterator[str]:
    """Yield the docstrings of a node and of the classes and functions inside it, each under its name and arguments."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        if len(text) >= _SHORTEST:
            arguments = "" if isinstance(node, ast.Module | ast.ClassDef) else f"({ast.unparse(node.args)})"
            yield f"{qualified}{arguments}\n\n{text}"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{qualified}.{child.name}")
