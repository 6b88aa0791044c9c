"""`esolm train`: train a model or resume a run. Also reads the options that `esolm demo` and `esolm plan` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from ..runtime.dotted import flat
from ..training.config import RunConfig, add_options, nearest, preset_names, read_preset
from . import COMMANDS
from .parsing import parse, parser

OWN = "print_config"


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    config, own = read(argv)
    if own[OWN]:
        return show(config)
    from ..training.trainer import Trainer

    outcome = Trainer(config).fit()
    return 0 if outcome.signal is None else 128 + outcome.signal


def show(config: RunConfig) -> int:
    """Print a configuration as YAML, which `esolm train` accepts again."""
    print(yaml.safe_dump(config.tree(), sort_keys=False), end="")
    return 0


def read(
    argv: Sequence[str], command: str = "train", add: Callable[[Any], None] | None = None
) -> tuple[RunConfig, dict[str, Any]]:
    """Parse `PRESET|FILE.yaml [--option VALUE …]` into a configuration and the command's own options.

    add: adds the command's own options to the parser, besides --print_config.
    """
    names = ", ".join(preset_names())
    helping = bool({"-h", "--help"} & set(argv))
    if not argv or (argv[0].startswith("-") and not helping):
        raise ValueError(f"give a preset or a YAML file first: one of {names}, or FILE.yaml")
    name, options = (None, list(argv)) if argv[0].startswith("-") else (argv[0], list(argv[1:]))
    tree = flat(read_preset(name)) if name else {}
    values = f"Defaults: those of {name}." if name else "A preset overrides these defaults: see PRESET --help."
    made = parser(f"{command} PRESET|FILE.yaml", f"{COMMANDS[command]} {values} Presets: {names}.")
    made.add_argument(f"--{OWN}", action="store_true", help="Print the complete configuration as YAML and stop.")
    if add is not None:
        add(made)
    own = set(flat(made.get_defaults().as_dict()))
    system = _named_system(options) or tree.get("system.name", "esolm")
    known = add_options(made, system)
    check_words(options, known)
    if helping:
        made.set_defaults({key: value for key, value in tree.items() if key in known - {"system.name"}})
        parse(made, ["--help"])
    # jsonargparse treats --print_config specially, so it is removed before parsing.
    words = [word for word in options if word != f"--{OWN}"]
    given = flat(parse(made, words, defaults=False))
    found = {**made.get_defaults().as_dict(), **given, OWN: len(words) < len(options)}
    config = RunConfig.preset(str(name), **{key: value for key, value in given.items() if key not in own})
    return config, {key: found[key] for key in own}


def check_words(options: Sequence[str], known: set[str], config: type[RunConfig] = RunConfig) -> None:
    """Raise ValueError, with the nearest known options, for an unknown one."""
    words = {f"--{key}" for key in known}
    for word in (option.partition("=")[0].rstrip("+") for option in options if option.startswith("--")):
        if word not in words | {"--help"} | {f"--{group}" for group in config.groups()}:
            raise ValueError(f"unknown option {word}: the nearest known ones are {nearest(word, words)}")


def _named_system(options: Sequence[str]) -> str | None:
    """The system that the options name, if any."""
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--system.name", dest="name")
    return found.parse_known_args(options)[0].name
