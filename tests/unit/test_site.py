"""The documentation site: what its pages begin with, its generated reference, its links and its figures.

tests/e2e/test_site_build.py builds it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from website import figures, reference
from website.links import rewrite

import esolm
from esolm import cli, systems
from esolm.runtime.dotted import flat
from esolm.sampling.options import SamplingOptions
from esolm.systems import FROM_DATA
from esolm.training.config import RunConfig, add_options, preset_names
from esolm.tune.config import DpoConfig, GrpoConfig

ROOT = Path(__file__).parents[2]
SOURCE = Path(esolm.__file__).parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_pages_begin_with_what_one_can_do(path: Path) -> None:
    """A title, then a sentence: no heading, picture, table or code."""
    text = re.sub(r"<!--.*?-->\n*", "", path.read_text(), flags=re.DOTALL)
    title, first = text.split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"[A-Z]", first)
    assert re.search(r"[.:]$", first.rstrip())


def test_every_document_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]))
    found = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert found <= listed


# ---- reference ----


@functools.cache
def command_line() -> dict[str, str]:
    """The sections of the page, by the words of the command."""
    parts = re.split(r"^##+ esolm (.*)$", reference.command_line(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_has_a_section() -> None:
    assert {words for words in command_line() if " " not in words} == set(cli.COMMANDS)
    assert {"tune grpo", "tune dpo", "bench sample"} <= command_line().keys()


def test_options_of_commands_come_from_their_parsers() -> None:
    assert "| `--num_samples" in command_line()["sample"]
    assert "--top_p" in command_line()["sample"]
    assert "--port" in command_line()["serve"]
    assert "configuration.md" in command_line()["train"]
    assert "--optim.lr" not in command_line()["train"].replace("`--optim.lr 1e-3`", "")


def test_a_new_option_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from esolm.cli import parsing

    def with_extra(*words: Any, original: Any = parsing.parser, **named: Any) -> Any:
        made = original(*words, **named)
        made.add_argument("--surprise", type=int, default=7, help="A new option.")
        return made

    monkeypatch.setattr("esolm.cli.info.parser", with_extra)
    section = "\n".join(reference._command(["info"], "Describe a run."))
    assert re.search(r"\| `--surprise \w+` \| `7` \| A new option. \|", section)


@functools.cache
def configuration() -> str:
    return reference.configuration()


def test_every_key_is_listed_with_its_default() -> None:
    from jsonargparse import ArgumentParser

    rows = dict(re.findall(r"^\| `([\w.]+)[^`]*` \| (\S*)", configuration(), re.MULTILINE))
    for config in (RunConfig, GrpoConfig, DpoConfig):
        known = add_options(ArgumentParser(), "esolm", config)
        assert {key for key in known if not key.startswith("system.")} <= rows.keys()
    for name in systems.names():
        fields = {f"system.{field.name}" for field in dataclasses.fields(systems.find(name))}
        assert fields - {f"system.{name}" for name in FROM_DATA} <= rows.keys(), name
    assert {field.name for field in dataclasses.fields(SamplingOptions)} <= rows.keys()
    assert set(preset_names()) <= set(re.findall(r"^\| `([^`]+)`", configuration(), re.MULTILINE))
    for key, value in flat(RunConfig().tree()).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert rows[key] == f"`{value}`"


# ---- docstrings ----


class Class(NamedTuple):
    bases: tuple[str, ...]
    documented: frozenset[str]


def trees() -> Iterator[tuple[str, ast.Module]]:
    """The public modules."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).with_suffix("")
        if not any(part.startswith("_") and part != "__init__" for part in name.parts):
            yield str(name), ast.parse(path.read_text())


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
            if not marks & {"overload", "setter"}:
                yield node


def test_every_public_name_has_a_docstring() -> None:
    """Of its own, or from the class that it overrides a member of. Class names are unique."""
    modules = dict(trees())
    classes = {
        node.name: Class(
            tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases),
            frozenset(member.name for member in public(node.body) if ast.get_docstring(member)),
        )
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def inherited(owner: str, member: str) -> bool:
        bases = [base for base in classes[owner].bases if base in classes]
        return any(member in classes[base].documented or inherited(base, member) for base in bases)

    missing = [name for name, tree in modules.items() if not ast.get_docstring(tree)]
    for module, tree in modules.items():
        for node in public(tree.body):
            missing += [] if ast.get_docstring(node) else [f"{module}: {node.name}"]
            for member in public(node.body) if isinstance(node, ast.ClassDef) else ():
                if not ast.get_docstring(member) and not inherited(node.name, member.name):
                    missing.append(f"{module}: {node.name}.{member.name}")
    assert missing == [], "\n".join(missing)


def test_the_reference_shows_every_public_module_and_name() -> None:
    pages = "\n".join([reference.public_names(), *map(reference.package, reference.packages())])
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    assert {f"esolm.{name}" for name in esolm.__all__} <= shown
    modules = {f"esolm.{name}".replace("/", ".").removesuffix(".__init__") for name, _ in trees()}
    commands = ("esolm.cli", "esolm.bench")
    assert {module for module in modules - {"esolm", "esolm.__init__"} if not module.startswith(commands)} <= shown


def test_arguments_are_shown_as_a_list() -> None:
    pytest.importorskip("griffe", reason="needs mkdocstrings: pip install 'esolm[docs]'")
    from website.docstrings import with_arguments

    text = "Score texts.\n\nfirst: a text: one,\nor several. second, third [B]: numbers.\n\nnote: none."
    found = with_arguments(text, {"first", "second", "third"})
    expected = "Score texts.\n\n- `first`: a text: one, or several.\n- `second, third` [B]: numbers.\n\nnote: none."
    assert found == expected
    assert with_arguments(text, {"other"}) == text
    assert with_arguments("A.\n\nArgs:\n    first: b.", {"first"}) == "A.\n\nArgs:\n    first: b."


# ---- links ----


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("docs/a.md", "[b](data.md#x)", "[b](data.md#x)"),
        ("docs/a.md", "[b](../CONTRIBUTING.md#tests)", "[b](contributing.md#tests)"),
        ("docs/decisions/README.md", "[b](../../CHANGELOG.md)", "[b](../changelog.md)"),
        ("docs/a.md", "[b](../README.md#code-map)", "[b](index.md)"),
        ("docs/a.md", "[`b`](../src/esolm/model.py), c", "`b`, c"),
        ("docs/a.md", "![b](images/page.png)", "![b](images/page.png)"),
        ("docs/a.md", "[b](decisions/)", "[b](decisions/README.md)"),
        ("CHANGELOG.md", "[b](docs/systems.md#ar), [c](LICENSE)", "[b](systems.md#ar), c"),
        ("docs/a.md", "`[b](../src)` and [b](https://arxiv.org)", "`[b](../src)` and [b](https://arxiv.org)"),
        ("docs/a.md", "```\n[b](../src)\n```\n", "```\n[b](../src)\n```\n"),
        ("docs/a.md", "`a` [b\nc](../LICENSE) `d`", "`a` b\nc `d`"),
    ],
)
def test_links_are_rewritten(source: str, before: str, after: str) -> None:
    assert rewrite(before, source) == after


def test_links_lead_to_the_repository_if_it_has_an_address() -> None:
    found = rewrite("[b](../src/esolm/model.py)", "docs/a.md", "https://example.org/esolm/")
    assert found == "[b](https://example.org/esolm/blob/main/src/esolm/model.py)"


def test_the_theme_loads_nothing_from_the_network() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    assert yaml.safe_load(text)["theme"]["font"] is False


# ---- figures ----


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_are_what_the_library_draws(name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'esolm[plot]'")
    stored = (figures.FOLDER / f"concepts-{name}.svg").read_text()
    version = re.search(r"Matplotlib v([\w.]+)", stored)
    assert version is not None
    if version[1] != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {version[1]}, here is {matplotlib.__version__}")
    assert figures.svg(name) == stored, "draw them again: python -m website.figures"


def test_the_cache_figure_shows_each_position_computed_at_most_twice() -> None:
    eso, mdlm = (panel.values for panel in figures.cache())
    assert ((eso >= figures.CLEAN).sum(0) <= 2).all()
    assert bool((mdlm >= figures.CLEAN).all())
    assert bool((eso[-1] == figures.CACHED).any())
