"""Help and flags of every command: groups, examples, booleans without a value, and no heavy import."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import typing

import jsonargparse
import pytest
import yaml

from esolm import cli, systems
from esolm.cli import bench, parsers, parsing
from esolm.cli.examples import EXAMPLES
from esolm.cli.layout import arrange
from esolm.data.options import PrepareOptions
from esolm.runtime import signatures
from esolm.storage.folder import packaged
from esolm.training.config import RunConfig, add_options
from esolm.tune.config import DpoConfig, GrpoConfig
from support.runs import make_run

HEAVY = ("torch", "numpy", "rich", "transformers", "datasets", "tokenizers", "safetensors")


WORDS = [(command,) for command in cli.COMMANDS]
KINDS = [(command, kind) for command in cli.COMMANDS for kind in parsers.kinds(command)]


def test_help_of_every_command_imports_nothing_heavy():
    """In one process, which ends at the first that does."""
    code = (
        "import contextlib, io, json, sys; from esolm.cli import main\n"
        "out, words, heavy = io.StringIO(), json.loads(sys.argv[1]), set(json.loads(sys.argv[2]))\n"
        "for each in words:\n"
        "    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit): main([*each, '--help'])\n"
        "    assert not heavy & set(sys.modules), (each, heavy & set(sys.modules))\n"
        "    assert f'usage: esolm {each[0]}' in out.getvalue(), each\n"
        "    assert 'examples:' in out.getvalue(), each\n"
        "    out.truncate(0)\n"
        "with contextlib.redirect_stdout(out): main(['completion', 'bash'])\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, json.dumps([*WORDS, *KINDS, ("train", "laptop-bd3lm")]), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_list_of_commands_is_in_groups(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for title, commands in cli.GROUPS.items():
        section = printed.split(f"\n{title}:\n")[1].split("\n\n")[0].split("\n")
        assert [line.split()[0] for line in section] == list(commands)
    examples = printed.split("\nexamples:\n")[1].split("\n\n")[0].split("\n")
    assert all(line.split()[0] == "esolm" and line.split()[1] in cli.COMMANDS for line in examples)
    assert max(map(len, printed.split("\n"))) <= 120


def test_the_version(capsys):
    import esolm

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{esolm.__version__}\n"


@pytest.mark.parametrize("words", [*WORDS, *KINDS], ids=" ".join)
def test_options_are_in_groups(words):
    made = parsers.parser_of(*words)
    before = made.format_help()
    groups = {each.title: [a.dest for a in each._group_actions] for each in made._action_groups}
    assert groups["help"] == ["help"]
    assert all(not a.option_strings for a in made._positionals._group_actions)
    placed = [dest for each in groups.values() for dest in each]
    assert sorted(placed) == sorted(action.dest for action in made._actions)  # each once
    arrange(made)
    assert made.format_help() == before


@pytest.mark.parametrize("words", [("train",), ("adapt",), ("demo",), ("plan",), ("tune", "grpo")], ids=" ".join)
def test_every_option_of_a_run_has_a_text_and_its_default_once(words):
    made = parsers.parser_of(*words)
    assert all(action.help for action in made._actions)
    printed = " ".join(made.format_help().split())
    assert not re.search(r"(\(default: \S+\)) \1", printed)
    assert "--seed N Determines the initial weights, the data order and all noise. (default: 0)" in printed
    assert ("how esolm demo prepares its data" in printed) == (words == ("demo",))
    plain = parsing.parser("train PRESET", "")
    plain.add_argument("--rate", type=float | None, default=0.5)
    plain.add_argument("--flag", type=bool, default=False)
    assert plain.format_help().count("(default:") == 1


@pytest.mark.parametrize("words", [("adapt",), ("tune", "grpo"), ("tune", "dpo")], ids=" ".join)
def test_what_starts_from_a_model_shows_its_arguments(words, capsys):
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    printed = capsys.readouterr().out
    section = printed.split("\narguments:\n")[1].split("\n\n")[0]
    assert "MODEL" in section
    assert "RUN" in section
    for option in ("--init", "--run"):
        assert f"\n  {option} " not in printed
        assert cli.main([*words, "stories", "run", option, "x"]) == 2
        assert f"leave out {option}" in capsys.readouterr().err
    assert cli.main([*words, "stories", "run", "--optim.lr", "fast"]) == 2
    assert f"esolm {' '.join(words)} --help" in capsys.readouterr().err


def test_every_command_has_examples_that_parse(tmp_path, monkeypatch):
    """The commands are stopped behind their parsers."""

    class Parsed(BaseException):
        pass

    def stopping(self, *rest, original=jsonargparse.ArgumentParser.parse_args, **named):
        original(self, *rest, **named)
        raise Parsed

    monkeypatch.chdir(tmp_path)
    shutil.copytree(packaged()["stories"], tmp_path / "models" / "mine")
    monkeypatch.setattr(jsonargparse.ArgumentParser, "parse_args", stopping)
    assert set(cli.COMMANDS) <= set(EXAMPLES)
    for key, lines in EXAMPLES.items():
        for line in lines:
            words = shlex.split(line.split(" > ")[0])
            words = words[words.index("esolm") + 1 :]
            assert words[: len(key.split())] == key.split()
            with pytest.raises(Parsed):
                cli.main(words)


FLAG_FORMS = [
    (["--json"], True),
    (["--json", "true"], True),
    (["--json=true"], True),
    (["--json", "false"], False),
    (["--json=False"], False),
    (["--no-json"], False),
    (["--json", "--no-json"], False),
    (["--no_json", "--json"], True),
    ([], False),
]


@pytest.mark.parametrize(("words", "expected"), FLAG_FORMS)
def test_stored_flags(words, expected):
    made = parsers.parser_of("sample")
    assert parsing.parse(made, ["stories", *words])["json"] is expected
    assert parsing.parse(made, [*words, "--seed", "3", "stories"])["run"] == "stories"


@pytest.mark.parametrize(
    ("words", "eos", "lines"),
    [
        ([], True, False),
        (["--lines"], True, True),
        (["--no-eos", "--lines"], False, True),
        (["--eos", "false", "--lines", "true"], False, True),
        (["--eos=false", "--lines=true", "--no-lines"], False, False),
        (["--no_eos", "--eos"], True, False),
    ],
)
def test_typed_flags(words, eos, lines):
    for place in (0, 2):  # a flag does not take the next argument for its value
        given = ["stories", "texts.txt"]
        options = parsing.parse(parsers.parser_of("score"), [*given[:place], *words, *given[place:]])
        assert (options["run"], options["corpora"]) == ("stories", ["texts.txt"])
        assert (options["eos"], options["lines"]) == (eos, lines)


def test_dotted_flags_and_files_are_the_same(capsys, tmp_path):
    base = ["train", "demo", "--print_config"]
    forms = {
        "bare": ["--compute.compile", "--no-net.adaln", "--system.name", "bd3lm", "--system.resample"],
        "values": [
            "--compute.compile=true",
            "--net.adaln",
            "false",
            "--system.name=bd3lm",
            "--system.resample",
            "true",
        ],
    }
    printed = {}
    for name, words in forms.items():
        assert cli.main([*base, *words]) == 0
        printed[name] = yaml.safe_load(capsys.readouterr().out)
    assert printed["bare"] == printed["values"]
    assert (printed["bare"]["compute"]["compile"], printed["bare"]["net"]["adaln"]) == (True, False)
    (file := tmp_path / "same.yaml").write_text(yaml.safe_dump(printed["bare"]))
    assert cli.main(["train", str(file), "--print_config", "true", "--run", "runs/demo"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed["bare"]


def test_wrong_values_of_flags_are_one_line(capsys):
    for word in ("--lines=3", "--lines=maybe", "--no-lines=3", "--no-split"):
        assert cli.main(["score", "stories", "x", word]) == 2
        said = capsys.readouterr().err
        assert word.partition("=")[0] in said
        assert said.count("\n") == 1


def test_json_is_a_flag_wherever_it_is_an_option():
    found = set()
    for words, made in parsers.all_parsers().items():
        for action in made._actions:
            if action.dest == "json":
                assert parsing.is_flag(action), words
                found.add(words.split()[0])
    assert found == set(cli.COMMANDS) - {"demo", "train", "adapt", "tune", "serve", "completion"}


def test_the_old_forms_of_json_of_benchmarks():
    assert bench.with_out(["--json", "-", "--rounds", "3"]) == ["--json", "--rounds", "3"]
    assert bench.with_out(["--json", "a.json"]) == ["--out", "a.json"]
    assert bench.with_out(["--json=a.json", "--rounds=3"]) == ["--out", "a.json", "--rounds=3"]
    assert bench.with_out(["--json", "--out", "b"]) == ["--json", "--out", "b"]
    assert bench.with_out(["--json", "true"]) == ["--json", "true"]


@pytest.mark.parametrize("name", systems.names())
def test_options_read_from_the_source_are_those_of_the_class(name):
    cls = systems.find(name)
    check(signatures.signature(cls.__module__, cls.__name__), cls)
    assert signatures.class_in(cls.__module__, "System", "AnyOrder") == cls.__name__


@pytest.mark.parametrize("cls", [PrepareOptions])
def test_other_options_read_from_the_source(cls):
    check(signatures.signature(cls.__module__, cls.__name__), cls)


def check(read, cls) -> None:
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    parameters = inspect.signature(read).parameters
    assert list(parameters) == list(fields)
    for name, parameter in parameters.items():
        default = fields[name].default
        assert parameter.annotation == hints[name], name
        assert parameter.default == (inspect.Parameter.empty if default is dataclasses.MISSING else default), name


def test_names_read_from_the_source_are_those_of_the_package():
    assert signatures.modules("esolm.systems") == systems.names()
    assert signatures.literal("esolm.systems", "FROM_DATA") == systems.FROM_DATA


@pytest.mark.parametrize("config", [RunConfig, GrpoConfig, DpoConfig])
def test_the_options_of_a_run_are_the_fields_of_its_configuration(config):
    known = add_options(made := jsonargparse.ArgumentParser(exit_on_error=False), "esolm", config)
    plain = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
    grouped = {
        f"{key}.{f.name}": f.default for key, group in config.groups().items() for f in dataclasses.fields(group)
    }
    ours = {key: value for key, value in known_defaults(made).items() if not key.startswith(("net.", "system."))}
    assert ours == {**plain, **grouped}
    assert set(ours) == {key for key in known if not key.startswith(("net.", "system."))}


def known_defaults(made) -> dict:
    from esolm.runtime.dotted import flat

    return {key: tuple(v) if isinstance(v, list) else v for key, v in flat(made.get_defaults().as_dict()).items()}


def test_json_of_commands_that_write(capsys, tmp_path):
    """Prepared data and exported models; each prints one JSON value and nothing else."""
    (tmp_path / "texts.txt").write_text("one two three four five six\n" * 200)
    data, model = tmp_path / "data", tmp_path / "model"
    words = ["prepare", str(tmp_path / "texts.txt"), str(data), "--tokenizer=bytes", "--length=16", "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["folder"], found["length"]) == (str(data), 16)
    assert set(found["splits"]) == {"train", "valid"}
    run = make_run(tmp_path / "run")
    assert cli.main(["export", str(run), str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(model)}
