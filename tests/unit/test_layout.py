"""The layout of the source tree: the order of the packages, what a module may import, and the sizes of its parts."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import esolm

ROOT = Path(esolm.__file__).parent
TESTS = Path(__file__).parents[1]
PACKAGES = (
    "core", "runtime", "net", "constraints", "sampling", "systems", "data", "viz", "likelihood", "generation",
    "storage", "training", "model", "serving", "metrics", "tune", "interop", "bench", "cli", "__main__",
)  # fmt: skip
"""In import order: a package imports itself and the ones before it. `model` is a module."""
EXTRAS = {
    "transformers", "datasets", "matplotlib", "rdkit", "lm_eval", "huggingface_hub", "tensorboard", "wandb",
    "zstandard", "gguf", "llama_cpp", "peft", "fastapi", "uvicorn", "pydantic", "starlette", "ray",
    "outlines_core",
}  # fmt: skip
WRAPPERS = {
    "interop/hf": "transformers", "interop/harness": "lm_eval", "serving/api": "fastapi", "serving/bodies": "pydantic",
    "serving/refusals": "fastapi",
    "serving/replies": "fastapi", "serving/routes": "fastapi", "serving/server": "uvicorn", "serving/ray_app": "ray",
}  # fmt: skip
"""Modules that subclass an extra's classes, and so import it at the top."""
MODULE_LINES, FUNCTION_LINES = 350, 60

MODULES = {
    str(path.relative_to(ROOT).with_suffix("")): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}
"""Syntax trees by name, as in `data/loader`."""


def imports(name: str, tree: ast.AST) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Every import statement, also inside functions, with the absolute names it imports."""
    parents = ["esolm", *name.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            yield node, [".".join([*module, alias.name]) for alias in node.names]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_only_packages_and_the_model_at_the_root():
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert files == {"__init__.py", "__main__.py", "model.py", "py.typed"}
    assert folders == {*PACKAGES, "presets", "models"} - {"model", "__main__"}


def test_packages_import_only_earlier_packages():
    upward = set()
    for name, tree in MODULES.items():
        package = name.split("/")[0]
        for _, names in imports(name, tree):
            for target in (n.split(".")[1] for n in names if n.startswith("esolm.")):
                if target in PACKAGES and PACKAGES.index(target) > PACKAGES.index(package):
                    upward.add(f"{name} -> {target}")
    assert upward == set()


def test_systems_do_not_import_each_other():
    systems = {name.split("/")[1] for name in MODULES if name.startswith("systems/")} - {"__init__"}
    systems = {name for name in systems if not name.startswith("_")}  # the others are shared
    for name in systems:
        for _, names in imports(f"systems/{name}", MODULES[f"systems/{name}"]):
            assert not {f"esolm.systems.{other}" for other in systems} & {n.rsplit(".", 1)[0] for n in names}, name


def test_packages_say_what_they_own():
    packages = set(PACKAGES) - {"model", "__main__"}
    assert {p for p in packages if len(ast.get_docstring(MODULES[f"{p}/__init__"]) or "") < 20} == set()


def test_class_names_are_unique():
    names = sorted(
        node.name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and (name.split("/")[0], node.name) != ("systems", "System")
    )
    twice = {name for name, group in itertools.groupby(names) if len(list(group)) > 1}
    assert twice == set()


def test_nothing_probes_a_system():
    """Everything that the library needs of a system is a member of the contract in `esolm.systems`."""
    probes = {
        f"{name}: {ast.unparse(node)}"
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and re.match(r"(has|get)attr\((\w+\.)*system\b", ast.unparse(node))
    }
    assert probes == set()


def test_nothing_is_cast_to_a_network():
    casts = {
        f"{name}: {ast.unparse(node)}"
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and re.match(r"(typing\.)?cast\('?(Denoiser|Folded|Graphed)\b", ast.unparse(node))
    }
    assert casts == set()


def test_modules_and_functions_are_short():
    long = {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if len(p.read_text().splitlines()) > MODULE_LINES}
    assert long == set()
    long = {
        f"{name}: {node.name}"
        for name, tree in MODULES.items()
        for node in functions(tree)
        if node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    }
    assert long == set()


def test_extras_are_imported_inside_functions():
    for name, tree in MODULES.items():
        inside = {inner for function in functions(tree) for inner in ast.walk(function)}
        checked = {inner for node in tree.body if is_type_checking(node) for inner in ast.walk(node)}
        for node, names in imports(name, tree):
            extras = {n.split(".")[0] for n in names} & EXTRAS - {WRAPPERS.get(name)}
            assert not extras or node in inside | checked, f"{name}:{node.lineno} imports {extras}"
            wrapped = {n for n in names for w in WRAPPERS if n.startswith("esolm." + w.replace("/", "."))}
            assert not wrapped or name in WRAPPERS or node in inside | checked, (
                f"{name}:{node.lineno} imports {wrapped}"
            )


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def test_tests_share_helpers_through_support_only():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"support"}
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {n for n in names if n.split(".")[0] in folders or n.split(".")[-1].startswith("test_")}
            assert not found, f"{path.relative_to(TESTS)}:{node.lineno} imports {found}"


def test_every_module_imports_without_extras():
    """What the job with minimal dependencies runs."""
    script = TESTS / "minimal_imports.py"
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
