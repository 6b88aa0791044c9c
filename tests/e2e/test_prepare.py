"""The command `esolm prepare`, also killed while it runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from esolm import cli
from esolm.data import Loader, Manifest

KILLED = """
import os, signal, sys, threading
from pathlib import Path
from esolm.data import prepare, shards
import esolm.data.prepare
save, calls, one_at_a_time = shards.save_chunk, [0], threading.Lock()
def kill_at_the_fifth(path, chunk):
    with one_at_a_time:
        if calls[0] == 4:
            path.with_suffix(".part").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        calls[0] += 1
        save(path, chunk)
shards.save_chunk = kill_at_the_fifth
sys.modules["esolm.data.prepare"]._CHUNK = 20_000
prepare(sys.argv[1], sys.argv[2], tokenizer="bpe:300", length=64, workers=2)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "t.txt"
    source.write_text("".join(f"Line {i} of {i * i % 97} lines, more or less.\n\n" for i in range(8000)))
    out = subprocess.run([sys.executable, "-c", KILLED, f"text:{source}", str(tmp_path / "out")], check=False)
    assert out.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / ".out.partial").glob("*.npz")}
    assert len(kept) == 4
    monkeypatch.setattr(sys.modules["esolm.data.prepare"], "_CHUNK", 20_000)
    arguments = ["--tokenizer", "bpe:300", "--length", "64"]
    assert cli.main(["prepare", f"text:{source}", str(tmp_path / "out"), *arguments]) == 0
    assert cli.main(["prepare", f"text:{source}", str(tmp_path / "whole"), *arguments]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


def test_pydocs_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise AssertionError("went to the network")

    monkeypatch.setattr("socket.socket", offline)
    assert cli.main(["prepare", "pydocs", str(tmp_path / "out"), "--tokenizer", "bpe:1024", "--length", "128"]) == 0
    manifest = Manifest.load(tmp_path / "out", verify=True)
    assert manifest.corpus.startswith("pydocs-3.")
    assert manifest.vocab_size == 1025
    assert sum(split.bytes for split in manifest.splits.values()) > 1_000_000
    assert manifest.splits["valid"].sequences > 20
    assert Loader(tmp_path / "out", "valid", 4).batch(0).x.shape == (4, 128)


def test_one_file_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("".join(f"Line {i} of {i * i % 97} lines, more or less.\n" for i in range(800)))
    Path("folder").mkdir()
    Path("folder/my.txt").write_bytes(Path("my.txt").read_bytes())
    for source in ("my.txt", "folder"):
        assert cli.main(["prepare", source, f"data/{source}", "--tokenizer", "bpe:300", "--length", "64"]) == 0
        loader = Loader(f"data/{source}", "valid", 1)
        assert loader.sequences > 1
    capsys.readouterr()
    Path("latin.txt").write_bytes(b"caf\xe9 " * 1000)
    Path("empty.txt").touch()
    for source, word in (("latin.txt", "UTF-8"), ("empty.txt", "empty")):
        assert cli.main(["prepare", source, "data/none"]) != 0
        error = capsys.readouterr().err
        assert source in error
        assert word in error
