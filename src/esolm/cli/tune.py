"""`esolm tune`: reinforcement learning (grpo) and preference tuning (dpo) of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.dotted import flat
from ..training.config import RunConfig, add_options, read_preset
from ..tune.config import DpoConfig, GrpoConfig
from . import COMMANDS
from .adapt import add_arguments, arguments
from .examples import EXAMPLES
from .parsing import parse, parser, taken
from .train import OWN, check_words, name_groups, show

KINDS: dict[str, type[RunConfig]] = {"grpo": GrpoConfig, "dpo": DpoConfig}
OPTION = {"grpo": "--reward NAME", "dpo": "--data PAIRS.jsonl"}
SHORT = {"--reward": "--reward.name"}


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    helping = bool({"-h", "--help"} & set(argv))
    if not argv or argv[0] not in KINDS:
        if helping:
            usage = "usage: esolm tune grpo|dpo MODEL RUN [--option VALUE ...]"
            examples = "\n".join(f"  {line}" for line in EXAMPLES["tune"])
            last = "esolm tune grpo --help and esolm tune dpo --help list the options."
            print(f"{usage}\n\n{COMMANDS['tune']}\n\nexamples:\n{examples}\n\n{last}")
            return 0
        wrong = f"esolm tune has no {argv[0]!r}: " if argv else ""
        raise ValueError(
            f"{wrong}give what to do first: esolm tune grpo MODEL RUN --reward NAME, or esolm tune dpo MODEL RUN"
        )
    config, printing = read(argv[0], list(argv[1:]), helping)
    if printing:
        return show(config)
    from ..training.trainer import Trainer
    from ..tune.dpo_session import DpoSession
    from ..tune.grpo_session import GrpoSession

    outcome = Trainer(config, session=GrpoSession if argv[0] == "grpo" else DpoSession).fit()
    return 0 if outcome.signal is None else 128 + outcome.signal


def make_parser(name: str = "grpo") -> Any:
    """The parser of `grpo` or `dpo`, with the options of the system esolm."""
    made = new_parser(name)
    made.add_argument(f"--{OWN}", action="store_true", help="Print the complete configuration as YAML and stop.")
    known = add_options(made, "esolm", KINDS[name])
    made.set_defaults({key: value for key, value in flat(read_preset(f"_{name}")).items() if key in known})
    name_groups(made, "esolm")
    add_arguments(made)
    return made


def new_parser(name: str) -> Any:
    """A parser without options."""
    made = parser(f"tune {name} MODEL RUN {OPTION[name]}", str(KINDS[name].__doc__), f"tune {name}")
    made.prog = f"esolm tune {name}"
    return made


def read(name: str, words: list[str], helping: bool) -> tuple[RunConfig, bool]:
    """The configuration of `grpo` or `dpo`, and whether it is only to be printed."""
    kind, preset, own = KINDS[name], f"_{name}", OPTION[name]
    if helping:
        parse(make_parser(name), ["--help"])
    model, folder, words = arguments(f"tune {name}", words, own)
    words = ["=".join([SHORT.get(option, option), *rest]) for option, *rest in (word.split("=", 1) for word in words)]
    printing, words = taken(words, f"--{OWN}")
    system, made = system_of(model, Path(folder)), new_parser(name)
    check_words(words, add_options(made, system["name"], kind), kind)
    given = flat(parse(made, words, defaults=False))
    return kind.preset(preset, **{**flat({"system": system}), **given, "init": model, "run": folder}), printing


def system_of(model: str, run: Path) -> dict[str, Any]:
    """The name and options of a model's system; of the run, if there is no such model any more."""
    from ..storage.models import read_model
    from ..systems import FROM_DATA, options_of
    from ..training import runs

    try:
        options = options_of(read_model(model).system)
    except (ValueError, OSError):
        if not runs.is_run(run):
            raise
        options = runs.read_config(run)["system"]
    return {key: value for key, value in options.items() if key not in FROM_DATA}
