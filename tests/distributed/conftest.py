"""Two and four connected processes for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import tiny
from support.crew import Crew


@pytest.fixture(scope="session")
def two(tmp_path_factory) -> Iterator[Crew]:
    crew = Crew(2, tmp_path_factory.mktemp("two"))
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def four(tmp_path_factory) -> Iterator[Crew]:
    crew = Crew(4, tmp_path_factory.mktemp("four"))
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("corpus") / "data")
