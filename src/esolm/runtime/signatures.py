"""Signatures of functions and option classes, read from the source.

Their modules are not imported, so that `--help`, shell completion and error messages need not wait for PyTorch.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LIGHT = ("typing", "collections.abc", "pathlib")
"""Modules whose names may stand in annotations and defaults."""


def signature(module: str, name: str) -> Callable[..., Any]:
    """A function that has only the signature and docstring of the function or dataclass `module.name` of this package.

    Fields of a dataclass become arguments, except those with a factory, and the docstrings below them the section Args
    of the docstring. Inherited fields are left out.
    Annotations and defaults may use builtins, `typing`, `collections.abc`, `pathlib`, and literals of the module.
    """
    tree, path = _parsed(module)
    body: list[ast.stmt] = [*_names(tree)]
    found = next(n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    body.append(_as_function(found) if isinstance(found, ast.ClassDef) else _without_body(found))
    scope: dict[str, Any] = {"__name__": __name__}  # jsonargparse imports the module that a function names
    code = compile(ast.fix_missing_locations(ast.Module(body, [])), str(path), "exec", dont_inherit=True)
    exec(code, scope)
    made: Callable[..., Any] = scope[name]
    return made


def class_in(module: str, *bases: str) -> str:
    """The name of the dataclass of a module of this package that subclasses one of `bases`."""
    tree, _ = _parsed(module)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return next(c.name for c in classes if {ast.unparse(base) for base in c.bases} & set(bases))


def literal(module: str, name: str) -> Any:
    """The value of a literal that a module of this package assigns to `name`."""
    targets = (node for node in _parsed(module)[0].body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in targets if ast.unparse(node.targets[0]) == name)


def modules(package: str) -> list[str]:
    """The public modules of a package of this package."""
    found = ROOT.joinpath(*package.split(".")[1:]).glob("*.py")
    return sorted(path.stem for path in found if not path.stem.startswith("_"))


@functools.cache
def _parsed(module: str) -> tuple[ast.Module, Path]:
    # Not importlib.util.find_spec, which imports the packages above the module.
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")), path


def _names(tree: ast.Module) -> Iterator[ast.stmt]:
    """Light imports, and assignments of literals."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in _LIGHT:
            yield node
        elif isinstance(node, ast.Assign):
            try:
                ast.literal_eval(node.value)
            except ValueError:
                continue
            yield node


def _without_body(node: ast.FunctionDef) -> ast.FunctionDef:
    return ast.FunctionDef(node.name, node.args, node.body[:1], [])


def _as_function(node: ast.ClassDef) -> ast.FunctionDef:
    """The fields of a dataclass as the arguments of a function."""
    fields, about = list[ast.AnnAssign](), dict[str, str]()
    for statement, following in zip(node.body, [*node.body[1:], ast.Pass()]):
        if isinstance(statement, ast.AnnAssign) and _is_option(statement):
            fields.append(statement)
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                about[_name(statement)] = " ".join(str(following.value.value).split())
    lines = [ast.get_docstring(node) or "", "", "Args:", *(f"    {name}: {text}" for name, text in about.items())]
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(_name(field), field.annotation) for field in fields],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[field.value for field in fields if field.value is not None],
    )
    return ast.FunctionDef(node.name, arguments, [ast.Expr(ast.Constant("\n".join(lines)))], [])


def _is_option(field: ast.AnnAssign) -> bool:
    """Whether a field is an argument with a simple default: no class variable, and not made by `field(…)`."""
    return not (ast.unparse(field.annotation).startswith("ClassVar") or isinstance(field.value, ast.Call))


def _name(field: ast.AnnAssign) -> str:
    return ast.unparse(field.target)
