"""The command line: presets, overrides, and errors of one line that name what is near."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from rich.console import Console

from esolm import cli, data, load
from esolm.cli import demo, prepare, serve, train, tune
from esolm.cli.parsing import parse
from esolm.sampling.options import SamplingOptions
from esolm.storage.folder import packaged
from esolm.training.config import RunConfig, preset_names
from support.runs import make_run

SMALL = ["--steps=7", "--optim.lr=1e-3"]


def failing(capsys, *argv: str) -> str:
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_help_needs_neither_torch_nor_extras():
    code = (
        "import sys; import esolm.cli; esolm.cli.main(['--help']);"
        "heavy = {'torch', 'numpy', 'datasets', 'transformers', 'matplotlib', 'wandb', 'tensorboard', 'jsonargparse'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in cli.COMMANDS:
        assert word in done.stdout


def test_the_library_needs_no_extra():
    code = (
        "import sys; import esolm; [getattr(esolm, name) for name in esolm.__all__];"
        "extras = {'datasets', 'transformers', 'matplotlib', 'wandb', 'tensorboard', 'lm_eval', 'rdkit'};"
        "sys.exit(', '.join(extras & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_print_config_is_complete_and_can_be_read_again(capsys, tmp_path):
    assert cli.main(["train", "demo", "--print_config", *SMALL, "--system.alpha_0", "0.5"]) == 0
    tree = yaml.safe_load(printed := capsys.readouterr().out)
    assert tree["optim"]["lr"] == 1e-3
    assert tree["system"] == {**tree["system"], "name": "esolm", "alpha_0": 0.5}
    assert tree["run"] == "runs/demo"
    (file := tmp_path / "again.yaml").write_text(printed)
    assert cli.main(["train", str(file), "--print_config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("words", [["demo"], ["plan", "demo", "--gpus=2"]])
def test_whoever_takes_the_options_of_train_prints_them_too(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "demo", "--print_config", *SMALL]) == 0
    expected = capsys.readouterr().out
    assert cli.main([*words, "--print_config", *SMALL]) == 0
    assert capsys.readouterr().out == expected
    assert not list(tmp_path.iterdir())


def test_the_demo_is_of_one_system(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "esolm train demo --system.name ar" in failing(capsys, "demo", "--system.name=ar")
    assert not list(tmp_path.iterdir())


def test_the_demo_begins_with_the_bundled_model(capsys, monkeypatch):
    """Its own options, only a shorter story: what stands below each heading is what the heading says."""
    monkeypatch.setattr(demo, "FIRST", (*demo.FIRST, "--length", "32"))
    demo.show_bundled(Console(highlight=False))
    said = "".join(capsys.readouterr().out.split())  # without the breaks between lines
    story, filled, training = (said.index(heading) for heading in ("1.Themodel", "2.Itfills", "3.Asmallmodel"))
    lm = load("stories", precision="auto")
    surest = lm.sample(length=32, sampler="confidence", window=16, top_p=0.9, seed=0).texts[0]
    assert surest != lm.sample(length=32, top_p=0.9, seed=0).texts[0]
    assert "".join(surest.split()) in said[story:filled]
    text = demo.SENTENCE[0]
    found = lm.infill(text, tokens_per_blank=12, sampler="left_to_right", top_p=0.8, seed=0).texts[0]
    assert "".join(found.split()) in said[filled:training]
    before, after = text.split("____")
    assert found.startswith(before)
    assert found.endswith(after)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_configuration(name):
    config = RunConfig.preset(name)
    assert config.run == f"runs/{name}"
    assert RunConfig.from_tree(config.tree()) == config
    if name.startswith(("lm1b", "owt", "xsum")):
        own = {"diffusionbert": (128, 5e-5, 10000), "diffusion_lm": (64, 1e-4, 0)}  # their authors' own values
        found = (config.batch.size, config.optim.lr, config.optim.warmup)
        assert found == own.get(config.system["name"], (512, 3e-4, 2500))
        assert (config.net["layers"], config.net["width"]) == (12, 768)
        assert config.net["dropout"] == (0.0 if config.system["name"] == "d3pm" else 0.1)
        steps = {"lm1b-kappa": 500_000, "xsum-esolm": 10_000, "xsum-mdlm": 10_000}
        steps |= {"owt-esolm-10240": 1000, "owt-bd3lm-10240": 1000}
        assert config.steps == steps.get(name, 1_000_000 if name.startswith("lm1b") else 250_000)
        assert (config.init is not None) == name.startswith(("xsum", "owt-esolm-1", "owt-bd3lm-1"))


def test_the_presets_of_the_papers_other_runs():
    """Long contexts, XSum and the ablation of kappa, by the paper's appendix and its authors' scripts."""
    long = [RunConfig.preset(f"owt-{name}-10240") for name in ("esolm", "bd3lm")]
    assert {config.corpus.length for config in long} == {10240}
    assert long[0].system["alpha_0"] == 0.125
    assert (long[1].system["block_size"], long[1].system["resample"]) == (4, True)
    assert RunConfig.preset("xsum-esolm").system["alpha_0"] == 1.0
    for kappa, alpha_0 in ((0.75, 0.5), (0.125, 0.0625)):
        system = RunConfig.preset("lm1b-kappa", system={"kappa": kappa, "alpha_0": alpha_0}).system
        assert (system["variant"], system["kappa"], system["alpha_0"]) == ("A", kappa, alpha_0)


def test_missing_data_is_prepared_by_the_command_of_the_error(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = failing(capsys, "train", "xsum-mdlm")
    taken: dict = {}
    monkeypatch.setattr(data, "prepare", lambda **options: taken.update(options))
    assert cli.main(shlex.split(said.split("`esolm ")[1].split("`")[0])) == 0
    assert (taken["packing"], taken["target_field"], taken["length"]) == ("conditional", "summary", 576)


def test_a_system_by_name_takes_its_own_options(capsys):
    assert cli.main(["train", "demo", "--print_config", "--system.name=bd3lm", "--system.block_size", "8"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["system"]["block_size"] == 8
    assert "alpha_0" not in tree["system"]
    assert "--system.block_size" in failing(capsys, "train", "demo", "--system.name=bd3lm", "--system.blocksize=8")
    assert "no system 'gpt'" in failing(capsys, "train", "demo", "--system.name=gpt")


def test_unknown_words_name_the_nearest(capsys, tmp_path):
    assert "--optim.lr" in failing(capsys, "train", "demo", "--optim.learning_rate=1", "--lr=3")
    assert "--optim.warmup" in failing(capsys, "train", "demo", "--warmup=3")
    (file := tmp_path / "mine.yaml").write_text("base: demo\noptim: {warm_up: 3}\n")
    assert "unknown key 'optim.warm_up'" in (said := failing(capsys, "train", str(file)))
    assert "optim.warmup" in said
    assert "demo" in failing(capsys, "train", "dmo")
    assert "train?" in failing(capsys, "trian")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sampel", "stories"], "sample"),
        (["sample", "stories", "--top-p", "1"], "--top_p"),
        (["sample", "stories", "--topp=1"], "--top_p"),
        (["infill", "stories", "a ____", "--tokens-per-blank=3"], "--tokens_per_blank"),
        (["score", "stories", "x", "--num-orders", "3"], "--num_orders"),
        (["variance", "stories", "x", "--trails=3"], "--trials"),
        (["judge", "a", "b", "--batchsize", "3"], "--batch_size"),
        (["export", "a", "b", "--forse"], "--force"),
        (["info", "stories", "--jsn"], "--json"),
        (["bench", "draw", "--round=3"], "--rounds"),
    ],
)
def test_near_misses_get_a_suggestion(capsys, words, hint):
    assert f"did you mean {hint}" in failing(capsys, *words)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--num_steps=many"], ["--num_steps", "many", "whole number"]),
        (["--given_order", "up"], ["--given_order", "up", "ascending or random"]),
        (["--order=1,x"], ["--order", "x", "2,0,1"]),
        (["--json=3"], ["--json", "3"]),
        (["--seed"], ["--seed"]),
        (["more"], ["more"]),
        (["--num_s=3"], ["--num_samples", "--num_steps"]),
    ],
)
def test_parser_errors_name_the_option_and_what_is_allowed(capsys, words, parts):
    said = failing(capsys, "sample", "stories", *words)
    assert all(part in said for part in (*parts, "esolm sample --help"))
    assert not any(word in said for word in ("class", "Parser", "typing", "Union", "NoneType"))


@pytest.mark.parametrize(
    "word", ["#x", "~", "&x", "1", "1e3", "true", "a: b", "x # y", " | ", "Null", "[a", '"q"', "", "null"]
)
def test_optional_texts_are_taken_as_they_are(word, tmp_path):
    text = None if word == "null" else word
    served = parse(serve.make_parser(), ["stories", "--api_key", word, f"--name={word}"])
    assert (served["api_key"], served["name"]) == (text, text)
    assert parse(prepare.make_parser(), ["in", "out", "--delimiter", word])["delimiter"] == text
    options = ["--init", word, f"--adapter={word}", "--run", word, "--corpus.options", word]
    config, _ = train.read(["demo", *options])
    assert (config.init, config.adapter, config.run) == (text, text, "runs/demo" if text is None else text)
    assert config.corpus.options == word  # no optional text: there is no null
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump({"base": "demo", "init": text}))
    assert RunConfig.preset(str(file)).init == text
    tuned, _ = tune.read("grpo", ["stories", "run", "--rollout.valid", word], False)
    assert tuned.rollout.valid == text


def test_null_in_a_file_is_null(tmp_path):
    for null in ("~", "null", "# nothing"):
        (file := tmp_path / "mine.yaml").write_text(f"base: demo\ninit: {null}\nbatch: {{micro: null}}\n")
        config = RunConfig.preset(str(file))
        assert (config.init, config.batch.micro) == (None, None)


def test_every_sampling_option_is_an_option_of_sample_and_infill(capsys):
    for word in ("sample", "infill"):
        with pytest.raises(SystemExit):
            cli.main([word, "--help"])
        helped = capsys.readouterr().out
        for field in dataclasses.fields(SamplingOptions):
            assert helped.count(f"--{field.name} ") >= 1, field.name


def test_a_custom_system_of_the_working_directory_is_imported_on_request(capsys, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "support.foreign.FixedRate")
    state = next(run.rglob("state.json"))
    state.write_text(state.read_text().replace("support.foreign.FixedRate", "mine_here.rates.FixedRate"))
    (tmp_path / "mine_here").mkdir()
    shutil.copy(sys.modules["support.foreign"].__file__, tmp_path / "mine_here" / "rates.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert "--import mine_here.rates" in failing(capsys, "sample", "run")
    assert "mine_here.rate" in failing(capsys, "sample", "run", "--import", "mine_here.rate")
    assert cli.main(["sample", "run", "--import", "mine_here.rates", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["texts"]) == 1
    assert cli.main(["--import=mine_here.rates", "--import", "json", "export", "run", "out"]) == 0
    assert cli.main(["sample", "out", "--import=mine_here.rates"]) == 0


def test_info_shows_the_corpus_of_the_run(capsys, tmp_path):
    run = make_run(tmp_path / "run")
    state = next(run.rglob("state.json"))
    state.write_text(json.dumps({**json.loads(state.read_text()), "tokens": 1, "seconds": 2.5}))
    (run / "config.yaml").write_text("steps: 1\ncorpus: {source: pydocs, tokenizer: bpe:512}\ndata: d\n")
    manifest = {"corpus": "text:mine.txt", "tokenizer": "bytes", "length": 8, "packing": "wrap", "format": 1}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert cli.main(["info", str(run), "--json"]) == 0
    about = json.loads(printed := capsys.readouterr().out)
    assert about["corpus"]["corpus"] == "text:mine.txt"
    assert (about["tokens"], about["seconds"]) == (1, 2.5)
    assert "pydocs" not in printed


def test_bad_values_and_missing_things_are_one_line(capsys, tmp_path):
    assert "optim.lr" in failing(capsys, "train", "demo", "--optim.lr=fast")
    assert "give a preset" in failing(capsys, "train", "--steps=3")
    assert "no file" in failing(capsys, "train", str(tmp_path / "none.yaml"))
    (file := tmp_path / "list.yaml").write_text("- 1\n")
    assert "keys and values" in failing(capsys, "train", str(file))
    data = str(tmp_path / "none")
    said = failing(capsys, "train", "demo", "--data", data)
    assert f"esolm prepare pydocs {data} --tokenizer bpe:" in said
    assert "does not exist" in failing(capsys, "info", data)
    assert str(tmp_path) in failing(capsys, "info", str(tmp_path))
    (file := tmp_path / "half.yaml").write_text("a: [\n")
    assert "half.yaml is not YAML" in failing(capsys, "train", str(file))
    assert "no file" in failing(capsys, "sample", "stories", "--json_schema", data)
    assert "'ppo'" in failing(capsys, "tune", "ppo", "stories")


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"optim": {"lr": "fast"}}, ["optim.lr is 'fast'", "a number"]),
        ({"optim": {"schedule": "up"}}, ["optim.schedule is 'up'", "constant or cosine"]),
        ({"batch": {"micro": [1]}}, ["batch.micro is [1]", "a whole number or null"]),
        ({"validation": {"alpha_0": ["a"]}}, ["validation.alpha_0 is ['a']", "numbers"]),
        ({"init": 3}, ["init is 3", "text or null"]),
        ({"log": "wandb"}, ["log is 'wandb'", "tensorboard or wandb"]),
    ],
)
def test_wrong_types_in_a_file_are_named_in_words(capsys, tmp_path, tree, parts):
    (file := tmp_path / "mine.yaml").write_text(yaml.safe_dump({"base": "demo", **tree}))
    said = failing(capsys, "train", str(file))
    assert all(part in said for part in (*parts, "mine.yaml"))
    assert not any(word in said for word in ("class", "Parser", "typing", "Union", "NoneType"))


def test_missing_arguments_are_called_as_in_the_usage(capsys):
    assert "MODEL is missing" in failing(capsys, "sample")
    assert "RUN and OUT are missing" in failing(capsys, "export")
    assert "JUDGE is missing" in failing(capsys, "judge", "a.jsonl")
    assert "SHELL is tcsh" in failing(capsys, "completion", "tcsh")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", ["config.json is damaged"]),
        ("config.json", "{}", ["esolm convert"]),
        ("config.json", '{"model_type": "esolm"}', ["config.json", "net"]),
        ("model.safetensors", "", ["model.safetensors is damaged"]),
        ("model.safetensors", None, ["model.safetensors is missing"]),
        ("tokenizer.json", None, ["tokenizer.json is missing"]),
    ],
)
def test_a_damaged_model_is_one_line_that_names_the_file(capsys, tmp_path, name, content, words):
    folder = tmp_path / "bad"
    shutil.copytree(packaged()["stories"], folder)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    commands = [["sample"], ["score"]] if name == "tokenizer.json" else [["sample"], ["info"]]
    for command in commands:
        said = failing(capsys, *command, str(folder), *([str(folder / "README.md")] if command == ["score"] else []))
        assert all(word in said for word in words), said


@pytest.mark.parametrize("group", ["net", "system"])
def test_an_unknown_key_is_named(capsys, tmp_path, group):
    """In a model folder and in a checkpoint."""
    shutil.copytree(packaged()["stories"], folder := tmp_path / "model")
    make_run(tmp_path / "run")
    (state,) = (tmp_path / "run").rglob("state.json")
    for path, where in ((folder / "config.json", ""), (state, "identity.")):
        content = json.loads(path.read_text())
        (content["identity"] if where else content)[group]["foo"] = 1
        path.write_text(json.dumps(content))
        said = failing(capsys, "sample", str(folder if not where else tmp_path / "run"))
        assert f"{path} has the unknown key {where}{group}.foo" in said


def test_damaged_prepared_data_is_one_line(capsys, tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in failing(capsys, "info", str(tmp_path))
    (tmp_path / "manifest.json").write_text('{"format": 1, "fingerprint": "", "foo": 1, "splits": {}}')
    assert "manifest.json has the unknown key foo" in failing(capsys, "score", "stories", str(tmp_path))


def test_a_base_is_below_and_a_file_beside_it(tmp_path):
    (tmp_path / "below.yaml").write_text("base: laptop-esolm\nsteps: 5\noptim: {lr: 0.5}\n")
    (tmp_path / "above.yaml").write_text("base: below.yaml\nsystem: {name: mdlm}\noptim: {warmup: 1}\n")
    config = RunConfig.preset(str(tmp_path / "above.yaml"))
    assert (config.steps, config.optim.lr, config.optim.warmup) == (5, 0.5, 1)
    assert config.system["name"] == "mdlm"
