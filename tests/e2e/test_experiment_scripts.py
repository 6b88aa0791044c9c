"""The experiments that are run by hand, at tiny sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from esolm.data import prepare

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """Import a script of an experiment."""
    path = ROOT / "experiments" / name
    spec = importlib.util.spec_from_file_location(f"script_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_estimators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, orders in (("plain", 1000), ("antithetic", 128)):
        files.append(str(tmp_path / name))
        save_file({"0": torch.randn(3, orders, dtype=torch.float64) - 50}, files[-1])
    script("estimators/measure.py").main(16, *files)
    found = json.loads(capsys.readouterr().out)
    bounds = list(found["bound"].values())
    assert bounds[0] > bounds[-1]
    assert [row["orders"] for row in found["estimators"]] == [4] * 3 + [16] * 3 + [64] * 3


def test_given_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("given_order/measure.py")
    monkeypatch.setattr(module, "SEQUENCES", 2)
    monkeypatch.setattr(module, "ORDERS", 1)
    (tmp_path / "text.txt").write_text("The old man opened the door of the house and looked out. " * 40)
    found = module.main(str(tmp_path / "text.txt"), ["stories"])
    assert [row["context"] for row in found] == ["the first half", "a random half"]
    assert all(row["random"] > 0 for row in found)


def test_gpt2(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("The old man opened the door of the house and looked out. " * 40)
    prepare(str(tmp_path / "text.txt"), tmp_path / "data", tokenizer="bytes", length=32)
    found = script("gpt2/measure.py").main(str(tmp_path / "data"), steps=2, batch_size=2, layers=1, width=64)
    assert found["models"].keys() == {"esolm ar", "transformers GPT-2"}
    assert 0.5 < found["ratio"] < 2


def test_scitldr(tmp_path: Path) -> None:
    module, path = script("scitldr/run.py"), tmp_path / "docs.jsonl"
    docs = [{"source": ["We ask a question.", f"We find {n}."], "target": [f"We find {n}."]} for n in ("one", "two")]
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    found = module.score("stories", str(path), room=16, number=2, draws=1, steps=[2])
    assert found["summaries"] == 2
    assert found["nats"].keys() == {"own abstract", "another abstract"}
    assert found["rouge"]["T = 2"]["passes"] > 0
