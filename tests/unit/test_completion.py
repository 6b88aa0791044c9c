"""Shell completion: the scripts, run by the shells themselves; zsh and fish are skipped where there are none."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from esolm import cli, systems
from esolm.cli import completion, parsers
from esolm.storage.folder import packaged
from esolm.training.config import preset_names
from esolm.tune.rewards import BUILT_IN

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def found() -> dict[str, completion.Context]:
    """What is completed after each command."""
    return completion.contexts()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory, found) -> dict[str, Path]:
    """The script of each shell."""
    folder = tmp_path_factory.mktemp("scripts")
    paths = {shell: folder / f"esolm.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        path.write_text(getattr(completion, shell)(found))
    return paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file and a folder."""
    (tmp_path / "stored").mkdir()
    (tmp_path / "texts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_bash(script: Path, line: str) -> set[str]:
    code = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _esolm\n'
        'if [ "${#COMPREPLY[@]}" -eq 0 ]; then compgen -f -- "${@: -1}"; else printf "%s\\n" "${COMPREPLY[@]}"; fi'
    )  # the fallback to files is readline's, by `complete -o default`
    words = line.replace("=", " = ").split(" ")
    if line.endswith("="):
        words = words[:-1]
    done = subprocess.run(["bash", "-c", code, str(script), *words], capture_output=True, text=True)
    assert done.stderr == ""
    return set(done.stdout.split("\n")) - {""}


def in_fish(script: Path, line: str) -> set[str]:
    code = "source $argv[1]; complete -C $argv[2]"
    done = subprocess.run(["fish", "--no-config", "-c", code, str(script), line], capture_output=True, text=True)
    assert done.stderr == ""
    found = {each.partition("\t")[0].rstrip("/") for each in done.stdout.split("\n")} - {""}
    return {each.partition("=")[2] if "=" in line else each for each in found}


ZSHRC = """\
autoload -U compinit; compinit -u -D; source $SCRIPT
compadd() {
    if (( ! ${@[(I)-[OAD]*]} )); then
        local -a matches
        builtin compadd -O matches "$@"
        print -l -- $matches >> $FOUND
    fi
    builtin compadd "$@"
}
zle-line-init() { BUFFER=$LINE CURSOR=$#LINE; zle list-choices; exit }
zle -N zle-line-init
"""


def in_zsh(script: Path, line: str) -> set[str]:
    """What zsh completes. Only its editor completes, and only in a terminal: there it is told to list and to leave."""
    home = script.parent / "zsh"
    home.mkdir(exist_ok=True)
    (home / ".zshrc").write_text(ZSHRC)
    (found := home / "found").write_text("")
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"ZDOTDIR": str(home), "SCRIPT": str(script), "FOUND": str(found), "LINE": line, "TERM": "dumb"}
        os.execvp("zsh", ["zsh", "-d", "-i"])
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while os.read(terminal, 65536):
            pass
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    return set(found.read_text().split("\n")) - {""}


ASK = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}
CASES = [
    ("esolm s", {"sample", "score", "serve"}, {"train"}),
    ("esolm sample --sampler ", {"ancestral", "left_to_right", "greedy_tail"}, {"stored"}),
    ("esolm sample --sampler=fir", {"first_hitting"}, {"ancestral"}),
    ("esolm sample --precision i", {"int8", "int4"}, {"bf16"}),
    ("esolm sample st", {"stories", "stored"}, {"laptop-mdlm"}),
    ("esolm sample stories --js", {"--json", "--json_schema"}, {"--show"}),
    ("esolm score stories x --no", {"--no-eos"}, {"--no-lines"}),
    ("esolm judge te", {"texts.jsonl"}, set()),
    ("esolm train laptop-m", {"laptop-mdlm"}, {"laptop-ar"}),
    ("esolm train laptop-bd3lm --system.blo", {"--system.block_size"}, set()),
    ("esolm train laptop-esolm --optim.schedule ", {"constant", "cosine"}, {"stored"}),
    ("esolm tune ", {"grpo", "dpo"}, {"stories"}),
    ("esolm tune grpo st", {"stories"}, {"dpo"}),
    ("esolm tune grpo stories run --reward ", {"molecules", "sudoku"}, set()),
    ("esolm bench train --pl", {"--plain"}, {"--data"}),
]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("line", "there", "absent"), CASES, ids=[case[0] for case in CASES])
def test_completions(scripts, folder, shell, line, there, absent):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    found = ASK[shell](scripts[shell], line)
    assert there <= found
    assert not absent & found


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_valid(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    done = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_option_of_every_command_is_completed(scripts, found):
    for words, made in parsers.all_parsers().items():
        names = {name for action in made._actions if completion.shown(action) for name in action.option_strings}
        names = {name for name in names if name.startswith("--") and not name.endswith("+")}
        assert names <= {name for option in found[words].options for name in option.names}, words
    text = scripts["bash"].read_text()
    assert all(name in text for name in (*cli.COMMANDS, *preset_names(), *systems.names()))


def test_named_values_are_those_that_exist():
    found = {name for system in systems.names() for name in systems.find(system).samplers}
    assert set(completion.SAMPLERS) == found
    assert set(completion.REWARDS) == set(BUILT_IN)
    assert completion.models() == tuple(packaged())


def test_the_command_prints_a_script(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef esolm\n")
    assert cli.main(["completion", "tcsh"]) == 2
    assert "bash or zsh or fish" in capsys.readouterr().err
