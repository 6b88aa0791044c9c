"""A corpus encoded in parts at the same time, and joined, is what one process makes of it."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from esolm import cli
from esolm.data import prepare, shards

MODULE = sys.modules["esolm.data.prepare"]  # the package's own name for it is the function


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(MODULE, "_CHUNK", 500)
    lines = [json.dumps({"text": f"Sentence {i} of a small corpus, {i * i}."}) for i in range(300)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    return f"text:{tmp_path}/d.jsonl"


@pytest.mark.parametrize("options", [{}, {"packing": "pad"}, {"holdout": 20}])
def test_parts_at_the_same_time_equal_one_process(source, tmp_path, monkeypatch, options):
    same = {"tokenizer": "bytes", "length": 32, **options}
    whole = prepare(source, tmp_path / "whole", **same)
    with ThreadPoolExecutor(3) as pool:
        parts = [pool.submit(prepare, source, tmp_path / "out", part=f"{k}/3", **same) for k in (1, 2, 3)]
        assert [part.result() for part in parts] == [None] * 3
    assert not (tmp_path / "out").exists()

    def never(*_):
        raise AssertionError("a chunk was not encoded by its part")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "encode", never)
        joined = prepare(source, tmp_path / "out", **same)
    assert joined.fingerprint == whole.fingerprint
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert one == other
    assert not (tmp_path / ".out.partial").exists()


def test_each_part_encodes_its_own_and_a_missing_one_is_made_up(source, tmp_path):
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
        ({"part": "4/3"}, "must be K/N"),
        ({"part": "x"}, "must be K/N"),
        ({"part": "1/2", "tokenizer": "bpe:300"}, "path"),
    ],
)
def test_what_cannot_be_done_in_parts_is_refused(source, tmp_path, options, word):
    with pytest.raises(ValueError, match=word):
        prepare(source, tmp_path / "out", length=32, **{"tokenizer": "bytes", **options})


def test_a_part_does_not_run_beside_the_join(source, tmp_path, monkeypatch):
    same = {"tokenizer": "bytes", "length": 32}
    prepare(source, tmp_path / "out", part="1/2", **same)
    request = json.loads((tmp_path / ".out.partial" / "request.json").read_text())
    with MODULE._working(tmp_path / "out", request):
        enter = MODULE._enter
        monkeypatch.setattr(MODULE, "_enter", lambda *args: enter(*args, seconds=0.1))
        with pytest.raises(ValueError, match="another process is preparing"):
            prepare(source, tmp_path / "out", part="2/2", **same)
