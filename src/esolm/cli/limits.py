"""Estimates of memory and time."""

from __future__ import annotations
from typing import Any


def check_sampling(lm: Any, job: Any, options: Any, quiet: bool) -> None: ...
