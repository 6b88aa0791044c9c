"""What is released: the distributions that `python -m build` makes, their metadata, and the wheel installed alone."""

from __future__ import annotations

import email
import json
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import esolm
from esolm.cli.extras import EXTRAS
from support.building import NO_COMPILER, PROJECT, ROOT, copied, environment_with, install, run

SOURCES = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
DATA = {
    path.relative_to(ROOT / "src").as_posix()
    for pattern in ("presets/*.yaml", "models/*/*", "serving/page/*", "py.typed")
    for path in (ROOT / "src" / "esolm").glob(pattern)
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it, without a compiler."""
    pytest.importorskip("build")
    folder = copied(tmp_path_factory.mktemp("release"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder, **NO_COMPILER)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(file.read(name))


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    assert wheel.name == f"esolm-{esolm.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert DATA
    assert names == SOURCES | DATA  # no tests, no experiments, no C++


def test_the_source_distribution_has_what_a_build_needs(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src/esolm/net/native/native.cpp"} <= names
    assert {f"src/{name}" for name in SOURCES | DATA} <= names
    assert not any(name.startswith(("tests/e2e", "experiments/", "docs/")) for name in names)


def test_twine_accepts_the_distributions(built):
    pytest.importorskip("twine")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())


def test_the_metadata(wheel):
    found = metadata(wheel)
    assert found["Version"] == esolm.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert set(found.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


def test_the_extra_all_has_every_extra_that_adds_a_function():
    (line,) = PROJECT["optional-dependencies"]["all"]
    names = re.fullmatch(r"esolm\[([a-z,]+)\]", line)[1].split(",")
    assert sorted(names) == sorted(EXTRAS)


def test_the_changelog_begins_with_this_version():
    """In the form of keepachangelog.com: what is not released yet, then versions with their dates, newest first."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert len(versions) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert versions[0] == ("Unreleased", "")
    assert versions[1][0] == esolm.__version__
    assert all(date for _, date in versions[1:])
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], str(cited["date-released"])) == versions[1]


@pytest.mark.slow
def test_the_wheel_works_with_the_core_dependencies_alone(wheel, tmp_path):
    python = environment_with(tmp_path / "environment", PROJECT["dependencies"])
    install(python, wheel)
    shutil.copy(ROOT / "tests" / "minimal_imports.py", tmp_path)
    where = run(python, "-I", "-c", "import esolm; print(esolm.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path)
    assert "without extras" in run(python, "-I", tmp_path / "minimal_imports.py")
    command = python.with_name("esolm")
    assert run(command, "--version").strip() == esolm.__version__
    made = json.loads(run(command, "sample", "stories", "--length", "16", "--seed", "0", "--json", OMP_NUM_THREADS="1"))
    assert len(made["texts"]) == 1
    found = json.loads(run(command, "doctor", "--json"))
    assert {extra["state"] for extra in found["extras"].values()} == {"missing"}
    assert "error" not in found["torch"]


def test_the_release_workflow_is_complete():
    """It cannot be run here: its jobs exist, and its commands are those that the tests above run."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(jobs)
    commands = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    steps = ("-m build --sdist", "-m build --wheel", "twine check", "minimal_imports.py", "esolm sample stories")
    assert all(part in commands for part in steps)
    assert workflow[True]["push"]["tags"] == ["v*"]  # YAML reads `on` as true
    assert jobs["publish"]["needs"] == "install"
