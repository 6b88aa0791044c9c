"""`esolm tune`: reinforcement learning (grpo) and preference tuning (dpo) of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.dotted import flat
from ..training.config import RunConfig, add_options, read_preset
from ..tune.config import DpoConfig, GrpoConfig
from . import COMMANDS
from .adapt import check_model
from .parsing import parse, parser
from .train import OWN, check_words, show

KINDS: dict[str, type[RunConfig]] = {"grpo": GrpoConfig, "dpo": DpoConfig}
SHORT = {"--reward": "--reward.name"}


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    helping = bool({"-h", "--help"} & set(argv))
    if not argv or argv[0] not in KINDS:
        if helping:
            print(f"{COMMANDS['tune']}\n\nesolm tune grpo --help and esolm tune dpo --help list the options.")
            return 0
        raise ValueError("give what to do first: esolm tune grpo MODEL RUN --reward NAME, or esolm tune dpo MODEL RUN")
    config, printing = read(argv[0], list(argv[1:]), helping)
    if printing:
        return show(config)
    from ..training.trainer import Trainer
    from ..tune.dpo_session import DpoSession
    from ..tune.grpo_session import GrpoSession

    outcome = Trainer(config, session=GrpoSession if argv[0] == "grpo" else DpoSession).fit()
    return 0 if outcome.signal is None else 128 + outcome.signal


def read(name: str, words: list[str], helping: bool) -> tuple[RunConfig, bool]:
    """The configuration of `grpo` or `dpo`, and whether it is only to be printed."""
    kind, preset = KINDS[name], f"_{name}"
    own = "--reward NAME" if name == "grpo" else "--data PAIRS.jsonl"
    made = parser(f"tune {name} MODEL RUN {own}", str(kind.__doc__))
    if helping:
        known = add_options(made, "esolm", kind)
        made.set_defaults({key: value for key, value in flat(read_preset(preset)).items() if key in known})
        parse(made, ["--help"])
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise ValueError(f"give a model and a run folder first: esolm tune {name} MODEL RUN {own}")
    (model, folder), words = words[:2], words[2:]
    check_model(Path(model))
    words = ["=".join([SHORT.get(option, option), *rest]) for option, *rest in (word.split("=", 1) for word in words)]
    printing, words = f"--{OWN}" in words, [word for word in words if word != f"--{OWN}"]
    system = system_of(model, Path(folder))
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
