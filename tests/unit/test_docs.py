"""The documents say what happens: their Python runs, their commands parse or run, their links and lists are right.

Fenced blocks are checked unless an HTML comment before them says why not: `<!-- not run: why -->`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonargparse
import pytest
import yaml

import esolm
from esolm import cli
from support import tiny

ROOT = Path(__file__).parents[2]
PACKAGE = Path(esolm.__file__).parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOREIGN = ROOT / "tests" / "support" / "foreign.py"
PENDING: set[str] = set()
"""Documents in docs/ that are being rewritten; a document that passes leaves this set."""
SHELL = {"", "sh", "bash", "shell"}
SKIP = re.compile(r"<!-- not run:(.*?)-->\s*$", re.DOTALL)


class Block(NamedTuple):
    line: int  # of its first line of code, from 1
    language: str
    code: str
    skipped: str | None  # the reason


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = SKIP.search(text[: found.start()])
        line = text[: found.start(2)].count("\n") + 1
        yield Block(line, found[1], found[2], before and before[1].strip())


def commands(block: Block) -> Iterator[list[str]]:
    """The words of every command, without comments, redirections and the variables of a loop."""
    for line in block.code.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$(\w+|\([^)]*\))", "1", line.strip())
        if not re.match(r"(\w+=\S+ )*(esolm|torchrun|python|make) ", line):
            continue
        words = shlex.split(line, comments=True)
        yield words[: next((i for i, word in enumerate(words) if word in (">", "|", "&&")), None)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def marks(path: Path) -> Any:
    return pytest.mark.xfail(reason="being rewritten", strict=False) if path.stem in PENDING else ()


ALL = [(path, block) for path in DOCUMENTS for block in blocks(path)]
COMMANDS = [
    pytest.param(words, marks=marks(path), id=f"{name(path)}:{block.line} {' '.join(words)[:60]}")
    for path, block in ALL
    if block.language in SHELL and block.skipped is None
    for words in commands(block)
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the documents name; `runs/demo` is the bundled model."""
    home = tmp_path_factory.mktemp("documents")
    for model in ("runs/demo", "models/demo"):
        shutil.copytree(PACKAGE / "models" / "stories", home / model)
    tiny.make_data(home / "data" / "mine")
    shutil.copy(ROOT / "README.md", home)
    shutil.copy(FOREIGN, home)
    return home


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with these files; linked, which is safe because the library replaces files as a whole."""
    shutil.copytree(template, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_blocks_are_skipped_for_a_reason() -> None:
    for path, block in ALL:
        assert block.skipped is None or len(block.skipped) > 5, f"{name(path)}:{block.line}"


DRIVER = """
import os, pathlib, runpy, sys, traceback
failed = []
for script in sys.argv[1:]:
    path = pathlib.Path(script).resolve()
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        failed.append(path.name)
    sys.path.remove(str(path.parent))
sys.exit(f"failed: {failed}" if failed else 0)
"""
"""Runs the scripts in turn, each in its folder, in one process: starting PyTorch takes longer than most documents."""


def test_python_runs(template: Path, tmp_path: Path) -> None:
    """All blocks of each document in turn, as a reader would run them."""
    scripts = []
    for path in DOCUMENTS:
        code = ""
        for block in blocks(path):
            if block.language == "python" and block.skipped is None:
                code += "\n" * (block.line - 1 - code.count("\n")) + block.code  # errors name the document's lines
        if code.strip():
            home = tmp_path / path.stem
            shutil.copytree(template, home, copy_function=os.link)
            scripts.append(home / f"{path.stem}.py")
            scripts[-1].write_text(code)
    assert len(scripts) > 10
    one = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests run beside this one
    words = [sys.executable, "-c", DRIVER, *map(str, scripts)]
    found = subprocess.run(words, env=one, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr


def test_the_guide_quotes_the_system_that_the_tests_use() -> None:
    (block,) = (b for b in blocks(ROOT / "CONTRIBUTING.md") if b.language == "python")
    assert FOREIGN.read_text().endswith(block.code)


class Parsed(BaseException):
    """Stops a command behind its parser."""


def parse(monkeypatch: pytest.MonkeyPatch, main: Any, words: list[str]) -> None:
    """Fail for options that the command does not know."""
    for kind in (jsonargparse.ArgumentParser, argparse.ArgumentParser):

        def stopping(self: Any, *rest: Any, original: Any = kind.parse_args, **named: Any) -> None:
            original(self, *rest, **named)
            raise Parsed

        monkeypatch.setattr(kind, "parse_args", stopping)
    with pytest.raises((Parsed, SystemExit)) as stopped:
        assert main(words) == "not reached: the command was refused"
    assert stopped.type is Parsed or stopped.value.code == 0  # --help


@pytest.mark.parametrize("words", COMMANDS)
def test_commands(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands on the bundled model run; the others must be ones that the parsers accept."""
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "torchrun":
        assert "esolm" in words
        words = words[words.index("esolm") :]
    if words[0] == "esolm":
        runs = words[1] in ("sample", "infill", "score", "info", "export") and words[2] == "stories"
        if runs or words[1] in ("--help", "--version"):
            assert cli.main(words[1:]) == 0
        elif words[1] != "demo":
            parse(monkeypatch, cli.main, words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[:3] == ["python", "-m", "experiments"]:
        parse(monkeypatch, importlib.import_module("experiments.runner").main, words[3:])
    elif words[:2] == ["python", "-m"]:
        assert words[2] in sys.stdlib_module_names or importlib.util.find_spec(words[2]), words[2]
    else:
        assert (ROOT / words[1]).exists(), words[1]


LINKED = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "experiments").glob("*/README.md"),
        ROOT / "experiments" / "README.md",
        *(ROOT / "examples").glob("*.md"),
        *(PACKAGE / "models").rglob("*.md"),
    }
)


@pytest.mark.parametrize("path", LINKED, ids=name)
def test_links(path: Path) -> None:
    """Files exist, and so do the headings that links into this and other documents name."""
    for target in re.findall(r"(?:\]\(|<(?:img src|a href)=\")([^)\s\"]+)[)\"]", path.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, target


def test_the_code_map_names_every_package() -> None:
    tree = (ROOT / "README.md").read_text().split("\nsrc/esolm/\n")[1].split("```")[0]
    found = set(re.findall(r"^  (\w+)[/.]", tree, re.MULTILINE))
    assert found == {p.stem for p in PACKAGE.iterdir() if not p.name.startswith("__") and p.name != "py.typed"}


def test_the_citation_is_valid_yaml_and_names_the_paper() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= found.keys()
    (paper,) = found["references"]
    assert paper["url"] == "https://arxiv.org/abs/2506.01928"
    assert len(paper["authors"]) == 10
    readme = (ROOT / "README.md").read_text()
    assert all(f"{a['family-names']}, {a['given-names']}" in readme for a in paper["authors"])


def test_the_changelog_names_modules_that_exist() -> None:
    """The right column of the table of imports; "the same" stands for the names of the left column."""
    table = (ROOT / "CHANGELOG.md").read_text().split("\nImports:\n")[1].split("\n\n")[1]
    for row in table.splitlines()[2:]:
        before, now = (re.findall(r"`([\w.]+)`", cell) for cell in row.strip("| ").split(" | "))
        if now[0].endswith("."):
            now = [now[0] + name.split(".")[-1] for name in before]
        for target in (name for name in now if name.startswith(("esolm.", "experiments."))):
            assert pkgutil.resolve_name(target), target
