"""`esolm score` and `esolm variance`: what they print, what they keep, what they refuse."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from esolm import cli
from esolm.likelihood import orders
from esolm.likelihood import scoring as evaluate
from esolm.likelihood import work_file as work
from esolm.likelihood.texts import read
from esolm.model import load
from support.runs import make_run

L, TEXT = 8, "To be, or not to be, that is the question. " * 2
KEYS = {
    "corpus", "perplexity", "nats", "stderr", "bits_per_token", "bits_per_byte", "tokens", "sequences", "estimator",
    "kind", "num_orders", "terms", "curve", "moved", "seconds",
}  # fmt: skip
ORDERS = ["--estimator=iw", "--num_orders=12", "--batch_size=4"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three systems and two texts."""
    home = tmp_path_factory.mktemp("score")
    make_run(home / "esolm", alpha_0=1.0)
    make_run(home / "other", seed=1, alpha_0=1.0)
    make_run(home / "any_order", alpha_0=1.0, loss="any_order")
    make_run(home / "ar", "ar")
    make_run(home / "mdlm", "mdlm")
    make_run(home / "unit", "mdlm", weights="unit")
    make_run(home / "bd3lm", "bd3lm", block_size=4)
    (home / "a.txt").write_text(TEXT)
    (home / "b.txt").write_text(TEXT[10:] + "!")
    return home


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> Any:
    """The JSON that a command prints: the whole of its output."""
    assert cli.main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def failing(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    assert cli.main([*map(str, argv)]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_a_work_file_that_cannot_be_written(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before any work; where the disk becomes full in the meantime, the result is printed nevertheless."""
    command = ["score", str(home / "esolm"), str(home / "a.txt"), *ORDERS, "--json", "--work"]
    for path in (tmp_path, home / "a.txt" / "w"):
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "score", None)
            assert str(path) in failing(capsys, *command, path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(work, "EVERY", 0.0)
    monkeypatch.setattr(work.files, "save_file", full)
    assert cli.main([*command, str(tmp_path / "new" / "w")]) == 2
    out, said = capsys.readouterr()
    assert json.loads(out)[0]["num_orders"] == 12
    assert "error: " in said
    assert "No space left" in said


def test_a_forgotten_delimiter_is_named(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "d.txt").write_text("To be,\n<|endoftext|>\nor not\n<|endoftext|>\nto be.")
    options = ["--trials=2", "--num_samples=1", "--json"]
    for command, said in (("score", ""), ("variance", " prepare")):
        assert cli.main([command, str(home / "esolm"), str(path), *(options if said else ["--json"])]) == 0
        found = capsys.readouterr().err
        assert f'"<|endoftext|>" of {path} (' in found
        assert said in found
    assert cli.main(["score", str(home / "esolm"), str(path), "--delimiter", "<|endoftext|>", "--json"]) == 0
    assert not capsys.readouterr().err


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


@pytest.mark.parametrize("system", ["esolm", "ar", "mdlm"])
@pytest.mark.parametrize("estimator", ["nelbo", *evaluate.OF_ORDERS])
def test_json(home: Path, capsys: pytest.CaptureFixture[str], system: str, estimator: str) -> None:
    argv = ["score", home / system, home / "a.txt", home / "b.txt", f"--estimator={estimator}"]
    argv += [] if estimator == "nelbo" else ["--num_orders=12"]
    records = run(capsys, *argv)
    assert [record["corpus"] for record in records] == [str(home / "a.txt"), str(home / "b.txt")]
    for record in records:
        assert record.keys() == KEYS
        assert record["estimator"] == estimator
        kind = "exact" if system == "ar" else "estimate" if estimator == "jackknife" else "bound"
        assert record["kind"] == kind
        assert record["perplexity"] == pytest.approx(math.exp(record["nats"]))
        assert record["bits_per_token"] == pytest.approx(record["nats"] / math.log(2))
        assert sum(record["terms"].values()) == pytest.approx(record["nats"])
        assert record["tokens"] == record["sequences"] * L - (-record["tokens"] % L)
        assert record["stderr"] > 0
        assert record["seconds"] > 0
        orders = None if estimator == "nelbo" else 1 if system == "ar" else 12
        assert record["num_orders"] == orders
        curve = [] if orders is None else [1] if orders == 1 else [1, 6, 10, 12]
        assert [row["num_orders"] for row in record["curve"]] == curve
        assert (record["moved"] is None) == (orders in (None, 1))
    assert records[0]["tokens"] == len(TEXT) + 1
    assert records[0]["bits_per_byte"] == pytest.approx(records[0]["bits_per_token"] * (len(TEXT) + 1) / len(TEXT))
    assert without_time(run(capsys, *argv)) == without_time(records)


def test_exact(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One pass, or all sets of masks of a block; the batches do not matter."""
    argv = [home / "a.txt", "--num_sequences=5", "--estimator=exact"]
    (record,) = run(capsys, "score", home / "ar", *argv)
    assert (record["kind"], record["estimator"], record["num_orders"]) == ("exact", "exact", None)
    assert record["nats"] == pytest.approx(run(capsys, "score", home / "ar", *argv[:2])[0]["nats"])
    (record,) = run(capsys, "score", home / "esolm", *argv, "--alpha_0=0")
    assert record["kind"] == "exact"
    (record,) = run(capsys, "score", home / "bd3lm", *argv)
    assert (record["kind"], record["estimator"], record["curve"]) == ("exact", "exact", [])
    (again,) = run(capsys, "score", home / "bd3lm", *argv, "--batch_size=2")
    assert again["nats"] == pytest.approx(record["nats"], rel=1e-6)
    (bound,) = run(capsys, "score", home / "bd3lm", *argv[:2], "--num_draws=200")
    assert bound["kind"] == "bound"
    assert record["nats"] < bound["nats"] + 5 * bound["stderr"] / 200**0.5


def test_json_is_what_the_library_says(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = load(home / "esolm")
    argv = ["score", home / "esolm", home / "a.txt", "--num_sequences=5", "--seed=3"]
    texts = read(str(home / "a.txt"), lm.tokenizer, lm.net.config.length, num_sequences=5)
    orders = ["--estimator=jackknife", "--num_orders=8", "--antithetic=true"]
    (record,) = run(capsys, *argv, *orders)
    assert without_time([record]) == [evaluate.score(lm, texts, "jackknife", 8, True, seed=3).record()]
    half = dataclasses.replace(lm, system=dataclasses.replace(lm.system, alpha_0=0.5))  # type: ignore[type-var]
    (record,) = run(capsys, *argv, "--alpha_0=0.5", "--num_draws=3")
    assert without_time([record]) == [evaluate.nelbo(half, texts, 3, 3).record()]
    assert set(record["terms"]) == {"diffusion", "sequential"}
    (record,) = run(capsys, *argv, "--alpha_0=0", "--estimator=iw")
    assert (record["kind"], record["num_orders"]) == ("exact", 1)


def test_defaults_of_the_number_of_orders(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["score", home / "esolm", home / "a.txt", "--num_sequences=2"]
    assert run(capsys, *argv, "--estimator=any-order")[0]["num_orders"] == 1
    assert run(capsys, *argv, "--estimator=jackknife")[0]["num_orders"] == 100


def test_tables(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["score", str(home / "esolm"), str(home / "a.txt"), *ORDERS]) == 0
    out, err = capsys.readouterr()
    for word in ("iw (bound, K = 12)", "bits/byte", "jackknife", "from K/2 to K"):
        assert word in out
    assert err == ""
    assert cli.main(["score", str(home / "ar"), str(home / "a.txt")]) == 0
    assert "exact" in (out := capsys.readouterr().out)
    assert "K/2" not in out


class Stopped(Exception):
    pass


def test_work_resumed_equals_work_undisturbed(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, wherever it stops; what is known is not computed again; K may grow."""
    argv = ["score", home / "esolm", home / "a.txt", home / "b.txt", *ORDERS]
    whole = without_time(run(capsys, *argv))
    passes, original = [0], orders.under_orders

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        passes[0] += 1
        if passes[0] == stop:
            raise Stopped
        return original(*args, **kwargs)

    monkeypatch.setattr(orders, "under_orders", counted)
    stop = 0
    assert without_time(run(capsys, *argv, "--work", tmp_path / "w0")) == whole
    needed = passes[0]
    for stop in (1, 5, needed):
        file = tmp_path / f"w{stop}"
        passes[0] = 0
        with pytest.raises(Stopped):
            cli.main([*map(str, argv), "--json", f"--work={file}"])
        done, passes[0], stop = stop - 1, 0, 0
        assert without_time(run(capsys, *argv, "--work", file)) == whole
        assert passes[0] == needed - done
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    passes[0] = 0
    more = run(capsys, *argv[:4], "--estimator=iw", "--num_orders=16", "--batch_size=4", "--work", tmp_path / "w0")
    assert 0 < passes[0] < needed
    assert more[0]["curve"][0] != whole[0]["curve"][0]
    passes[0] = 0
    again = run(capsys, *argv, "--work", tmp_path / "w0")  # fewer than are known
    assert (without_time(again), passes[0]) == (whole, 0)
    assert load_file(tmp_path / "w0")["0"].shape[1] == 16
    jackknife = run(capsys, *argv, "--estimator=jackknife", "--work", tmp_path / "w0")
    assert (jackknife[0]["kind"], passes[0]) == ("estimate", 0)


def test_work_is_written_now_and_then(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every EVERY seconds, so that a killed process loses no more; whole each time."""
    saved: list[int] = []
    original = work.WorkFile.save

    def save(self: work.WorkFile, path: Path) -> None:
        original(self, path)
        saved.append(int(load_file(path)["0"].isfinite().sum()))

    monkeypatch.setattr(work.WorkFile, "save", save)
    argv = ["score", home / "esolm", home / "a.txt", *ORDERS]
    run(capsys, *argv, "--work", tmp_path / "a")
    assert len(saved) == 1
    monkeypatch.setattr(work, "EVERY", 0.0)
    run(capsys, *argv, "--work", tmp_path / "b")
    assert saved[1:] == sorted(set(saved[1:]))
    assert len(saved) > 10
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_work_of_something_else_is_refused(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "work"
    base = ["score", home / "esolm", home / "a.txt", *ORDERS, "--work", file]
    run(capsys, *base)
    before = file.read_bytes()
    other = {
        "model": ["score", home / "other", home / "a.txt", *ORDERS, "--work", file],
        "data.0": ["score", home / "esolm", home / "b.txt", *ORDERS, "--work", file],
        "data.1": ["score", home / "esolm", home / "a.txt", home / "b.txt", *ORDERS, "--work", file],
        "seed": [*base, "--seed=1"],
        "antithetic": [*base, "--antithetic=true"],
        "system.alpha_0": [*base, "--alpha_0=0.5"],
    }
    for key, argv in other.items():
        assert f"{key} is " in failing(capsys, *argv)
    assert file.read_bytes() == before
    file.write_bytes(before[:100])
    assert "--work" in failing(capsys, *base)
    assert "leave it out" in failing(capsys, "score", home / "esolm", home / "a.txt", "--work", file)


def test_what_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["score", home / "esolm", home / "a.txt"]
    assert "nelbo" in failing(capsys, *base, "--estimator=elbo")
    assert "none.txt" in failing(capsys, "score", home / "esolm", home / "none.txt")
    assert "is not a folder" in failing(capsys, "score", home / "none", home / "a.txt")
    assert "CORPUS" in failing(capsys, "score", home / "esolm")
    assert "ar " in failing(capsys, "score", home / "ar", home / "a.txt", "--alpha_0=0.5")
    assert "alpha_0 is 2" in failing(capsys, *base, "--alpha_0=2")
    assert "needs at least 2" in failing(capsys, *base, "--estimator=jackknife", "--num_orders=1")
    assert "even number" in failing(capsys, *base, "--estimator=iw", "--num_orders=3", "--antithetic=true")
    assert "toaster" in failing(capsys, *base, "--device=toaster")
    assert "draws no orders" in failing(capsys, *base, "--num_orders=100")
    assert "draws no orders" in failing(capsys, *base, "--antithetic=true")
    assert "draws no orders" in failing(capsys, *base, "--estimator=exact", "--num_orders=100")
    assert "too many orders" in failing(capsys, *base, "--estimator=exact")
    assert "leave it out" in failing(capsys, *base, "--estimator=exact", "--num_draws=2")
    assert "give --num_orders" in failing(capsys, *base, "--estimator=iw", "--num_draws=4")
    variance = ["variance", home / "esolm", home / "a.txt"]
    assert "trials is 1" in failing(capsys, *variance, "--trials=1")
    assert "counted from 0" in failing(capsys, *variance, "--sequence=99")


def test_variance(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three estimates of one bound: means that agree, and one order that spreads least beside ten times.

    For MDLM, whose L_AO and L_MDM are equal in the mean; at 5 standard errors of 200 trials, with fixed draws.
    """
    argv = ["variance", home / "mdlm", home / "a.txt", "--sequence=1"]
    found = run(capsys, *argv, "--trials=200")
    assert (found["tokens"], found["trials"]) == (L, 200)
    rows = found["estimators"]
    assert [row["samples"] for row in rows] == [10, 10, 1]
    for one in rows[:2]:
        error = math.hypot(one["sd"], rows[2]["sd"]) / math.sqrt(200)
        assert abs(one["mean"] - rows[2]["mean"]) < 5 * error
    assert rows[1]["sd"] < rows[0]["sd"]  # stratified and bounded against independent and not
    assert rows[2]["sd"] < rows[0]["sd"]
    assert run(capsys, *argv, "--trials=200") == found
    half = run(capsys, "variance", home / "esolm", home / "a.txt", "--trials=5", "--num_samples=3", "--alpha_0=0.5")
    assert [row["samples"] for row in half["estimators"]] == [3, 3, 1]
    assert cli.main(["variance", str(home / "esolm"), str(home / "a.txt"), "--trials=3"]) == 0
    assert "over 3 trials" in capsys.readouterr().out


@pytest.mark.parametrize("pair", [("esolm", "any_order"), ("mdlm", "unit")])
def test_variance_over_times_whatever_the_model_was_trained_by(
    home: Path, capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    """The same weights of the network give the same numbers."""
    first, second = (run(capsys, "variance", home / name, home / "a.txt", "--trials=4")["estimators"] for name in pair)
    names = [[row.pop("estimator") for row in rows] for rows in (first, second)]
    assert first == second
    assert names[0] == names[1]


def test_variance_of_systems_without_an_order(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home / "variant_a", alpha_0=0.5, variant="A")
    for name in ("variant_a", "bd3lm"):
        rows = run(capsys, "variance", home / name, home / "a.txt", "--trials=3", "--num_samples=2")["estimators"]
        assert [row["samples"] for row in rows] == [2, 2]
        assert all(math.isfinite(row["mean"]) for row in rows)


def test_variance_of_an_exact_likelihood_is_refused_before_any_pass(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esolm.net.denoiser.Denoiser.forward", lambda *_, **__: 1 / 0)
    assert "ar " in failing(capsys, "variance", home / "ar", home / "a.txt", "--trials=3")


def test_the_benchmark_of_the_single_pass_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--lengths=[8,16]", "--vocab_size=20", "--tokens=32", "--layers=1", "--width=64", "--rounds=2"]
    assert cli.main(["bench", "likelihood", *sizes, "--passes=4", f"--out={tmp_path / 'found.json'}"]) == 0
    cases = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert [(case["length"], case["batch"], case["passes_timed"]) for case in cases] == [(8, 4, 4), (16, 2, 4)]
    assert all(case[key] > 0 for case in cases for key in ("cost_of_plain_forward", "faster_than_passes"))
