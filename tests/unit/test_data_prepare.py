"""Prepared folders: deterministic output, nothing overwritten, damage detected."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from esolm.data import Loader, Manifest, prepare, shards, tokenizer, workspace
from esolm.data.manifest import id_type

MODULE = sys.modules["esolm.data.prepare"]  # the package's own name for it is the function
WORDS = ["red", "green", "blue", "cat", "dog", "naïve", "世界", "run", "walk", "and", "or", "the"]


def sentence(i: int) -> str:
    return " ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(12)) + f" {i}."


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_CHUNK", 2000)


@pytest.fixture
def source(tmp_path: Path) -> str:
    lines = [json.dumps({"text": sentence(i), "prompt": f"Question {i}?", "target": WORDS[i % 12]}) for i in range(400)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    return f"text:{tmp_path}/d.jsonl"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("options", [{"tokenizer": "bpe:300"}, {"tokenizer": "bytes", "packing": "conditional"}])
def test_the_output_does_not_depend_on_the_number_of_workers(source: str, tmp_path: Path, options: dict) -> None:
    for workers in (1, 2, 5):
        prepare(source, tmp_path / f"out{workers}", length=32, workers=workers, **options)
    first = contents(tmp_path / "out1")
    assert "train-00000.bin" in first
    assert contents(tmp_path / "out2") == first == contents(tmp_path / "out5")


def test_a_forgotten_delimiter_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.txt").write_text("".join(f"{sentence(i)}\n<|endoftext|>\n" for i in range(400)))
    options = {"tokenizer": "bytes", "length": 32}
    prepare(str(tmp_path / "d.txt"), tmp_path / "one", **options)
    said = capsys.readouterr().err
    assert said.count(f'"<|endoftext|>" of {tmp_path / "d.txt"} (400)') == 1
    prepare(str(tmp_path / "d.txt"), tmp_path / "two", delimiter="<|endoftext|>", **options)
    assert "were read as text" not in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["wrap", "pad"])
def test_delimited_documents_equal_those_of_json_lines(source: str, tmp_path: Path, packing: str) -> None:
    """The same rows, splits and counts; the delimiter is part of the request, and other requests are unchanged."""
    (tmp_path / "d.txt").write_text("".join(f"  {sentence(i)}\n\n<|endoftext|>\n" for i in range(400)))
    options = {"tokenizer": "bpe:300", "length": 32, "valid_fraction": 0.2, "packing": packing}
    json_lines = prepare(source, tmp_path / "one", **options)
    text = prepare(str(tmp_path / "d.txt"), tmp_path / "two", delimiter="<|endoftext|>", **options)
    assert text.splits == json_lines.splits
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert {name for name in one if one[name] != two[name]} == {"manifest.json"}
    assert text.request["reading"]["delimiter"] == "<|endoftext|>"
    assert "delimiter" not in json_lines.request["reading"]
    with pytest.raises(ValueError, match="another delimiter"):
        prepare(str(tmp_path / "d.txt"), tmp_path / "two", **options)
    with pytest.raises(ValueError, match="delimiter"):
        prepare(str(tmp_path / "d.txt"), tmp_path / "three", delimiter="---", lines=True, **options)


def test_no_local_path_is_written(source: str, tmp_path: Path) -> None:
    tokenizer("bytes").save(tmp_path)
    prepare(source, tmp_path / "out", tokenizer=str(tmp_path), length=32)
    for name, data in contents(tmp_path / "out").items():
        assert str(tmp_path).encode() not in data, name


def test_the_shards_contain_the_documents_of_each_split_in_order(source: str, tmp_path: Path) -> None:
    manifest = prepare(source, tmp_path / "out", tokenizer="bytes", length=32, valid_fraction=0.2)
    found = {}
    for name, split in manifest.splits.items():
        rows = np.fromfile(tmp_path / "out" / split.shards[0].file, "<u2")
        texts = bytes(256 - 1 if i == 256 else i for i in rows.tolist()).split(b"\xff")[:-1]
        found[name] = [text.decode() for text in texts]
        assert split.sequences * 32 == len(rows) == split.tokens
        assert split.bytes == pytest.approx(len(rows) - split.documents, abs=1)
    assert not set(found["train"]) & set(found["valid"])
    order = {sentence(i): i for i in range(400)}
    numbers = {name: [order[text] for text in texts] for name, texts in found.items()}
    assert numbers["train"] == sorted(numbers["train"])
    assert len(numbers["train"]) + len(numbers["valid"]) >= 398
    assert 40 < len(numbers["valid"]) < 120


def test_bpe_is_not_trained_on_the_valid_split(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(sentence(i) + "\n" for i in range(200)))
    (tmp_path / "v.txt").write_text("zqzqzq " * 500)
    specs = [f"text:{tmp_path}/{name}.txt" for name in "tv"]
    prepare(specs[0], tmp_path / "out", tokenizer="bpe:280", length=16, valid=specs[1])
    assert not any("zq" in token for token in Manifest.load(tmp_path / "out").load_tokenizer().core.get_vocab())


def test_bpe_is_trained_on_prompts_too(tmp_path: Path) -> None:
    records = [{"prompt": f"zqzqzq {i} zqzqzq", "target": f"yes yes {i}"} for i in range(200)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare(f"text:{tmp_path}/d.jsonl", tmp_path / "out", tokenizer="bpe:270", length=32, packing="conditional")
    vocabulary = Manifest.load(tmp_path / "out").load_tokenizer().core.get_vocab()
    assert {"zqzqzq", "yes"} <= set(vocabulary)


def test_conditional_rows(source: str, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out", tokenizer="bytes", length=24, packing="conditional", target_length=12)
    batch = Loader(tmp_path / "out", batch_size=5, shuffle=False).batch(0)
    assert batch.valid is None
    assert batch.given is not None
    text = tokenizer("bytes")
    for row, given in zip(batch.x, batch.given):
        prompt, target = row[given].tolist(), row[~given].tolist()
        assert text.decode(prompt).endswith("?\n")
        assert len(prompt) <= 12
        end = target.index(text.eos_id)
        assert text.decode(target[:end]) in WORDS
        assert set(target[end:]) == {text.eos_id}


def test_lines_after_a_given_separator(tmp_path: Path) -> None:
    lines = [f"C{'C' * (i % 9)}{'=O' * (i % 2)}N" for i in range(200)]
    (tmp_path / "d.smi").write_text("".join(f"{smiles}\n" for smiles in lines))
    options = {"packing": "conditional", "separator": ">", "target_length": 15}
    made = prepare(f"text:{tmp_path}/d.smi", tmp_path / "out", tokenizer="bytes", length=16, **options)
    assert made is not None
    x, valid, given = Loader(tmp_path / "out", batch_size=made.splits["train"].sequences, shuffle=False).batch(0)
    assert valid is None
    assert given is not None
    assert given[:, 0].all()
    assert not given[:, 1:].any()
    text = tokenizer("bytes")
    assert {text.decode(row[: row.index(text.eos_id)]) for row in x.tolist()} <= {f">{smiles}" for smiles in lines}
    assert all(split.sequences for split in made.splits.values())


def test_single_rows_from_lines(tmp_path: Path) -> None:
    molecules = [f"C{'C' * (i % 9)}{'=O' * (i % 2)}N" for i in range(200)]
    (tmp_path / "d.smi").write_text("".join(f"{smiles}\n" for smiles in molecules))
    made = prepare(f"text:{tmp_path}/d.smi", tmp_path / "out", tokenizer="bytes", length=12, packing="single")
    assert made is not None
    loader = Loader(tmp_path / "out", batch_size=made.splits["train"].sequences, shuffle=False)
    x, valid, given = loader.batch(0)
    assert (valid, given) == (None, None)
    text = tokenizer("bytes")
    rows = [row[: row.index(text.eos_id)] for row in x.tolist()]
    assert all(set(row[len(ids) :]) == {text.eos_id} for row, ids in zip(x.tolist(), rows))
    assert {text.decode(ids) for ids in rows} <= {smiles for smiles in molecules if len(smiles) < 12}
    splits = made.splits.values()
    assert sum(split.skipped for split in splits) == sum(len(smiles) >= 12 for smiles in molecules) > 0
    assert sum(split.sequences + split.skipped for split in splits) == len(molecules)


def test_a_finished_folder_is_reused_and_never_overwritten(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare(source, tmp_path / "out", tokenizer="bytes", length=32)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert prepare(source, tmp_path / "out", tokenizer="bytes", length=32, workers=2) == first
    assert "reused" in capsys.readouterr().err
    for changed in ({"length": 16}, {"seed": 1}, {"tokenizer": "bpe:300"}, {"valid_fraction": 0.5}):
        with pytest.raises(ValueError, match=f"another {next(iter(changed))}:"):
            prepare(source, tmp_path / "out", **{"tokenizer": "bytes", "length": 32, **changed})
    with (tmp_path / "d.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(ValueError, match="another corpus"):
        prepare(source, tmp_path / "out", tokenizer="bytes", length=32)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").touch()
    with pytest.raises(ValueError, match="not prepared data"):
        prepare(source, tmp_path / "mine", tokenizer="bytes", length=32)


def test_an_interrupted_run_resumes(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"tokenizer": "bpe:300", "length": 32, "workers": 1}
    save, encode = shards.save_chunk, shards.encode
    saved: list[Path] = []
    encoded: list[int] = []
    monkeypatch.setattr(shards, "encode", lambda *a: encoded.append(1) or encode(*a))
    prepare(source, tmp_path / "whole", **options)
    total = len(encoded)
    assert total > 5

    def failing(path: Path, chunk: shards.Chunk) -> None:
        if len(saved) == 3:
            raise KeyboardInterrupt
        save(path, chunk)
        saved.append(path)

    monkeypatch.setattr(shards, "save_chunk", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shards, "save_chunk", save)
    monkeypatch.setattr(sys.modules["esolm.data.tokenizer"], "_train_bpe", lambda *_: pytest.fail("trained again"))
    encoded.clear()
    prepare(source, tmp_path / "out", **options)
    assert len(encoded) == total - 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


def test_leftovers_of_another_request_are_not_used(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda *_: pytest.fail("stop"))
        with pytest.raises(pytest.fail.Exception):
            prepare(source, tmp_path / "out", tokenizer="bytes", length=32)
    assert list((tmp_path / ".out.partial").glob("*.npz"))
    prepare(source, tmp_path / "out", tokenizer="bpe:300", length=32)
    prepare(source, tmp_path / "again", tokenizer="bpe:300", length=32)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_two_processes_in_one_folder_are_refused(source: str, tmp_path: Path) -> None:
    with (
        workspace.working(tmp_path / "out", {}),
        pytest.raises(ValueError, match="another process"),
    ):
        prepare(source, tmp_path / "out", tokenizer="bytes", length=32)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_CHUNK", 50_000)
    peaks = []
    for n in (4, 16):
        (tmp_path / f"{n}.txt").write_text("".join(f"{i} {sentence(i)}\n\n" for i in range(n * 1500)))
        tracemalloc.start()
        prepare(f"text:{tmp_path}/{n}.txt", tmp_path / f"out{n}", tokenizer="bytes", length=64, workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0] + 200_000


PARAGRAPHS = [f"{sentence(i)} {sentence(i + 1)}" for i in range(120)]


def texts(folder: Path) -> dict[str, str]:
    """The decoded tokens of each split, without EOS."""
    manifest = Manifest.load(folder)
    tokens = {name: Loader(folder, name, 1, shuffle=False) for name in manifest.splits}
    decoder = manifest.load_tokenizer()
    rows = {
        name: [i for n in range(len(loader)) for i in loader.batch(n).x[0].tolist()] for name, loader in tokens.items()
    }
    return {name: decoder.decode(i for i in ids if i != manifest.eos_id) for name, ids in rows.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_one_file_is_split_inside(
    tmp_path: Path, tokenizer: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = "\n\n".join(PARAGRAPHS)
    (tmp_path / "my.txt").write_text(whole)
    assert len(whole) < 65_536, "one document"
    options = {"tokenizer": tokenizer, "length": 32, "valid_fraction": 0.1, "seed": seed}
    made = prepare(str(tmp_path / "my.txt"), tmp_path / "out", **options)
    assert made is not None
    assert [split.documents for split in made.splits.values()] == [1, 1]
    assert "too few documents" in capsys.readouterr().err
    found = texts(tmp_path / "out")
    assert whole.startswith(found["train"])
    border = whole.index(found["valid"])
    assert whole[border - 2 : border] == "\n\n"
    assert len(found["train"]) <= border
    assert 0.1 <= 1 - border / len(whole) < 0.12
    assert prepare(str(tmp_path / "my.txt"), tmp_path / "out", **options) == made
    prepare(f"text:{tmp_path}/my.txt", tmp_path / "again", **options)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()


def test_the_tokenizer_is_not_trained_on_the_tail(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("\n".join(PARAGRAPHS) + "\n" + "zqzqzq " * 100)
    made = prepare(str(tmp_path / "my.txt"), tmp_path / "out", tokenizer="bpe:400", length=32)
    assert made is not None
    assert not any("zq" in token for token in made.load_tokenizer().core.get_vocab())


@pytest.mark.parametrize("packing", ["pad", "single"])
def test_documents_are_held_out_whole_where_a_sequence_is_a_document(tmp_path: Path, packing: str) -> None:
    (tmp_path / "my.txt").write_text("one\ntwo\nthree\n")
    options = {"packing": packing, "lines": True, "valid_fraction": 0.01}
    made = prepare(str(tmp_path / "my.txt"), tmp_path / "out", tokenizer="bytes", length=8, **options)
    assert made is not None
    assert texts(tmp_path / "out") == {"train": "onetwo", "valid": "three"}


def test_an_interrupted_split_inside_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.txt").write_text("\n\n".join(PARAGRAPHS))
    options = {"tokenizer": "bpe:400", "length": 32}
    prepare(str(tmp_path / "my.txt"), tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda *_: pytest.fail("stop"))
        with pytest.raises(pytest.fail.Exception):
            prepare(str(tmp_path / "my.txt"), tmp_path / "out", **options)
    monkeypatch.setattr(shards, "encode", lambda *_: pytest.fail("encoded again"))
    prepare(str(tmp_path / "my.txt"), tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_given_split_is_never_replaced(source: str, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("short")
    for options in ({"valid": str(tmp_path / "v.txt")}, {"holdout": 1}):
        with pytest.raises(ValueError, match=r"valid split .* 256"):
            prepare(source, tmp_path / "out", tokenizer="bytes", **options)


NO_FCNTL = """
import sys
sys.modules["fcntl"] = None
import esolm, esolm.data, esolm.model
manifest = esolm.data.prepare(sys.argv[1], sys.argv[2], tokenizer="bytes", length=32)
assert manifest.splits["valid"].sequences
assert esolm.load
"""


def test_a_system_without_fcntl(source: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_FCNTL, source, str(tmp_path / "out")]
    subprocess.run(command, check=True)
    prepare(source, tmp_path / "again", tokenizer="bytes", length=32)
    assert Manifest.load(tmp_path / "out").fingerprint == Manifest.load(tmp_path / "again").fingerprint


def test_too_little_text_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match=r"a\.txt.* 64 .*--length"):
        prepare(f"text:{tmp_path}/a.txt", tmp_path / "out", tokenizer="bytes", length=64)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout": 3, "valid": "pydocs"}, "holdout is 3.*--valid pydocs"),
        ({"holdout": 0}, "holdout is 0"),
        ({"seed": 1, "valid": "pydocs"}, "seed.*--valid pydocs"),
        ({"valid_fraction": 0.5, "holdout": 3}, "valid_fraction.*the last 3 documents"),
        ({"target_length": 8}, "target_length.*--packing conditional"),
        ({"packing": "pad", "separator": " "}, "separator.*--packing conditional"),
    ],
)
def test_options_without_effect_raise(source: str, tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "out", tokenizer="bytes", length=16, **options)
    assert not (tmp_path / "out").exists()


def test_a_large_vocabulary_uses_wider_ids() -> None:
    assert [id_type(size).itemsize for size in (258, 65536, 65537)] == [2, 2, 4]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("file", "damage", "verify", "message"),
    [
        ("train-00000.bin", Path.unlink, False, "train-00000.bin is missing"),
        ("train-00000.bin", _cut, False, "train-00000.bin has .* bytes"),
        ("valid-00000.bin", _flip, True, "valid-00000.bin is damaged"),
        ("train-00000.count", _cut, False, "train-00000.count has"),
        ("train-00000.count", _flip, True, "train-00000.count is damaged"),
        ("manifest.json", Path.unlink, False, "manifest.json is missing"),
        ("manifest.json", _cut, False, "manifest.json is damaged"),
        ("manifest.json", lambda p: p.write_text('{"a": 1}'), False, "manifest.json is damaged"),
        ("manifest.json", lambda p: p.write_text("[]"), False, "manifest.json is damaged"),
        (
            "manifest.json",
            lambda p: p.write_text(p.read_text().replace('"format": 1', '"format": 9')),
            False,
            "format 9",
        ),
        (
            "manifest.json",
            lambda p: p.write_text(p.read_text().replace('"seed": 0', '"seed": 1')),
            False,
            "fingerprint",
        ),
        ("tokenizer.json", Path.unlink, False, "tokenizer.json is missing"),
        ("tokenizer.json", lambda p: tokenizer("bytes").core.save(str(p)), False, "tokenizer.json"),
    ],
)
def test_damage_is_detected(
    source: str, tmp_path: Path, file: str, damage: Callable[[Path], object], verify: bool, message: str
) -> None:
    prepare(source, tmp_path / "out", tokenizer="bpe:270", length=32, packing="pad")
    Manifest.load(tmp_path / "out", verify=True)
    damage(tmp_path / "out" / file)
    with pytest.raises(ValueError, match=message):
        Manifest.load(tmp_path / "out", verify)


def test_a_folder_can_be_moved(source: str, tmp_path: Path) -> None:
    manifest = prepare(source, tmp_path / "out", tokenizer="bytes", length=32)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    assert Manifest.load(tmp_path / "moved", verify=True).fingerprint == manifest.fingerprint
    assert Loader(tmp_path / "moved").batch(0).x.shape == (32, 32)
