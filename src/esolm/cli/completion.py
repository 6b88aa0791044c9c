"""`esolm completion`: print a script that completes commands, options and values in a shell.

The script is made from the parsers when the command runs, and holds everything: completing starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from .. import __version__
from ..runtime.signatures import ROOT, modules
from . import COMMANDS
from .layout import choices
from .parsers import all_parsers, kinds, system_options
from .parsing import is_flag, parse, parser

Shell = Literal["bash", "zsh", "fish"]
SAMPLERS = (
    "analytic", "ancestral", "block", "clamped", "confidence", "ddim", "euler", "first_hitting", "greedy_tail",
    "left_to_right", "order", "speculative", "threshold",
)  # fmt: skip
DEVICES = ("auto", "cpu", "cuda", "mps")
REWARDS = ("countdown", "judge", "molecules", "regex", "sudoku")
LONGEST = 80
"""Characters of a description."""


class Completed(NamedTuple):
    """An option that is completed."""

    names: tuple[str, ...]
    about: str
    values: tuple[str, ...] | None  # None: a flag, empty: a file


class Context(NamedTuple):
    """What may follow a command, such as `sample` or `tune grpo`."""

    first: tuple[str, ...]  # names that the first argument may have, besides files
    options: tuple[Completed, ...]


def make_parser() -> Any:
    """The parser."""
    made = parser("completion bash|zsh|fish", COMMANDS["completion"])
    made.add_argument("shell", type=Shell, metavar="SHELL", help=" or ".join(get_args(Shell)))
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    shell = parse(make_parser(), argv)["shell"]
    write: dict[str, Callable[[dict[str, Context]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
    print(f"{'#compdef esolm' if shell == 'zsh' else ''}\n".lstrip("\n") + head(shell) + write[shell](contexts()))
    return 0


def head(shell: str) -> str:
    """The first line of a script."""
    return f"# Completion of esolm {__version__} in {shell}; written by `esolm completion {shell}`.\n"


def models() -> tuple[str, ...]:
    """The bundled models."""
    return tuple(sorted(path.parent.name for path in (ROOT / "models").glob("*/config.json")))


def contexts() -> dict[str, Context]:
    """What is completed after each command."""
    from ..training.config import preset_names

    presets, systems = tuple(preset_names()), tuple(modules("esolm.systems"))
    known: dict[str, tuple[str, ...]] = {
        "sampler": SAMPLERS, "rollout.sampler": SAMPLERS, "device": DEVICES, "compute.device": DEVICES,
        "system.name": systems, "systems": systems, "preset": presets, "init": models(), "model": models(),
        "reward.name": REWARDS,
    }  # fmt: skip
    others = [action for each in system_options().values() for action in each._actions]
    found = {}
    for words, made in all_parsers().items():
        of_run = any(action.dest == "system.name" for action in made._actions)
        actions = {action.dest: action for action in [*(others if of_run else ()), *made._actions]}
        options = [completed(action, known) for action in actions.values() if shown(action)]
        if "reward.name" in actions:
            options.append(Completed(("--reward",), "The reward: a name, or package.module:function.", REWARDS))
        options.append(Completed(("--import",), "Import a module first.", ()))
        found[words] = Context(first_argument(words, made, presets), tuple(options))
    return found


def shown(action: Any) -> bool:
    """Whether an action is an option that help shows."""
    return bool(action.option_strings) and action.help != argparse.SUPPRESS and "Config" not in type(action).__name__


def completed(action: Any, known: dict[str, tuple[str, ...]]) -> Completed:
    """How an option is completed."""
    name = next(name for name in reversed(action.option_strings) if not name.endswith("+"))
    about = " ".join((action.help or "").replace("`", "").split()).partition(". ")[0].rstrip(".")
    about = about if len(about) <= LONGEST else about[: about.rindex(" ", 0, LONGEST)] + " …"
    if is_flag(action) or action.nargs == 0:
        off = (f"--no-{name[2:]}",) if action.default is True else ()
        return Completed((*off, name), about, None)
    return Completed((name,), about, tuple(choices(action)) or known.get(action.dest, ()))


def first_argument(words: str, made: Any, presets: tuple[str, ...]) -> tuple[str, ...]:
    """The names that the first argument of a command may have, besides files."""
    if words in ("train", "plan"):
        return presets
    first = next((action for action in made._actions if not action.option_strings), None)
    if words in ("info", "export") or (first and first.metavar == "MODEL"):
        return models()
    return tuple(choices(first)) if first else ()


def bash(found: dict[str, Context]) -> str:
    """The script for bash."""
    options, values = list[str](), dict[tuple[str, ...], list[str]]()
    for words, context in found.items():
        names = " ".join(name for option in context.options for name in option.names)
        options.append(f"        {shlex.quote(words)}) options='{names}' first='{' '.join(context.first)}' ;;")
        for option in context.options:
            if option.values is not None:
                values.setdefault(option.values, []).append(f"'{words} {option.names[-1]}'")
    cases = [f"        {'|'.join(keys)}) values='{' '.join(names) or ':'}' ;;" for names, keys in values.items()]
    groups = [f"        {word}) kinds='{' '.join(kinds(word))}' ;;" for word in COMMANDS if kinds(word)]
    parts = {"COMMANDS": " ".join(COMMANDS), "KINDS": groups, "OPTIONS": options, "VALUES": cases}
    text = BASH
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part if isinstance(part, str) else "\n".join(part))
    return text


BASH = """\
_esolm() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=${COMP_WORDS[1]} at=2
    local kinds='' options='' first='' values=''
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '@COMMANDS@ --help --version' -- "$cur"))
        return
    fi
    case "$words" in
@KINDS@
    esac
    if [ -n "$kinds" ]; then
        if [ "$COMP_CWORD" -eq 2 ]; then
            COMPREPLY=($(compgen -W "$kinds --help" -- "$cur"))
            return
        fi
        words="$words ${COMP_WORDS[2]}" at=3
    fi
    case "$words" in
@OPTIONS@
    esac
    if [ "$cur" = '=' ]; then
        cur=''
    elif [ "$prev" = '=' ]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    case "$words $prev" in
@VALUES@
    esac
    if [ "$values" = ':' ]; then
        return  # a file, or anything else
    elif [ -n "$values" ]; then
        COMPREPLY=($(compgen -W "$values" -- "$cur"))
    elif [ "${cur:0:1}" = '-' ]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
    elif [ "$COMP_CWORD" -eq "$at" ] && [ -n "$first" ]; then
        COMPREPLY=($(compgen -W "$first" -- "$cur"))
        local file
        while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$cur")
        compopt -o filenames 2> /dev/null
    fi
}
complete -o bashdefault -o default -F _esolm esolm"""


def zsh(found: dict[str, Context]) -> str:
    """The script for zsh."""
    cases = []
    for words, context in found.items():
        lines = [zsh_option(option, name) for option in context.options for name in option.names]
        if context.first:
            lines.append(f"'1:argument:_esolm_or_file {' '.join(context.first)}'")
        lines.append("'*:file:_files'")
        cases.append(
            f"    ({shlex.quote(words)})\n      _arguments -S \\\n        " + " \\\n        ".join(lines) + " ;;"
        )
    described = [quoted(f"{word}:{about}") for word, about in COMMANDS.items()]
    groups = [f"    ({word}) kinds=({' '.join(kinds(word))}) ;;" for word in COMMANDS if kinds(word)]
    text = ZSH
    for name, part in {"COMMANDS": " ".join(described), "KINDS": "\n".join(groups), "CASES": "\n".join(cases)}.items():
        text = text.replace(f"@{name}@", part)
    return text


def zsh_option(option: Completed, name: str) -> str:
    """The specification of an option for `_arguments`."""
    about = option.about
    for mark in "\\[]:":
        about = about.replace(mark, f"\\{mark}")
    if option.values is None:
        return quoted(f"{name}[{about}]")
    what = f"({' '.join(option.values)})" if option.values else "_files"
    return quoted(f"{name}=[{about}]:value:{what}")


def quoted(text: str) -> str:
    """In single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


ZSH = """\
_esolm_or_file() {
  compadd -- "$@"
  _files
}

_esolm() {
  local curcontext="$curcontext" key=$words[2]
  local -a kinds commands
  if (( CURRENT == 2 )); then
    commands=(@COMMANDS@)
    _describe -t commands command commands
    return
  fi
  case $key in
@KINDS@
  esac
  if (( $#kinds )); then
    if (( CURRENT == 3 )); then
      compadd -- $kinds
      return
    fi
    key="$key $words[3]"
    words=("esolm $key" "${(@)words[4,-1]}")
    (( CURRENT -= 2 ))
  else
    words=("esolm $key" "${(@)words[3,-1]}")
    (( CURRENT -= 1 ))
  fi
  case $key in
@CASES@
  esac
}

if [[ $funcstack[1] = _esolm ]]; then
  _esolm "$@"
else
  compdef _esolm esolm
fi"""


def fish(found: dict[str, Context]) -> str:
    """The script for fish."""
    lines = [FISH]
    for word, about in COMMANDS.items():
        lines.append(f"complete -c esolm -n '__esolm_is' -f -a {word} -d {fish_quoted(about)}")
        if kinds(word):
            lines.append(f"complete -c esolm -n '__esolm_is {word}' -f -a {fish_quoted(' '.join(kinds(word)))}")
    for words, context in found.items():
        within = f"complete -c esolm -n '__esolm_in {words}'"
        if context.first:
            lines.append(f"complete -c esolm -n '__esolm_is {words}' -F -a {fish_quoted(' '.join(context.first))}")
        for option in context.options:
            value = f" -x -a {fish_quoted(' '.join(option.values))}" if option.values else " -r -F"
            value = "" if option.values is None else value
            names = " ".join(f"-l {name[2:]}" for name in option.names)
            lines.append(f"{within} {names}{value} -d {fish_quoted(option.about)}")
    return "\n".join(lines)


def fish_quoted(text: str) -> str:
    """In single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


FISH = """\
function __esolm_is  # whether the words before the cursor are these
    set -l words (commandline -opc)
    test "$words[2..-1]" = "$argv"
end

function __esolm_in  # whether the words before the cursor begin with these
    set -l words (commandline -opc)
    string match -q -- "$argv *" "$words[2..-1] "
end

complete -c esolm -e
complete -c esolm -n '__esolm_is' -f"""
