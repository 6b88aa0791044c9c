"""From a preset or a YAML file and dotted overrides to the full configuration of a training run."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from ..runtime.nested import flat, merged
from .options import Batching, Compute, Corpus, Optim, Saving, Validation

# Those of the weights, where a run starts from some.
SIZES = ("layers", "width", "heads", "cond_width", "adaln", "mlp_ratio", "rotary_base")
GROUPS: dict[str, type] = {
    "batch": Batching,
    "optim": Optim,
    "compute": Compute,
    "validation": Validation,
    "saving": Saving,
    "corpus": Corpus,
}


def preset_names() -> list[str]:
    """The presets of the package; what starts with an underscore is only a base of others."""
    return sorted(name for name in _files() if not name.startswith("_"))


def _files() -> dict[str, Any]:
    files = (resources.files("esolm") / "presets").iterdir()
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}


def read_preset(name: str) -> dict[str, Any]:
    """The tree of a preset or a YAML file, with what its `base` says below it."""
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ValueError(f"no file {name}: give a YAML file or one of the presets {', '.join(preset_names())}")
        text = Path(name).read_text()
    elif name in (files := _files()):
        text = files[name].read_text()
    else:
        near = nearest(name, preset_names())
        raise ValueError(f"no preset {name!r}: the nearest are {near}. There are {', '.join(preset_names())}")
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{name} must hold keys and values, not {type(tree).__name__}")
    tree = dict(tree)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if base.endswith((".yaml", ".yml")):
        base = str(Path(name).parent / base)
    return _over(read_preset(base), tree)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """merged, but the options of a system leave with it."""
    name = flat(above).get("system.name")
    if name is not None and name != flat(below).get("system.name"):
        below = {key: value for key, value in below.items() if key != "system"}
    return merged(below, above)


def nearest(key: str, known: Iterable[str]) -> str:
    """The known keys that look most like this one, by their whole or by their last word."""

    def likeness(other: str) -> float:
        pairs = ((key, other), (key.rpartition(".")[2], other.rpartition(".")[2]))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    return ", ".join(sorted(known, key=likeness, reverse=True)[:3])


def parser_for(system: str) -> Any:
    """A parser that knows every option of a training run of the named system."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    from ..net.denoiser import DenoiserConfig
    from ..systems import FROM_DATA, find

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="esolm train",
        usage="esolm train PRESET|FILE.yaml [--option VALUE ...]",
        description="Train a model, or go on with a run that is there: the same command resumes it. "
        f"Presets: {', '.join(preset_names())}.",
        exit_on_error=False,
    )
    option = parser.add_argument
    option("--print_config", action="store_true", help="Print the full configuration as YAML and stop.")
    option("--data", type=str, default="data/pydocs", help="A folder that `esolm prepare` made.")
    option("--run", type=str | None, default=None, help="The run's folder; null is runs/PRESET.")
    option("--init", type=str | None, default=None, help="Start from the weights of a run, a checkpoint or a model.")
    option("--steps", type=int, default=1000, help="Steps in all.")
    option("--seed", type=int, default=0, help="Decides the weights, the data order and all noise.")
    option("--log_every", type=int, default=10, help="Steps between lines of metrics.jsonl.")
    option("--log", type=list[Literal["tensorboard", "wandb"]], default=[], help="Where to log besides.")
    for key, group in GROUPS.items():
        parser.add_class_arguments(group, key)
    parser.add_class_arguments(DenoiserConfig, "net", skip={"vocab_size", "length"})
    option("--net.length", type=int | None, default=None, help="Tokens in an example; null is the data's.")
    option("--system.name", type=str, default=system, help="A system of esolm, or package.module.Class.")
    cls = find(system)
    parser.add_class_arguments(cls, "system", skip=set(FROM_DATA) & {field.name for field in fields(cls)})
    return parser


def read_config(argv: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """The configuration that `PRESET|FILE.yaml [--option VALUE …]` spells, and whether it is only to be printed."""
    helping = {"-h", "--help"} & set(argv)
    if not argv or (argv[0].startswith("-") and not helping):
        raise ValueError(f"give a preset or a YAML file first: one of {', '.join(preset_names())}, or FILE.yaml")
    name, options = ("demo", list(argv)) if argv[0].startswith("-") else (argv[0], list(argv[1:]))
    tree = _over(read_preset(name), _named_system(options))
    parser = parser_for(flat(tree).get("system.name", "esolm"))
    known = {key for key in flat(parser.get_defaults().as_dict()) if key != "print_config"}
    for key in flat(tree):
        if key not in known:
            raise ValueError(f"unknown key {key!r} in {name}: the nearest known ones are {nearest(key, known)}")
    words = {f"--{key}" for key in known}
    for word in (option.partition("=")[0].rstrip("+") for option in options if option.startswith("--")):
        if word not in words | {"--print_config", "--help"} | {f"--{group}" for group in GROUPS}:
            raise ValueError(f"unknown option {word}: the nearest known ones are {nearest(word, words)}")
    parser.set_defaults(flat(tree))
    # jsonargparse gives a meaning of its own to this word, which needs a --config option.
    printing = "--print_config" in options
    try:
        config = parser.parse_args([word for word in options if word != "--print_config"]).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    del config["print_config"]
    given = [name for name in SIZES if any(word.partition("=")[0] == f"--net.{name}" for word in options)]
    if config["init"] is not None and given:
        raise ValueError(f"with --init the network has the sizes of {config['init']}: leave --net.{given[0]} out")
    if config["run"] is None:
        config["run"] = f"runs/{Path(name).stem}"
    return config, printing


def _named_system(options: Sequence[str]) -> dict[str, Any]:
    """The system that the options name, if they do."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--system.name", dest="name")
    name = parser.parse_known_args(options)[0].name
    return {} if name is None else {"system": {"name": name}}


def show_config(config: Mapping[str, Any]) -> int:
    """What `--print_config` asks for: YAML that is a configuration again."""
    print(yaml.safe_dump(dict(config), sort_keys=False), end="")
    return 0
