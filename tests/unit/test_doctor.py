"""`esolm doctor`: what it reports, and that nothing on the machine can make it fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from esolm import cli
from esolm.cli import doctor, extras
from support.building import PROJECT

NOT_FUNCTIONS = {"test", "docs", "all"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No imports of large packages and no measurement of a second."""
    monkeypatch.setattr(extras, "EXTRAS", {"zstd": extras.EXTRAS["zstd"]})
    monkeypatch.setattr(doctor, "SECONDS", 0.0)


def package(folder: Path, name: str, code: str) -> str:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    return name


def test_the_report(capsys, quick):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["python"]["version"] == sys.version.split()[0]
    assert found["device"]["chosen"] in ("cpu", "cuda", "mps")
    assert found["precision"]["chosen"] in ("float32", "bf16")
    assert found["precision"]["reason"]
    assert 1 <= found["threads"]["allowed"] <= found["threads"]["cores"]
    assert found["native"]["self_test"] in ("passed", "failed", "not run")
    assert found["memory"]["read_bytes_per_second"] > 0
    assert 0 < found["disk"]["free"] <= found["disk"]["total"]
    assert found["extras"]["zstd"]["state"] in ("installed", "missing")
    assert found["advice"]
    assert "error" not in str({name: found[name] for name in ("torch", "device", "precision", "threads", "memory")})
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}" in printed for name in ("torch", "precision", "native", "memory", "extras", "advice"))


def test_extras_are_those_of_the_package():
    declared = PROJECT["optional-dependencies"]
    assert set(extras.EXTRAS) == set(declared) - NOT_FUNCTIONS
    for name, extra in extras.EXTRAS.items():
        packages = [line.partition(">")[0].partition("[")[0].replace("-", "_") for line in declared[name]]
        assert sorted(packages) == sorted(extra.modules), name


def test_the_supported_versions_of_torch_are_those_of_the_package():
    (line,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    low, high = (".".join(map(str, each)) for each in doctor.TORCH)
    assert line == f"torch>={low},<{high}"
    assert doctor.release("2.13.0+cpu") == (2, 13)


def test_extras_that_raise_exit_or_kill_are_reported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    names = [
        package(tmp_path, "raises_here", "raise RuntimeError('no\\nlicence')"),
        package(tmp_path, "prints_here", "print('hello')"),
        package(tmp_path, "exits_here", "raise SystemExit(3)"),
        package(tmp_path, "dies_here", "import os; os._exit(7)"),
        package(tmp_path, "kills_here", "import os; os.kill(os.getpid(), 11)"),
        package(tmp_path, "works_here", ""),
    ]
    found = extras.import_errors(names)
    assert found["raises_here"] == "RuntimeError: no licence"
    assert found["exits_here"] == "SystemExit: 3"
    assert "7" in found["dies_here"]
    assert "-11" in found["kills_here"]
    assert found["works_here"] is found["prints_here"] is None
    slow = package(tmp_path, "sleeps_here", "import time; time.sleep(600)")
    assert "2 s" in extras.import_errors([slow], patience=2.0)[slow]


def test_states_of_extras(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    bad, good = package(tmp_path, "bad_here", "import no_such_module"), package(tmp_path, "good_here", "")
    made = {"a": (good,), "b": (bad, good), "c": (good, "nowhere_here")}
    monkeypatch.setattr(extras, "EXTRAS", {key: extras.Extra("x", names) for key, names in made.items()})
    found = extras.check_extras()
    assert {key: each["state"] for key, each in found.items()} == {"a": "installed", "b": "broken", "c": "missing"}
    assert "no_such_module" in found["b"]["errors"][bad]
    told = doctor.extras_advice(found)
    assert any(bad in line and "no_such_module" in line for line in told)
    assert any("esolm[c]" in line for line in told)


def test_a_part_that_fails_is_reported(capsys, quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # its import now raises ImportError
    monkeypatch.setattr(doctor, "check_extras", lambda: 1 / 0)
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "ImportError" in found["torch"]["error"] or "ModuleNotFoundError" in found["torch"]["error"]
    assert "ZeroDivisionError" in found["extras"]["error"]
    assert "PyTorch" in found["advice"][0]
    assert cli.main(["doctor"]) == 0


def test_advice_for_little_memory_and_a_full_disk(quick):
    found = doctor.examine()
    found["memory"]["free"], found["disk"]["free"], found["disk"]["writable"] = 10**8, 10**8, False
    found["threads"] |= {"torch": 64, "allowed": 2}
    found["native"] = {"instructions": None, "self_test": "failed", "reason": "it is damaged"}
    found["torch"]["version"] = "1.13.1"
    told = "\n".join(doctor.advice(found))
    assert all(part in told for part in ("memory", "disk", "OMP_NUM_THREADS=2", "damaged", "1.13.1", "written"))
