"""`esolm sample` and `esolm infill` on a run with random weights: what is printed, written and refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from esolm import cli, load
from esolm.cli import estimates as limits
from esolm.cli import generate
from support.runs import make_run

LENGTH = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    return str(make_run(tmp_path_factory.mktemp("generate") / "run", "esolm", length=LENGTH, alpha_0=0.5))


@pytest.fixture(scope="module")
def ar(tmp_path_factory) -> str:
    return str(make_run(tmp_path_factory.mktemp("generate") / "ar", "ar", length=LENGTH))


def failing(capsys, *argv: str) -> str:
    assert cli.main(argv) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_json_is_all_of_standard_output_and_says_what_was_asked(run, capsys, tmp_path):
    words = ["--num_samples=3", "--prompt=ab", "--length=20", "--alpha_0=1", "--num_steps=4", "--seed=5"]
    words += ["--precision=float32"]  # by default the fastest of this machine
    assert cli.main(["sample", run, *words, "--json", "--show", "--svg", str(tmp_path / "a.svg")]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made.keys() == {"texts", "tokens", "nfe", "passes", "seconds", "schedule", "seed", "request"}
    assert [len(made[key]) for key in ("texts", "tokens", "nfe", "schedule")] == [3] * 4
    assert all(sorted(p for step in steps for p in step) == list(range(2, 20)) for steps in made["schedule"])
    assert made["nfe"] == [len(steps) for steps in made["schedule"]]
    assert made["passes"] == max(made["nfe"]) <= 4
    assert (made["seed"], made["request"]["alpha_0"], made["request"]["run"]) == (5, 1.0, run)
    lm = load(run)
    same = lm.sample(num_samples=3, length=20, prompt="ab", alpha_0=1.0, num_steps=4, seed=5)
    assert (same.tokens, same.texts) == (made["tokens"], made["texts"])


def test_text_is_all_of_a_pipe_and_batches_do_not_matter(run, capsys):
    assert cli.main(["sample", run, "--num_samples=3", "--prompt=xy", "--batch_size=2", "--precision=float32"]) == 0
    said = capsys.readouterr().out
    assert said == "\n\n".join(load(run).sample(num_samples=3, prompt="xy").texts) + "\n"


def test_a_sample_ends_before_a_stop(run, capsys, tmp_path):
    """Before the first of several, which the prompt may hold; the tokens are all there."""
    prompt, lm = "a.b", load(run)
    whole = lm.sample(prompt, 4)
    stops = [whole.texts[0][8], whole.texts[1][5], "."]

    def shortened(text: str) -> str:
        return text[: next((i for i in range(len(prompt), len(text)) if text[i] in stops), len(text))]

    cut = lm.sample(prompt, 4, stop=stops)
    assert cut.texts == [shortened(text) for text in whole.texts]
    assert cut.tokens == whole.tokens
    assert len(cut.texts[0]) <= 8
    assert lm.sample(prompt, 4, stop=stops[0]).texts[0] == whole.texts[0].split(stops[0])[0]
    words = ["sample", run, f"--prompt={prompt}", "--num_samples=4", "--precision=float32"]
    words += [f"--stop={stop}" for stop in stops]
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == cut.texts
    assert cli.main([*words, "--out", str(tmp_path / "a.jsonl")]) == 0
    capsys.readouterr()
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [record["text"] for record in records] == cut.texts
    assert [prompt + record["prediction"] for record in records] == cut.texts
    assert "stop is an empty text" in failing(capsys, "sample", run, "--stop=")


def test_infill_keeps_what_is_given(run, capsys):
    assert cli.main(["infill", run, "ab__cd__e", "--blank=__", "--tokens_per_blank=1,3", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    (tokens,) = made["tokens"]
    assert [tokens[at] for at in (0, 1, 3, 4, 8)] == list(b"abcde")
    assert sorted(p for step in made["schedule"][0] for p in step) == [2, 5, 6, 7]
    order = "8,7,6,5,4,3,2,1,0"
    again = ["infill", run, "ab__cd__e", "--blank=__", "--tokens_per_blank=1,3", "--sampler=order", "--json"]
    assert cli.main([*again, "--order", order]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == [[[7], [6], [5], [2]]]


def test_show_without_a_terminal_is_the_last_frame(run, capsys):
    assert cli.main(["sample", run, "--prompt=The", "--num_steps=3", "--show"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The")
    assert " passes · " in said
    assert "· left to right" not in said
    assert "● left to right" in said
    assert said.count("step ") == 1
    assert said.endswith("\n")


def test_pictures_are_written_whole_and_never_over_another_file(run, capsys, tmp_path):
    drawn = tmp_path / "a.svg"
    words = ["sample", run, "--prompt=The", "--num_steps=3", "--svg", str(drawn)]
    assert cli.main(words) == 0
    assert f"wrote {drawn}" in capsys.readouterr().err
    first = drawn.read_text()
    assert ET.fromstring(first).tag.endswith("svg")
    assert "--force" in failing(capsys, *words, "--seed=1")
    assert drawn.read_text() == first
    assert cli.main([*words, "--seed=1", "--force"]) == 0
    assert drawn.read_text() != first
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    capsys.readouterr()
    assert "no folder" in failing(capsys, "sample", run, "--gif", str(tmp_path / "none" / "a.gif"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_prompts_of_a_file_give_a_line_for_each_sample(run, capsys, tmp_path, kind):
    prompts, out = tmp_path / f"prompts.{kind}", tmp_path / "out.jsonl"
    texts = ["ab", "", "wxyz"]
    lines = texts if kind == "txt" else [json.dumps({"prompt": text, "id": n}) for n, text in enumerate(texts)]
    prompts.write_text("\n".join(lines) + "\n")
    words = ["sample", run, "--prompt_file", str(prompts), "--num_samples=2", "--length=8", "--out", str(out)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == ""
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["prompt"] for record in records] == [text for text in texts for _ in range(2)]
    assert [record.get("id") for record in records] == [
        None if kind == "txt" else n for n in range(3) for _ in range(2)
    ]
    for record in records:
        assert record.keys() - {"id"} == {"prompt", "prediction", "text", "tokens", "nfe"}
        assert record["text"] == record["prompt"] + record["prediction"]
    before = out.read_text()
    assert "exists" in failing(capsys, *words)
    assert out.read_text() == before


def test_wrong_prompt_files_name_the_line(run, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    assert "line 2 of" in failing(capsys, "sample", run, "--prompt_file", str(path))
    path.write_text('{"prompt": "a"}\nprompt\n')
    assert "line 2 of" in failing(capsys, "sample", run, "--prompt_file", str(path))
    (empty := tmp_path / "prompts.txt").write_text("")
    assert "no prompts" in failing(capsys, "sample", run, "--prompt_file", str(empty))
    assert "no file" in failing(capsys, "sample", run, "--prompt_file", str(tmp_path / "none"))
    assert "either" in failing(capsys, "sample", run, "--prompt_file", str(empty), "--prompt=a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--alpha_0=2"], "between 0 and 1"),
        (["--top_p=0"], "top_p is 0.0"),
        (["--num_steps=0"], "at least 1"),
        (["--num_samples=0"], "num_samples is 0"),
        (["--prompt", "a" * 30], "raise length"),
        (["--prompt", "a" * LENGTH], "nothing to generate"),
        (["--sampler=gibbs"], "gibbs"),
        (["--sampler=order", "--order=1,x"], "--order"),
        (["--sampler=order", "--length=3", "--order=1,2,2"], "permutation of 0 .. 2"),
        (["--sampler=order", "--length=3", "--order=1,0"], "permutation of 0 .. 2"),
        (["--num_steps=many"], "num_steps"),
        (["--steps=3"], "--steps"),
        (["--weights=raw"], "ema or model"),
        (["--which=first"], "best or last"),
        (["--device=tpu9"], "tpu9"),
    ],
)
def test_wrong_requests_say_what_is_allowed(run, capsys, words, said):
    assert said in failing(capsys, "sample", run, *words)


def test_what_a_system_cannot_do(run, ar, capsys, tmp_path):
    assert "left to right" in failing(capsys, "infill", ar, "a____b")
    assert "no blank" in failing(capsys, "infill", run, "a b")
    assert "2 blanks" in failing(capsys, "infill", run, "a____b____", "--tokens_per_blank=1,2,3")
    assert "not a folder" in failing(capsys, "sample", str(tmp_path / "none"))
    assert cli.main(["sample", ar, "--prompt=ab", "--length=9", "--svg", str(tmp_path / "ar.svg"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == [[[at] for at in range(2, 9)]]
    assert ">diffusion<" not in (tmp_path / "ar.svg").read_text()


class Stopped(BaseException):
    pass


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """The sizes of the batches that are generated."""
    made: list[int] = []
    original = generate.one_batch

    def counted(lm, job, part, settings, view):
        made.append(len(part))
        return original(lm, job, part, settings, view)

    monkeypatch.setattr(generate, "one_batch", counted)
    return made


@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
def test_interrupted_output_is_kept_and_resumed(run, capsys, tmp_path, batches, monkeypatch, error):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    words = ["sample", run, "--num_samples=7", "--prompt=ab", "--batch_size=2", "--out"]
    assert cli.main([*words, str(whole)]) == 0
    assert batches == [2, 2, 2, 1]
    counted, batches[:] = generate.one_batch, []

    def stopping(*rest):
        if len(batches) == 2:
            raise error
        return counted(*rest)

    monkeypatch.setattr(generate, "one_batch", stopping)
    if error is KeyboardInterrupt:
        assert cli.main([*words, str(out)]) == 130
        assert "4 of 7" in capsys.readouterr().err
    else:
        with pytest.raises(Stopped):
            cli.main([*words, str(out)])
    assert not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    assert partial.read_text() == "".join(whole.read_text().splitlines(keepends=True)[:4])
    partial.write_text(partial.read_text() + '{"prompt": "a')  # killed while writing
    monkeypatch.setattr(generate, "one_batch", counted)
    batches[:] = []
    assert cli.main([*words, str(out)]) == 0
    assert batches == [2, 1]
    assert out.read_text() == whole.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "whole.jsonl"]


def test_output_of_another_request_is_not_resumed(run, capsys, tmp_path, monkeypatch):
    out, stop = tmp_path / "out.jsonl", generate.one_batch
    words = ["sample", run, "--num_samples=4", "--batch_size=2", "--precision=float32", "--out", str(out)]
    monkeypatch.setattr(generate, "one_batch", lambda *rest: stop(*rest) if rest[2].start < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(words)
    monkeypatch.setattr(generate, "one_batch", stop)
    for name, value in (("seed", 1), ("prompt", "a"), ("temperature", 0.5), ("num_samples", 5)):
        assert name in failing(capsys, *words, f"--{name}={value}")
    assert "--json" in failing(capsys, *words, "--json")
    assert cli.main([*words, "--seed=1", "--force"]) == 0
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == load(run).sample(
        num_samples=4, seed=1
    ).texts


def test_a_folder_that_is_not_writable_is_refused_before_the_model_is_loaded(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "load", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert str(tmp_path) in failing(capsys, "sample", run, "--out", str(tmp_path / "a"))
    monkeypatch.undo()
    assert str(tmp_path / "none") in failing(capsys, "sample", run, "--out", str(tmp_path / "none" / "a"))


def test_what_exceeds_the_memory_is_refused_and_what_is_slow_is_announced(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "available", lambda device: 10**10)
    assert "--out" in failing(capsys, "sample", run, "--num_samples=100000000")
    assert cli.main(["sample", run, "--num_samples=1000", "--length=1000000"]) == 2
    note, error = capsys.readouterr().err.splitlines()
    assert "trained with" in note
    assert error.startswith("error: ")
    assert "--batch_size" in error
    (text := tmp_path / "a.txt").write_text("a" * 100)
    assert "--length" in failing(capsys, "score", run, str(text), "--length=100000")
    monkeypatch.setattr(limits, "SLOW", 1e-9)
    assert cli.main(["sample", run, "--num_samples=2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["texts"]) == 2
    assert "minutes" in err


def test_memory_with_a_file_does_not_grow_with_the_samples(run, tmp_path, monkeypatch):
    """All samples need more memory than there is, a batch of them does not."""
    monkeypatch.setattr(limits, "available", lambda device: 10**6)
    assert (
        cli.main(["sample", run, "--num_samples=300", "--length=24", "--batch_size=4", "--out", str(tmp_path / "a")])
        == 0
    )
    assert len((tmp_path / "a").read_text().splitlines()) == 300


def test_five_underscores_are_one_blank(run, capsys):
    assert cli.main(["infill", run, "ab_____c", "--tokens_per_blank=2", "--json"]) == 0
    ((a, b, _, _, c),) = json.loads(capsys.readouterr().out)["tokens"]
    assert bytes([a, b, c]) == b"abc"


def test_loading_is_announced_on_a_terminal_only(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cli.main(["sample", run]) == 0
    assert f"loading {run}" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cli.main(["sample", run, "--json"]) == 0
    assert "loading" not in capsys.readouterr().err


def test_long_work_has_a_bar_on_a_terminal(run, monkeypatch, capsys):
    monkeypatch.setattr(generate, "_PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["sample", run, "--num_samples=2", "--batch_size=1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["texts"]) == 2
    assert "sample 2 of 2" in err
    assert "tokens/s" in err


@pytest.mark.usefixtures("bf16")
def test_precision(run, capsys):
    """float32 draws what the network as trained draws; bf16 and int8 draw the same tokens until the first flip."""
    expected = torch.tensor(load(run).sample(num_samples=4, seed=1).tokens)
    for precision, least in (("float32", 1.0), ("bf16", 0.3), ("int8", 0.3)):
        assert cli.main(["sample", run, "--num_samples=4", "--seed=1", "--json", "--precision", precision]) == 0
        made = torch.tensor(json.loads(capsys.readouterr().out)["tokens"])
        assert (made == expected).double().mean() >= least
    error = failing(capsys, "sample", run, "--precision", "half")
    assert "half" in error
    assert "int8" in error


def test_a_folder_is_no_file_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", "stories", f"--out={tmp_path}", "--force"]) == 2
    assert "is a folder" in capsys.readouterr().err
