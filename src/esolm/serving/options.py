"""The options of the engine and of the API. Imports nothing heavy, so that `esolm serve --help` answers at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNSERVED = ("cache", "refresh", "freeze")
"""Sampling options that the engine does not offer: approximate caches overwrite slots, which its KV pool cannot."""


@dataclass(frozen=True)
class EngineOptions:
    """Limits of the engine."""

    max_batch: int = 32
    """Rows that run at the same time."""
    max_queue: int = 256
    """Samples that may wait; more are refused."""
    max_length: int | None = None
    """Longest sample in tokens, the prompt included; null is the training length."""
    kv_memory: int | None = None
    """Bytes of the KV pool, which may reduce max_batch; null allows max_batch rows."""
    chunk: int = 64
    """Slots of a prompt that a pass feeds beside other rows."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_length", "kv_memory", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class ServerOptions:
    """Limits of the API."""

    api_key: str | None = None
    """Clients must send it as `Authorization: Bearer KEY`; null is the variable ESOLM_API_KEY.
    Without either, everyone is let in."""
    name: str | None = None
    """The model's name for clients; null is the variable ESOLM_NAME, or the name of its folder."""
    max_n: int = 16
    """Most samples of one request, over all its prompts."""
    max_body: int = 1_000_000
    """Most bytes of a request."""
    timeout: float = 300.0
    """Seconds after which a request is ended."""
    max_score: int = 2048
    """Most texts times orders of one request to score."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():  # as from "$KEY" where KEY is not set
            raise ValueError("the API key is empty: give --api_key KEY or set ESOLM_API_KEY, or leave both out")
        for name in ("max_n", "max_body", "timeout", "max_score"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


def key_and_name(options: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The options api_key and name: as given, else from the environment, else the name of the model's folder."""
    key = options["api_key"]
    return {
        "api_key": os.environ.get("ESOLM_API_KEY") if key is None else key,
        "name": options["name"] or os.environ.get("ESOLM_NAME") or Path(model).resolve().name,
    }
