"""Files are complete or absent, follow the umask, and say what is wrong with them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esolm import load
from esolm.runtime import files
from esolm.storage import checkpoint, folder
from support import toy

UMASKS = [0o022, 0o077, 0o002]


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_or_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    files.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError):
        files.write_json(path, {"a": float("nan")})
    with pytest.raises(IsADirectoryError), files.replacing(path) as partial:
        (partial.write_text("half"), tmp_path.write_text("not a file"))
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(path.parent) == ["a.json"]
    files.write(path, "é")
    assert path.read_bytes() == "é".encode()


def test_a_folder_is_replaced_or_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    with pytest.raises(IsADirectoryError), files.new_folder(path) as partial:
        ((partial / "half").touch(), tmp_path.write_text("not a file"))
    assert not os.listdir(tmp_path)
    for name in ("one", "two"):
        with files.new_folder(path) as partial:
            (partial / name).touch()
        assert os.listdir(path) == [name]
    assert os.listdir(path.parent) == ["folder"]


def test_what_cannot_be_written_has_the_name_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so a refusal is that of a patched function."""
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path)

    def new(path: Path) -> None:
        with files.new_folder(path):
            pass

    for make in (new, lambda path: files.write(path, "a"), lambda path: files.save_tensors(path, {})):
        for place in ("file/x", "file/a/x"):
            with pytest.raises(OSError, match=f"^cannot write {place}: file is a file; ") as error:
                make(Path(place))
            assert ".partial" not in str(error.value)

        def refuse(self: Path, *args: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        with monkeypatch.context() as patch:
            for name in ("mkdir", "touch", "write_bytes"):
                patch.setattr(Path, name, refuse)
            with pytest.raises(PermissionError, match=f"^cannot write {tmp_path}/x: the folder {tmp_path} is not writ"):
                make(tmp_path / "x")
    with pytest.raises(OSError, match=f"^cannot write {tmp_path}: it is a folder"):
        files.write(tmp_path, "a")
    assert os.listdir(tmp_path) == ["file"]


def test_tensors_follow_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a.safetensors"
    for value in (0.0, 1.0):
        files.save_tensors(path, {"a": torch.full((2,), value)})
        assert mode(path) == 0o666 & ~umask
        assert load_file(path)["a"].tolist() == [value, value]


def test_exports_and_checkpoints_follow_the_umask(tmp_path: Path, umask: int) -> None:
    saved = checkpoint.save(tmp_path, 1, {"model": {"a": torch.ones(2)}}, {"metric": None}, 1)
    model = load("stories")
    with folder.new(tmp_path / "out") as partial:
        folder.write(partial, toy.network(258), toy.make("mdlm", 256), model.tokenizer)
    written = [*saved.iterdir(), *(tmp_path / "out").iterdir()]
    assert {path.suffix for path in written} == {".safetensors", ".json"}
    assert {mode(path) for path in written} == {0o666 & ~umask}


def test_an_unreadable_file_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is that of a patched open."""
    out, original = tmp_path / "out", Path.open
    model = load("stories")
    with folder.new(out) as partial:
        folder.write(partial, model.net, model.system, model.tokenizer)
    saved = checkpoint.save(tmp_path, 1, {"model": {"a": torch.ones(2)}}, {"metric": None}, 1)
    for name in ("config.json", "model.safetensors", "state.json"):

        def refuse(self: Path, *args: object, name: str = name, **options: object) -> object:
            if self.name == name:
                raise PermissionError(13, "Permission denied", str(self))
            return original(self, *args, **options)  # type: ignore[call-overload]

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(ValueError, match=rf"{name}.*Permission denied") as error:
            checkpoint.read(saved) if name == "state.json" else load(out)
        assert "damaged" not in str(error.value)
        assert "again" not in str(error.value)
        monkeypatch.undo()
    (out / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(out)
    (out / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load(out)


def test_json_lines_end_at_newlines_only(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.jsonl", ["one\u2028two\u0085", "b"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\ufeff" + lines[0] + "\r\n\n" + lines[1], encoding="utf-8", newline="")
    assert list(files.read_json_lines(path)) == [(1, {"text": texts[0]}), (3, {"text": texts[1]})]


@pytest.mark.parametrize("line", [b"{", b"[1]", b'"a"', b'{"a": "\xff"}'])
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match="line 2 of"):
        list(files.read_json_lines(path))
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        list(files.read_json_lines(tmp_path / "none.jsonl"))


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert files.sha256(tmp_path / "a").startswith("ba7816bf8f01cfea")
