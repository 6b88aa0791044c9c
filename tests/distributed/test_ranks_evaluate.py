"""Scoring and sampling by several processes give what one process gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from esolm import cli
from esolm.likelihood.work_file import WorkFile
from esolm.runtime.distributed import Ranks
from support import crew, tiny

SCORES = {
    "nelbo": ("--estimator=nelbo", "--num_draws=3"),
    "iw": ("--estimator=iw", "--num_orders=4"),
    "jackknife": ("--estimator=jackknife", "--num_orders=6", "--antithetic=true"),
}


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("scored") / "run"
    assert cli.main(tiny.command(data, run, "--net.init=gpt2")) == 0
    return run


def alone(capsys, argv: list[str]) -> object:
    capsys.readouterr()
    assert cli.main(argv) == 0
    return json.loads(capsys.readouterr().out)


def shared(processes: crew.Crew, argv: list[str]) -> object:
    first, *others = processes(crew.command, argv)
    assert first[0] == 0, first[2]
    assert others == [(0, "", "")] * len(others)
    return json.loads(first[1])


@pytest.mark.parametrize("estimator", SCORES)
@pytest.mark.parametrize("processes", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_scores_are_those_of_one_process(run, data, capsys, request, estimator, processes):
    argv = ["score", str(run), str(data), "--batch_size=2", "--json", *SCORES[estimator]]
    (one,), (other,) = alone(capsys, argv), shared(request.getfixturevalue(processes), argv)
    assert one.pop("seconds") > 0
    assert other.pop("seconds") > 0
    curve, expected = other.pop("curve"), one.pop("curve")
    for found, wanted in [(other, one), *zip(curve, expected, strict=True)]:
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            exact = value is None or isinstance(value, str)
            assert found[key] == (value if exact else pytest.approx(value, rel=1e-6)), key


def test_orders_are_kept_in_parts_and_joined(run, data, two, capsys, tmp_path, monkeypatch):
    argv = ["score", str(run), str(data), "--estimator=iw", "--num_orders=3", "--json", f"--work={tmp_path / 'work'}"]
    shared(two, argv)
    assert [file.name for file in tmp_path.iterdir()] == ["work"]
    matrix = known(tmp_path / "work")
    assert matrix.shape == (5, 3)
    for rank, rows in enumerate((slice(0, 2), slice(2, 5))):  # as if both had been stopped
        work = WorkFile.__new__(WorkFile)
        part = torch.full_like(matrix, torch.nan)
        part[rows] = matrix[rows]
        work.__dict__.update(matrices={"0": part}, identity=read(tmp_path / "work"), ranks=Ranks(rank, 2))
        work.save(work.own(tmp_path / "work"))
    (tmp_path / "work").unlink()

    def never(*_, **__):
        raise AssertionError("an order that was known is drawn again")

    monkeypatch.setattr(sys.modules["esolm.likelihood.orders"], "under_orders", never)
    (found,) = alone(capsys, argv)
    assert found["num_orders"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["work"]
    assert torch.equal(known(tmp_path / "work"), matrix)


def known(path: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(path)["0"]


def read(path: Path) -> dict:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["identity"])


@pytest.mark.parametrize("sampler", ["first_hitting", "speculative"])
def test_samples_are_those_of_one_process(run, two, capsys, tmp_path, sampler):
    argv = ["sample", str(run), "--num_samples=5", "--batch_size=2", "--precision=float32", f"--sampler={sampler}"]
    one, other = alone(capsys, [*argv, "--json"]), shared(two, [*argv, "--json"])
    for key in ("texts", "tokens", "nfe", "schedule", "speculation"):
        assert other.get(key) == one.get(key), key
    assert other["passes"] >= one["passes"]
    written = two(crew.command, [*argv, f"--out={tmp_path / 'out.jsonl'}"])
    assert [code for code, _, _ in written] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == one["texts"]


def test_infills_are_those_of_one_process(run, two, capsys):
    argv = ["infill", str(run), "ab____cd____", "--tokens_per_blank=3", "--num_samples=3", "--json"]
    argv.append("--precision=float32")
    assert shared(two, argv)["texts"] == alone(capsys, argv)["texts"]


def test_what_cannot_be_shared_is_refused_once(run, data, two, tmp_path):
    (tmp_path / "there").write_text("mine")
    for words, message in (
        (["sample", str(run)], "1 samples for 2 processes"),
        (["sample", str(run), "--num_samples=2", "--show"], "--show is for one process"),
        (["sample", str(run), "--num_samples=2", f"--out={tmp_path / 'there'}"], "exists"),
        (["score", str(run), str(tmp_path / "nothing")], "nothing"),
    ):
        (code, out, err), other = two(crew.command, words)
        assert (code, out, other) == (2, "", (2, "", ""))
        assert message in err
        assert len(err.strip().splitlines()) == 1
