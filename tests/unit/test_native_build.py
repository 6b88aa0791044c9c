"""The native library builds with a C++ compiler, installs without one, and touches no memory that is not its own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from esolm.net.native import library
from support.building import NO_COMPILER, copied

ROOT = Path(__file__).parents[2]
SOURCES = Path(library.__file__).parent
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


def compiled(path: Path, *flags: str) -> Path:
    command = [str(COMPILER), "-std=c++17", "-fPIC", "-shared", "-pthread", "-w", "-fno-strict-aliasing", *flags]
    subprocess.run([*command, "-o", str(path), str(SOURCES / "native.cpp")], check=True, timeout=500)
    return path


def built(folder: Path, what: str, **environment: str) -> Path:
    script = f"from setuptools import build_meta; print(build_meta.build_{what}('.'))"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return folder / found.stdout.splitlines()[-1]


def test_without_a_compiler_the_wheel_has_no_library(tmp_path: Path) -> None:
    wheel = built(copied(tmp_path), "wheel", **NO_COMPILER)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(".so" in name for name in zipfile.ZipFile(wheel).namelist())


def test_the_source_distribution_has_the_sources(tmp_path: Path) -> None:
    archive = built(copied(tmp_path), "sdist")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    names = {path.name for path in (tmp_path / "unpacked").rglob("*")}
    assert {path.name for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h", ".inc")} <= names


@pytest.mark.slow
@needs_compiler
def test_with_a_compiler_the_wheel_has_the_library(tmp_path: Path) -> None:
    wheel = built(copied(tmp_path), "wheel")
    assert "-py3-none-linux" in wheel.name
    zipfile.ZipFile(wheel).extract("esolm/net/native/libesolm_native.so.1", tmp_path)
    lib = library.declared(tmp_path / "esolm/net/native/libesolm_native.so.1")
    assert lib.esolm_version() == library.VERSION
    if lib.esolm_isa(-1):
        library.self_test(lib)


@pytest.mark.slow
@needs_compiler
def test_memory_and_undefined_behaviour(tmp_path: Path) -> None:
    """The tests of the kernels on a library built with AddressSanitizer and UndefinedBehaviorSanitizer."""
    runtimes = [
        subprocess.run([str(COMPILER), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("the compiler has no sanitizers")
    path = compiled(tmp_path / "libnative.so", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    (tmp_path / "sanitized.py").write_text(
        f"from pathlib import Path\nfrom esolm.net.native import library\nlibrary.PATH = Path({str(path)!r})\n"
    )
    tests = [str(ROOT / "tests/unit" / name) for name in ("test_native.py", "test_native_family.py")]
    parts = "random_sizes hostile lie family refused linear prompt no_rows finite share reading probabilities"
    some = " or ".join(parts.split())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT / "tests")]),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "sanitized",
        "-p",
        "no:faulthandler",
        *tests,
        "-k",
        some,
    ]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert found.returncode == 0, f"{shlex.join(command)}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
