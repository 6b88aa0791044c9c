"""Nested mappings as dotted keys and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    keys: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys


def nest(keys: Mapping[str, Any]) -> dict[str, Any]:
    """{"optim.lr": 1} -> {"optim": {"lr": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, leaf = key.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of both trees; those of `above` take precedence."""
    return nest({**flat(below), **flat(above)})


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values; a missing one is None."""
    a, b = flat(one), flat(other)
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def listed(value: Any) -> Any:
    """The value with lists for tuples, as YAML and JSON read them."""
    if isinstance(value, Mapping):
        return {key: listed(each) for key, each in value.items()}
    return [listed(each) for each in value] if isinstance(value, list | tuple) else value
