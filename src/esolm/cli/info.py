"""What a folder is: a run, a checkpoint, a model of `esolm convert` or `esolm export`, or prepared data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..runtime.nested import flat
from ..storage import checkpoint, folder
from ..training import runs
from . import COMMANDS
from .parsing import parse, parser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    made = parser("info FOLDER", COMMANDS["info"])
    made.add_argument("folder", type=str, help="A run, a checkpoint, a model or prepared data.")
    made.add_argument("--json", action="store_true", help="Print JSON.")
    options = parse(made, argv)
    about = describe(Path(options["folder"]))
    if options["json"]:
        print(json.dumps(about, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value", show_header=False)
    for key, value in flat(about).items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
    Console().print(table)
    return 0


def describe(path: Path) -> dict[str, Any]:
    """What the folder holds, or a model of the package by this name, as a tree that JSON can hold."""
    if not path.exists():
        path = folder.packaged().get(str(path), path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a run, a checkpoint or prepared data")
    if runs.is_run(path):
        return describe_run(path)
    if (path / "state.json").is_file():
        return describe_checkpoint(path)
    if folder.is_model(path):
        return describe_model(path)
    if (path / "manifest.json").is_file():
        return describe_data(path)
    known = "run (config.yaml), checkpoint (state.json), model (config.json) or prepared data (manifest.json)"
    raise ValueError(f"{path} is no {known}")


def describe_run(run: Path) -> dict[str, Any]:
    """A run: how far it is, what it reached, and how it was configured."""
    config = runs.read_config(run)
    root = run / "checkpoints"
    last, top = checkpoint.latest(root), checkpoint.best(root)
    validations = [record for record in runs.read_metrics(run) if "validation" in record]
    about: dict[str, Any] = {"kind": "run", "path": str(run), "steps": config["steps"]}
    about["step"] = checkpoint.read(last)["step"] if last else 0
    about["state"] = "finished" if about["step"] >= config["steps"] else "unfinished"
    if validations:
        about["validation"] = {"step": validations[-1]["step"], **validations[-1]["validation"]}
        about["validations"] = {str(record["step"]): record["validation"]["loss"] for record in validations}
    if last is not None:
        about["parameters"] = sum(shape.numel() for shape in checkpoint.shapes(last, "model").values())
        about["tokens"] = checkpoint.read(last)["tokens"]
    about["checkpoints"] = [checkpoint.name_of(step) for step in checkpoint.list_steps(root)]
    about["best"] = top.name if top else None
    return {**about, "config": config}


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint: its step, its network, its system and its files."""
    state = checkpoint.read(path)
    parameters = sum(shape.numel() for shape in checkpoint.shapes(path, "model").values())
    return {"kind": "checkpoint", "path": str(path), "parameters": parameters, **state}


def describe_model(path: Path) -> dict[str, Any]:
    """A model of convert or export: its network, its system and where it comes from."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    parts = {key: config.get(key) for key in ("net", "system", "about")}
    return {"kind": "model", "path": str(path), "parameters": count_parameters(path), **parts}


def describe_data(path: Path) -> dict[str, Any]:
    """Prepared data: its manifest."""
    return {"kind": "data", "path": str(path), **json.loads((path / "manifest.json").read_text())}


def count_parameters(path: Path) -> int:
    """The number of weights of a model, from the header of its file."""
    with safe_open(path / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
