"""`esolm info`: describe a run, a checkpoint, a model folder or prepared data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import COMMANDS
from .parsing import add_json, parse, parser

LONGEST = 200
"""Characters of a value in the table; JSON has all of them, such as the token counts of diffusionbert."""


def make_parser() -> Any:
    """The parser."""
    made = parser("info FOLDER", COMMANDS["info"])
    made.add_argument("folder", type=str, help="A run, a checkpoint, a model, also a bundled one, or prepared data.")
    made.add_argument("--all", action="store_true", help="Print every option too.")
    add_json(made)
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse(make_parser(), argv)
    about = describe(Path(options["folder"]))
    if about["kind"] != "data":
        from ..net.native.library import status

        about["engine"] = status()
    if options["json"]:
        print(json.dumps(about, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    from ..runtime.dotted import flat

    table = Table("key", "value", show_header=False)
    shown = about if options["all"] else summary(about)
    for key, value in flat(shown).items():
        value = float(f"{value:.6g}") if isinstance(value, float) else value
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        table.add_row(key, text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
    Console().print(table)
    if shown != about:
        print(f"esolm info {options['folder']} --all prints every option")
    return 0


def summary(about: Mapping[str, Any]) -> dict[str, Any]:
    """What one wants to know first of a run, a checkpoint or a model; prepared data as they are."""
    if about["kind"] == "data":
        return dict(about)
    config = about.get("config", about.get("identity", about))
    net, system, origin = config["net"], dict(config["system"]), about.get("about", {})
    alpha_0 = f", alpha_0 = {system['alpha_0']}" if "alpha_0" in system else ""
    size = f"{net['layers']} layers of width {net['width']}, {net['heads']} heads, {net['length']} tokens"
    found = {key: about[key] for key in ("kind", "path", "parameters") if key in about}
    found |= {"network": size, "system": f"{system['name']}{alpha_0}"}
    for key in ("state", "step", "steps", "tokens", "seconds", "validation", "best", "corpus"):
        if about.get(key) is not None:
            found[key] = about[key]
    for key in ("init", "source", "corpus", "tokenizer", "steps", "training_tokens", "validation"):
        if origin.get(key) is not None:
            found[key] = origin[key]
    return {**found, **{key: about[key] for key in ("engine",) if key in about}}


def describe(path: Path) -> dict[str, Any]:
    """Describe the folder, or the bundled model of this name, as JSON."""
    from ..storage import folder
    from ..training import runs

    if not path.exists():
        path = folder.packaged().get(str(path), path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a run, a checkpoint, a model or prepared data")
    if runs.is_run(path):
        return describe_run(path)
    if (path / "state.json").is_file():
        return describe_checkpoint(path)
    if folder.is_model(path):
        return describe_model(path)
    if (path / "manifest.json").is_file():
        return describe_data(path)
    if (path / "config.json").is_file():
        raise folder.not_a_model(path)
    known = "run (config.yaml), checkpoint (state.json), model (config.json) nor prepared data (manifest.json)"
    raise ValueError(f"{path} is neither a {known}")


def describe_run(run: Path) -> dict[str, Any]:
    """A run: its progress, its seconds of training, its validation loss, its corpus and its configuration."""
    from ..storage import checkpoint
    from ..training import runs

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
        about["alpha_0"] = {
            alpha_0: {str(record["step"]): record["validation"]["alpha_0"][alpha_0] for record in validations}
            for alpha_0 in validations[-1]["validation"].get("alpha_0", {})
        }
    if last is not None:
        about["parameters"] = sum(shape.numel() for shape in checkpoint.shapes(last, "model").values())
        about |= {key: value for key, value in checkpoint.read(last).items() if key in ("tokens", "seconds")}
    about["checkpoints"] = [checkpoint.name_of(step) for step in checkpoint.list_steps(root)]
    about["best"] = top.name if top else None
    if (manifest := run / "manifest.json").is_file():
        used = json.loads(manifest.read_text(encoding="utf-8"))
        config.pop("corpus", None)  # what `esolm demo` would prepare, which another --data replaces
        about["corpus"] = {key: used[key] for key in ("corpus", "tokenizer", "length", "packing") if key in used}
    return {**about, "config": config}


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint: its step, its network, its system and its files."""
    from ..storage import checkpoint

    state = checkpoint.read(path)
    parameters = sum(shape.numel() for shape in checkpoint.shapes(path, "model").values())
    return {"kind": "checkpoint", "path": str(path), "parameters": parameters, **state}


def describe_model(path: Path) -> dict[str, Any]:
    """A model folder: its network, its system and its origin."""
    from ..storage.folder import count_parameters

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    parts = {key: config.get(key) for key in ("net", "system", "about")}
    if lacking := [key for key in ("net", "system") if not isinstance(parts[key], dict)]:
        raise ValueError(f"{path / 'config.json'} is damaged: it has no {' and no '.join(lacking)}")
    return {"kind": "model", "path": str(path), "parameters": count_parameters(path), **parts}


def describe_data(path: Path) -> dict[str, Any]:
    """Prepared data: its manifest."""
    try:
        return {"kind": "data", "path": str(path), **json.loads((path / "manifest.json").read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / 'manifest.json'} is damaged ({error}): prepare the data again") from error
