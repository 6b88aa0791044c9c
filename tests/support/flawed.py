"""Rewards that go wrong, for the tests of the pool; each looks at a text for what to do."""

from __future__ import annotations

import os
import time
from typing import Any


def flawed(texts: list[str], rows: list[dict[str, Any]], *, bonus: float = 0.0) -> list[Any]:
    found: list[Any] = []
    for text, row in zip(texts, rows, strict=True):
        if "raise" in text:
            raise RuntimeError("wrong")
        if "hang" in text:
            time.sleep(600)
        if "die" in text:
            os._exit(7)
        number = len(text) + row.get("more", 0.0) + bonus
        values: dict[str, Any] = {"nan": float("nan"), "word": "ten", "part": {"size": 1.0}}
        found.append(values.get(text, {"reward": number, "size": len(text)}))
    return found


class Hanging:
    def __init__(self) -> None:
        time.sleep(600)


def short(texts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [1.0]


def even(texts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """The share of characters with an even number."""
    return [sum(ord(letter) % 2 == 0 for letter in text) / max(len(text), 1) for text in texts]


def half(texts: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Fails for one of two prompts, in three ways."""
    if rows[0]["prompt"] == "b" and len(texts) == 1 and len(texts[0]) % 2:
        raise RuntimeError("odd")
    return [float("nan") if row["prompt"] == "b" else float(len(text)) for text, row in zip(texts, rows, strict=True)]
