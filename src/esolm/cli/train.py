"""`esolm train`: train a model or resume a run. Also reads the options that `esolm demo` and `esolm plan` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..runtime.dotted import flat
from ..training.config import SIZES, RunConfig, add_options, nearest, preset_names, read_preset
from . import COMMANDS, parsing
from .layout import group
from .parsing import parse, parser, positive, taken

OWN = "print_config"


def run(argv: Sequence[str], command: str = "train") -> int:
    """Run the command; command: the one that the user called."""
    config, own = read(argv, command)
    if own[OWN]:
        return show(config)
    check_start(argv[0], config, argv)
    from ..training.trainer import Trainer

    outcome = Trainer(config).fit()
    return 0 if outcome.signal is None else 128 + outcome.signal


def check_start(preset: str, config: RunConfig, words: Sequence[str]) -> None:
    """Raise ValueError for a new run without the weights that its preset starts from.

    Whoever gives the sizes of a network wants one that is trained from scratch.
    """
    start = read_preset(preset).get("starts_from")
    sizes = {f"--net.{size}" for size in SIZES} & {word.partition("=")[0] for word in words}
    if start and not config.init and not sizes and not (Path(str(config.run)) / "config.yaml").is_file():
        raise ValueError(f"preset {preset} starts from {start}: give --init MODEL, or use esolm adapt MODEL RUN")


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
    helping = bool({"-h", "--help"} & set(argv))
    if not argv or (argv[0].startswith("-") and not helping):
        raise ValueError(f"give a preset or a YAML file first: one of {', '.join(preset_names())}, or FILE.yaml")
    name, options = (None, list(argv)) if argv[0].startswith("-") else (argv[0], list(argv[1:]))
    made, own, known, defaults = run_parser(command, name, _named_system(options), add)
    check_words(options, known)
    if helping:
        made.set_defaults(defaults)
        parse(made, ["--help"])
    # jsonargparse treats --print_config specially, so it is removed before parsing.
    printing, words = taken(options, f"--{OWN}")
    given = flat(parse(made, words, defaults=False))
    found = {**made.get_defaults().as_dict(), **given, OWN: printing}
    config = RunConfig.preset(str(name), **{key: value for key, value in given.items() if key not in own})
    return config, {key: found[key] for key in own}


def make_parser() -> Any:
    """The parser, with the options of the system esolm."""
    return run_parser("train").made


class RunParser(NamedTuple):
    """The parser of a command that takes the options of a run."""

    made: Any
    own: set[str]  # names of options of the command itself
    known: set[str]  # names of the options of a run
    defaults: dict[str, Any]  # those of the preset, for help


def run_parser(
    command: str,
    preset: str | None = None,
    system: str | None = None,
    add: Callable[[Any], None] | None = None,
    usage: str | None = None,
) -> RunParser:
    """The parser for a preset or a YAML file, or for none, and a system, by default that of the preset."""
    tree = flat(read_preset(preset)) if preset else {}
    values = f"Defaults: those of {preset}." if preset else "A preset overrides these defaults: see PRESET --help."
    about = f"{COMMANDS[command]} {values}"
    if usage is None:
        usage, about = f"{command} PRESET|FILE.yaml", f"{about} Presets: {', '.join(preset_names())}."
    made = parser(usage, about)
    made.add_argument(f"--{OWN}", action="store_true", help="Print the complete configuration as YAML and stop.")
    if add is not None:
        add(made)
    own = set(flat(made.get_defaults().as_dict()))
    usual = tree.get("system.name", "esolm")
    known = add_options(made, system or usual)
    other = system not in (None, usual)
    defaults = {
        key: value
        for key, value in tree.items()
        if key in known and key != "system.name" and not (other and key.startswith("system."))
    }
    name_groups(made, system or usual, demo=command == "demo" or preset == "demo")
    return RunParser(made, own, known, defaults)


def name_groups(made: Any, system: str, demo: bool = False) -> None:
    """Give the groups of a run's options short titles, and hide those of the demo from other commands."""
    group(made, "run", ("data", "run", "init", "adapter", "steps", "seed", "log_every", "log"))
    made.groups["net"].title = "sizes and parts of the network"
    made.groups["system"].title = f"the system {system}"
    made.groups["corpus"].title = "how esolm demo prepares its data"
    for action in () if demo else made.groups["corpus"]._group_actions:
        action.help = argparse.SUPPRESS
    for name, word in (("net", "net.length"), ("system", "system.name")):
        action = next(each for each in made._actions if each.dest == word)
        made._optionals._group_actions.remove(action)
        made.groups[name]._group_actions.append(action)


def check_words(options: Sequence[str], known: set[str], config: type[RunConfig] = RunConfig) -> None:
    """Raise ValueError, with the nearest known options, for an unknown one."""
    words = {f"--{key}" for key in known}
    for word in (option.partition("=")[0].rstrip("+") for option in options if option.startswith("--")):
        if not {word, positive(word)} & (words | {"--help"} | {f"--{each}" for each in config.groups()}):
            hint = parsing.nearest(word, words) if word.lstrip("-").replace("-", "_") in parsing.ELSEWHERE else ""
            raise ValueError(f"unknown option {word}{hint or f': the nearest known ones are {nearest(word, words)}'}")


def _named_system(options: Sequence[str]) -> str | None:
    """The system that the options name, if any."""
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--system.name", dest="name")
    return found.parse_known_args(options)[0].name
