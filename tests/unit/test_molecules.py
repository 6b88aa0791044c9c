"""Molecules: validity, uniqueness, novelty and size against values computed by hand."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from pathlib import Path

import pytest

from esolm import cli
from esolm.metrics.molecules import Molecule, known, molecules, parsed, share

ETHANOL, PYRIDINE = ("CCO", "OCC", "C(O)C"), ("c1ccncc1", "C1=CC=NC=C1")


def samples(path: Path, *texts: str, **more: int) -> str:
    """A file as `esolm sample --out` writes it."""
    lines = (json.dumps({"text": t, "tokens": [*t.encode()], **more}, ensure_ascii=False) for t in texts)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return str(path)


def test_rates_by_hand(tmp_path: Path) -> None:
    """Six of eight are valid; of these four differ; one of those is new; the training has none smaller."""
    wrong = ["c1ccncc", "CC(C)(C)(C)C"]  # an open ring; five bonds of a carbon
    file = samples(tmp_path / "s.jsonl", *ETHANOL[:2], *PYRIDINE[:1], "CC", *wrong, "N#N", ETHANOL[2], nfe=7)
    train = tmp_path / "train.smi"
    train.write_text(f"SMILES\n{ETHANOL[2]}\nCC ethane\n{PYRIDINE[1]}\n\nCCCCCC\n")
    found = molecules(file, str(train))
    rates = {"validity": (6, 8), "uniqueness": (4, 6), "novelty": (1, 4), "whole": (6, 8)}
    expected = {"samples": 8, "nfe": 7}
    for name, (hits, total) in rates.items():
        mean = hits / total
        expected |= {name: mean, f"{name}_stderr": math.sqrt(mean * (1 - mean) / (total - 1))}
    sizes = [3, 3, 6, 2, 2, 3]
    expected |= {"atoms": statistics.fmean(sizes), "atoms_stderr": statistics.stdev(sizes) / math.sqrt(6)}
    assert found == pytest.approx(expected)
    assert list(molecules(file)) == [key for key in expected if "novelty" not in key and "whole" not in key]


def test_a_sample_is_whole_from_the_first_percentile_of_sizes_on(tmp_path: Path) -> None:
    """Of 200 training molecules with 1 to 200 atoms the smallest two are below; the third is as small as whole is."""
    (tmp_path / "train.smi").write_text("".join("C" * n + "\n" for n in range(1, 201)))
    file = samples(tmp_path / "s.jsonl", "C", "CC", "CCC", "CCN", "CCCC(", "O" + "C" * 300)
    found = molecules(file, str(tmp_path / "train.smi"))
    assert (found["validity"], found["whole"]) == (5 / 6, 3 / 6)


def test_the_field_prediction_leaves_out_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text(json.dumps({"text": ">CCO", "prediction": "CCO", "tokens": [1]}))
    assert [molecules(str(file), field=field)["validity"] for field in ("text", "prediction")] == [0, 1]
    with pytest.raises(ValueError, match="'smiles': choose text or prediction"):
        molecules(str(file), field="smiles")


@pytest.mark.parametrize("spellings", [ETHANOL, PYRIDINE])
def test_spellings_of_one_molecule_are_equal(spellings: tuple[str, ...]) -> None:
    assert {*parsed(spellings)} == {Molecule(spellings[0], 3 if spellings is ETHANOL else 6)}


@pytest.mark.parametrize(
    "text", ["", " ", "CC O", "CCO name", " CCO", "CCO\n", "C\0C", "C\ufffd", "Ç", "CC(", "C1CC", "[Xx]", "cc", "hello"]
)
def test_invalid_molecules(text: str) -> None:
    assert parsed([text]) == [None]


def test_rdkit_logging_is_off_while_parsing(capfd: pytest.CaptureFixture[str]) -> None:
    from rdkit import Chem

    assert parsed(["c1ccncc", "F(F)F"]) == [None, None]
    assert capfd.readouterr().err == ""
    assert Chem.MolFromSmiles("F(F)F") is None
    assert "valence" in capfd.readouterr().err


def test_no_valid_sample_has_no_uniqueness(tmp_path: Path) -> None:
    (tmp_path / "train.smi").write_text("CC\n")
    found = molecules(samples(tmp_path / "s.jsonl", "(", ")"), str(tmp_path / "train.smi"))
    assert (found["samples"], found["nfe"], found["validity"], found["validity_stderr"]) == (2, None, 0, 0)
    assert all(found[key] is None for key in ("uniqueness", "uniqueness_stderr", "novelty", "atoms", "atoms_stderr"))


def test_the_standard_error_is_the_spread_of_repeated_draws() -> None:
    """300 draws from 3000 molecules, 400 times: the errors given and the spread of the shares, within a fifth."""
    rng = random.Random(0)
    shares = [share("x", len({rng.randrange(3000) for _ in range(300)}), 300) for _ in range(400)]
    means = [found["x"] for found in shares]
    centre = sum(means) / len(means)
    spread = math.sqrt(sum((mean - centre) ** 2 for mean in means) / (len(means) - 1))
    assert sum(found["x_stderr"] for found in shares) / len(shares) == pytest.approx(spread, rel=0.2)


def test_lines_are_not_cut_inside_a_text(tmp_path: Path) -> None:
    assert molecules(samples(tmp_path / "s.jsonl", "C\u2028C", "C\x85"))["samples"] == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = samples(tmp_path / "s.jsonl", "CC", "C", "(", "C")
    assert cli.main(["molecules", file]) == 0
    assert "validity               0.75\n" in capsys.readouterr().out
    (tmp_path / "t.smi").write_text("C\n")
    assert cli.main(["molecules", file, "--train", str(tmp_path / "t.smi"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == molecules(file, str(tmp_path / "t.smi"))
    assert printed.err == ""


@pytest.mark.parametrize("content", [None, "", "CCO\n", '{"text": "CCO"}'])
def test_wrong_samples_name_the_file_and_the_command(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "samples.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"samples\.jsonl.*esolm sample"):
        molecules(str(file))


@pytest.mark.parametrize("content", [None, b"", b"SMILES,SPLIT\nCCO,train\n", b"\xff\xfe"])
def test_wrong_training_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "train.csv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.csv.*SMILES"):
        known(file)


def test_without_rdkit_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    assert cli.main(["molecules", samples(tmp_path / "s.jsonl", "C")]) == 2
    assert "pip install 'esolm[chem]'" in capsys.readouterr().err
