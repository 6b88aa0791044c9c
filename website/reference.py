"""Reference pages, generated from the parsers, the dataclasses and the modules of the library.

Each function returns the Markdown of a page. `python -m website.reference` prints the command line's page.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import io
import json
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import esolm
from esolm import bench, cli, systems
from esolm.cli import tune
from esolm.cli.parsing import parser
from esolm.runtime.dotted import flat
from esolm.sampling.options import SamplingOptions
from esolm.training.config import RunConfig, add_options, preset_names, read_preset

KINDS = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false", Path: "PATH"}
SUBCOMMANDS = {"bench": tuple(bench.NAMES), "tune": tuple(tune.KINDS)}
HOMES = ("model", "generation", "likelihood", "training", "sampling", "systems", "net", "core")
"""The packages of the public names, in the order in which a reader needs them."""


class _Help(BaseException):
    """Stops a command that prints its help, and carries the parser."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser


def help_of(words: Sequence[str]) -> Any:
    """The parser whose help `esolm WORDS --help` prints, or the printed text if it has no parser."""

    def stop(self: Any, *_: Any, **__: Any) -> None:
        raise _Help(self)

    import jsonargparse

    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        for kind in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
            stack.enter_context(mock.patch.object(kind, "print_help", stop))
        stack.enter_context(contextlib.redirect_stdout(printed))
        try:
            cli.main([*words, "--help"])
        except _Help as found:
            return found.parser
        except SystemExit:
            pass
    return printed.getvalue()


def command_line() -> str:
    """The page of all commands with their options."""
    lines = [
        "# Command line",
        "",
        "Look up the options of every command. The same text is printed by `esolm COMMAND --help`; this page is "
        "generated from the parsers. An option is written `--name VALUE` or `--name=VALUE`; `null` stands for "
        "no value. `--import MODULE`, in any command, imports a module first, such as that of your own system.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`{name}`](#esolm-{name}) | {_prose(_summary(about))} |" for name, about in cli.COMMANDS.items()),
    ]
    for name, about in cli.COMMANDS.items():
        lines += ["", f"## esolm {name}", "", *_command([name], _summary(about))]
        for sub in SUBCOMMANDS.get(name, ()):
            lines += ["", f"### esolm {name} {sub}", "", *_command([name, sub], "")]
    return "\n".join(lines) + "\n"


def _summary(about: str) -> str:
    """The summary of a command without its usage."""
    return re.sub(r": esolm .*$", ".", about)


def _command(words: list[str], summary: str) -> Iterator[str]:
    found = help_of(words)
    if isinstance(found, str):
        yield from [_prose(summary), "", "```text", found.strip(), "```"]
        return
    usage = " ".join(str(found.usage or found.format_usage()).split()).removeprefix("usage: ")
    yield from ["```text", usage, "```", "", _prose(summary or _paragraphs(found.description))]
    if (examples := _examples(found.epilog)) is not None:
        yield from ["", "```sh", examples, "```"]
    actions = [action for group in found._action_groups for action in group._group_actions if _shown(action)]
    if "batch.size" in {action.dest for action in actions}:
        known = {each.dest for each in options(tune.KINDS.get(words[-1], RunConfig))}
        actions = [action for action in actions if action.dest not in known]
        yield from ["", "Every key of the [configuration](configuration.md) is an option, as in `--optim.lr 1e-3`."]
    written = _written(found.format_help())
    yield from _table("option", ((written.get(each.dest, each.metavar or each.dest), each) for each in actions))


def _written(text: str) -> dict[str, str]:
    """How the options of a help text are written, as in `--steps N`, by name."""
    lines = (re.match(r"  (-\S.*?)(?:  |$)", line) for line in text.splitlines())
    return {re.sub(r".*?--([\w.]+).*", r"\1", line[1]): line[1] for line in lines if line}


def _examples(epilog: str | None) -> str | None:
    """The examples that stand below a command's help, if any."""
    _, mark, rest = (epilog or "").partition("examples:\n")
    return "\n".join(line.strip() for line in rest.split("\n\n")[0].splitlines()) if mark else None


def _paragraphs(text: Any) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(str(text or "")).split("\n\n"))


def _shown(action: Any) -> bool:
    hidden = action.help == argparse.SUPPRESS or action.dest in ("help", argparse.SUPPRESS)
    return not hidden and "Path to a configuration file" not in str(action.help)


def _table(head: str, rows: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """A table of options: how each is written, its default and its meaning."""
    rows = list(rows)
    if rows:
        yield from ["", f"| {head} | default | meaning |", "|---|---|---|"]
    for name, action in rows:
        needed = not action.option_strings and action.nargs not in ("?", "*")
        default = "required" if needed or action.required else _default(action.default)
        meaning = _prose(" ".join(str(action.help or "").replace("%%", "%").split()))
        yield f"| `{name}` | {default} | {meaning} |"


def _key_table(actions: Iterable[Any]) -> Iterator[str]:
    return _table("key", ((f"{action.dest} {_values(action)}".strip(), action) for action in actions))


def _values(action: Any) -> str:
    """What a key takes, as in `INT` or `a|b`."""
    hint = getattr(action, "_typehint", None) or action.type
    return "" if hint is None else _kind(hint)


def _kind(hint: Any) -> str:
    if isinstance(name := getattr(hint, "name", None), str):  # an annotation that jsonargparse did not resolve
        hint = eval(name, dict(vars(typing)))
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "|".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return "|".join(dict.fromkeys(map(_kind, inner)))
    if origin in (list, tuple) or getattr(origin, "__name__", "") == "Sequence":
        return f"{_kind(inner[0])},…" if inner else "A,…"
    if origin is not None:
        return "JSON"
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)).upper())


def _default(value: Any) -> str:
    if value in (None, "") or value == argparse.SUPPRESS:
        return "" if value == "" else "null"
    if value is False:
        return "off"
    shown = json.dumps(value) if isinstance(value, list | tuple | dict | bool) else str(value)
    return f"`{shown}`"


def _prose(text: str) -> str:
    """Text in which characters that Markdown or its tables would read are escaped, outside code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"[*|]", r"\\\g<0>", part).replace("<", "&lt;") for part in parts
    )


def configuration() -> str:
    """The page of the keys of a run, a system, the network and sampling, with their defaults."""
    lines = [
        "# Configuration",
        "",
        "Look up every key of a run, what it means and its default. A key is an option of `esolm train`, `esolm adapt` "
        "and `esolm tune` (`--optim.lr 1e-3`), a key of a YAML file (`optim: {lr: 1e-3}`), and an argument of "
        '`esolm.RunConfig.preset` (`optim={"lr": 1e-3}`). A preset overrides these defaults; '
        "`esolm train PRESET --print_config` prints the result. See [Training](../training.md).",
        "",
        "## A run",
        *_keys(RunConfig, "esolm", lambda key: "." not in key),
    ]
    for group, kind in RunConfig.groups().items():
        lines += ["", f"## {group}", "", str(kind.__doc__).strip(), *_group(RunConfig, group)]
    lines += ["", "## net", "", "Sizes and parts of the network.", *_group(RunConfig, "net")]
    lines += ["", "## system", "", "Each system has its own keys. [Systems side by side](../systems.md) compares them."]
    lines += [*_keys(RunConfig, "esolm", lambda key: key == "system.name")]
    for name in systems.names():
        about = str(systems.find(name).__doc__).strip().split("\n\n")[0]
        own = list(_keys(RunConfig, name, lambda key: key.startswith("system.") and key != "system.name"))
        lines += ["", f"### {name}", "", _prose(" ".join(about.split())), *own]
    lines += ["", "## Tuning by rewards", "", "Keys that `esolm tune` adds. See [Tuning](../tuning.md)."]
    for kind in tune.KINDS.values():
        for group in (name for name in kind.groups() if name not in RunConfig.groups()):
            lines += ["", f"### {group}", "", _prose(str(kind.groups()[group].__doc__)), *_group(kind, group)]
    made = parser("sample", "")
    made.add_class_arguments(SamplingOptions, as_group=False)
    lines += ["", "## Sampling", "", "Options of `esolm sample`, `esolm infill`, `lm.sample` and `lm.infill`."]
    lines += ["See [Sampling](../sampling.md).", *_key_table(filter(_shown, made._actions))]
    return "\n".join([*lines, "", "## Presets", "", *_presets()]) + "\n"


def _group(config: type[RunConfig], group: str) -> Iterator[str]:
    return _keys(config, "esolm", lambda key: key.startswith(f"{group}."))


def _keys(config: type[RunConfig], system: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    yield from _key_table(action for action in options(config, system) if wanted(action.dest))


@functools.cache
def options(config: type[RunConfig], system: str = "esolm") -> list[Any]:
    """The options of a run of this system."""
    made = parser("train PRESET", "")
    add_options(made, system, config)
    return [action for action in made._actions if _shown(action)]


def _presets() -> Iterator[str]:
    yield "What `esolm train NAME` trains; `net` is layers x width, and `length` the tokens of an example."
    keys = ("system.name", "system.alpha_0", "net.layers", "net.width", "corpus.length", "steps", "batch.size")
    yield from ["", "| preset | system | alpha_0 | net | length | steps | batch |", "|---|---|--:|--:|--:|--:|--:|"]
    for name in preset_names():
        tree = {**flat(RunConfig().tree()), **flat(read_preset(name))}
        system, alpha_0, layers, width, length, steps, batch = (tree.get(key) for key in keys)
        net = "of the model" if layers is None or tree.get("init") else f"{layers} x {width}"
        alpha_0 = "" if alpha_0 is None else alpha_0
        yield f"| `{name}` | {system} | {alpha_0} | {net} | {length} | {steps:,} | {batch:,} |"


def packages() -> list[str]:
    """The packages that the reference describes, the most used first; `cli` and `bench` are used by commands."""
    order = ["model", "core", "net", "systems", "sampling", "likelihood", "generation", "constraints", "data"]
    order += ["training", "tune", "storage", "serving", "interop", "metrics", "viz", "runtime"]
    found = {module.name for module in pkgutil.iter_modules(esolm.__path__) if not module.name.startswith("_")}
    return sorted(found - {"bench", "cli"}, key=lambda name: (order.index(name) if name in order else len(order), name))


def modules(name: str) -> list[str]:
    """The public modules of a package, by dotted name; the package itself comes first."""
    found = importlib.import_module(f"esolm.{name}")
    inner = pkgutil.walk_packages(getattr(found, "__path__", []), f"esolm.{name}.", onerror=lambda _: None)
    return [f"esolm.{name}", *sorted(each.name for each in inner if not re.search(r"\._", each.name))]


def package(name: str) -> str:
    """The page of one package: everything public, from docstrings and types."""
    first = f"Look up what `esolm.{name}` offers: every public function and class, with its arguments and types."
    lines = [f"# esolm.{name}", "", first]
    for module in modules(name):
        lines += ["", f"::: {module}", "    options:", "      heading_level: 2"]
    return "\n".join(lines) + "\n"


def public_names() -> str:
    """The page of the names that `import esolm` gives."""
    lines = [
        "# Python API",
        "",
        "Look up what `import esolm` gives you; the pages beside this one list the packages, with everything that is "
        "public in them. `esolm.load` returns a `LanguageModel`, which samples, infills and scores; `esolm.Trainer` "
        "trains what a `RunConfig` describes.",
    ]
    places = {home: number for number, home in enumerate(HOMES)}
    homes = {name: places.get(esolm._HOME[name].split(".")[0], len(HOMES)) for name in esolm.__all__}
    for name in sorted(esolm.__all__, key=lambda name: (homes[name], name != "load", name)):
        lines += ["", f"::: esolm.{name}", "    options:", "      heading_level: 2", "      show_root_heading: true"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(command_line())
