"""The optional packages: what each extra is for, and whether its packages can be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

PATIENCE = 300.0
"""Seconds that the imports of all packages may take."""


class Extra(NamedTuple):
    """An extra of the package."""

    purpose: str
    modules: tuple[str, ...]


_SERVER = ("fastapi", "fastapi_offline", "uvicorn")
EXTRAS = {
    "hf": Extra("transformers: Hugging Face models, chat templates, judges", ("transformers",)),
    "serve": Extra("esolm serve", _SERVER),
    "constraints": Extra("--regex and --json_schema", ("outlines_core",)),
    "lora": Extra("--tuning.parts lora", ("peft",)),
    "gguf": Extra("reading .gguf files", ("gguf",)),
    "eval": Extra("the lm-evaluation-harness", ("lm_eval",)),
    "datasets": Extra("corpora of the hub (hf:NAME)", ("datasets",)),
    "zstd": Extra("corpora in .zst files", ("zstandard",)),
    "chem": Extra("molecules", ("rdkit",)),
    "plot": Extra("GIFs and plots", ("matplotlib",)),
    "tensorboard": Extra("--log tensorboard", ("tensorboard",)),
    "wandb": Extra("--log wandb", ("wandb",)),
    "ray": Extra("serving on several machines", (*_SERVER, "ray")),
}
"""The extras of pyproject.toml that add a function."""
_MARK = "esolm-probe "
_PROBE = f"""
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as found:
        error = f"{{type(found).__name__}}: {{found}}"
    print("\\n{_MARK}" + json.dumps([name, error]), flush=True)
"""


def check_extras() -> dict[str, dict[str, Any]]:
    """For each extra, its state (installed, missing or broken), the versions of its packages, and their errors."""
    names = list(dict.fromkeys(name for extra in EXTRAS.values() for name in extra.modules))
    there = [name for name in names if is_there(name)]
    errors = import_errors(there)
    found = {}
    for key, extra in EXTRAS.items():
        wrong = {name: errors[name] for name in extra.modules if errors.get(name) is not None}
        missing = [name for name in extra.modules if name not in there]
        found[key] = {
            "for": extra.purpose,
            "state": "broken" if wrong else "missing" if missing else "installed",
            "versions": {name: version(name) for name in extra.modules if name in there},
            "install": f"pip install 'esolm[{key}]'",
        }
        if wrong:
            found[key]["errors"] = wrong
    return found


def is_there(name: str) -> bool:
    """Whether a package is installed, whatever its import does."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return True


def version(name: str) -> str | None:
    """The version of the distribution that holds a module."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_errors(names: Sequence[str], patience: float = PATIENCE) -> dict[str, str | None]:
    """For each package the error of its import, or None; tried in another process, which a package may end."""
    found = dict[str, str | None]()
    while rest := [name for name in names if name not in found]:
        command = [sys.executable, "-c", _PROBE, json.dumps(sys.path), *rest]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience, stdin=subprocess.DEVNULL)
            output, end = done.stdout, f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
            end = f"the import takes longer than {patience:.0f} s"
        lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
        found.update(dict(map(json.loads, lines)))
        if left := [name for name in rest if name not in found]:
            found[left[0]] = end
    return {name: error and " ".join(error.split()) for name, error in found.items()}
