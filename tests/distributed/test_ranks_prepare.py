"""A corpus encoded in parallel parts and joined equals the result of one process."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from esolm import cli
from esolm.data import prepare, shards, workspace

MODULE = sys.modules["esolm.data.prepare"]  # the package's own name for it is the function


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(MODULE, "_CHUNK", 500)
    lines = [json.dumps({"text": f"Sentence {i} of a small corpus, {i * i}."}) for i in range(300)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    return f"text:{tmp_path}/d.jsonl"


@pytest.mark.parametrize("options", [{}, {"packing": "pad"}, {"holdout": 20}])
def test_parallel_parts_equal_one_process(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    same = {"tokenizer": "bytes", "length": 32, **options}
    whole = prepare(source, tmp_path / "whole", **same)
    with ThreadPoolExecutor(3) as pool:
        parts = [pool.submit(prepare, source, tmp_path / "out", part=f"{k}/3", **same) for k in (1, 2, 3)]
        assert [part.result() for part in parts] == [None] * 3
    assert not (tmp_path / "out").exists()

    def never(*_: object) -> None:
        raise AssertionError("a chunk was not encoded by its part")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "encode", never)
        joined = prepare(source, tmp_path / "out", **same)
    assert joined.fingerprint == whole.fingerprint
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert one == other
    assert not (tmp_path / ".out.partial").exists()


def test_each_part_encodes_its_own_chunks_and_the_join_the_missing(source: str, tmp_path: Path) -> None:
    whole = prepare(source, tmp_path / "whole", tokenizer="bytes", length=32)
    command = ["prepare", source, str(tmp_path / "out"), "--tokenizer=bytes", "--length=32"]
    counts = []
    for k in (1, 2):
        assert cli.main([*command, f"--part={k}/3"]) == 0
        counts.append(len(list((tmp_path / ".out.partial").glob("*.npz"))))
    assert 0 < counts[0] < counts[1]
    assert prepare(source, tmp_path / "out", tokenizer="bytes", length=32).fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"part": "4/3"}, "4/3.*K/N"),
        ({"part": "x"}, "x.*K/N"),
        ({"part": "1/2", "tokenizer": "bpe:300"}, "bpe:300.*--part"),
    ],
)
def test_bad_parts_raise(source: str, tmp_path: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        prepare(source, tmp_path / "out", length=32, **{"tokenizer": "bytes", **options})


def test_a_part_cannot_run_during_the_join(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"tokenizer": "bytes", "length": 32}
    prepare(source, tmp_path / "out", part="1/2", **same)
    request = json.loads((tmp_path / ".out.partial" / "request.json").read_text())
    monkeypatch.setattr(workspace, "_PATIENCE", 0.1)
    with workspace.working(tmp_path / "out", request), pytest.raises(ValueError, match="another process"):
        prepare(source, tmp_path / "out", part="2/2", **same)


def test_one_document_in_parts_is_split_inside_by_the_join(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("A line of a small text.\n" * 300)
    same = {"tokenizer": "bytes", "length": 32}
    whole = prepare(str(tmp_path / "my.txt"), tmp_path / "whole", **same)
    for k in (1, 2):
        assert prepare(str(tmp_path / "my.txt"), tmp_path / "out", part=f"{k}/2", **same) is None
    joined = prepare(str(tmp_path / "my.txt"), tmp_path / "out", **same)
    assert whole is not None
    assert joined is not None
    assert joined.fingerprint == whole.fingerprint
