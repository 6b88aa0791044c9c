"""Settings of all tests: one thread each (xdist runs them in parallel), and the same Hypothesis examples every time."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from esolm.runtime import machine

settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


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
