"""Builds of the package, and environments with nothing but what the package needs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NO_COMPILER = {"CC": "false", "CXX": "false", "LDSHARED": "false", "LDCXXSHARED": "false"}


def copied(folder: Path) -> Path:
    """The files that a build needs, without a library that is already there."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so*", "*.egg-info", "__pycache__"))
    return folder


def run(*command: str | Path, **environment: str) -> str:
    """The output of a command, which must succeed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], env={**inherited, **environment}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed(requirements: list[str]) -> set[str]:
    """The installed distributions that these requirements need, directly or not."""
    found, waiting = set[tuple[str, str]](), [(Requirement(line), "") for line in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for own in ("", *requirement.extras):
            if (key := (requirement.name.lower().replace("_", "-"), own)) not in found:
                found.add(key)
                waiting += [(Requirement(line), own) for line in importlib.metadata.requires(key[0]) or []]
    return {name for name, _ in found}


def environment_with(folder: Path, requirements: list[str]) -> Path:
    """The Python of a new environment in which only these requirements, and theirs, can be imported.

    They are links to the files of this environment: nothing is downloaded.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed(requirements):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(str(distribution.locate_file(top)))
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    return folder / "bin" / "python"


def install(python: Path, wheel: Path) -> None:
    """Install a wheel without its requirements."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "-q", wheel]
    run(*pip, PIP_DISABLE_PIP_VERSION_CHECK="1")
