"""Settings of all tests: one thread each (xdist runs them in parallel), and the same Hypothesis examples every time."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

from esolm.runtime import machine

settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.matrix(n)` keeps every n-th case of a test in `make test`, and the others for `make test-full`.

    With n that shares no divisor with the numbers of values, every value of every parameter is kept in some case.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("matrix")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


@pytest.fixture(autouse=True, scope="session")
def machine_precision() -> str:
    """The precision that `auto` selects on this machine, determined before anything else runs; sets one thread."""
    torch.set_num_threads(1)
    return machine.pick_precision("auto", torch.device("cpu"))


@pytest.fixture(autouse=True, scope="session")
def _cache_of_patterns(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled patterns are kept for the session, and not in the user's folder."""
    os.environ["ESOLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def bf16(machine_precision: str) -> None:
    """For tests in bfloat16: skips them where it does not run, as on some virtual machines."""
    try:
        machine.pick_precision("bf16", torch.device("cpu"))
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
