"""Chromium for the tests of the page, and a tiny model that writes words."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from esolm.data.tokenizer import tokenizer
from esolm.model import LanguageModel
from support import toy

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 120_000
"""Milliseconds that a loaded machine may take for anything; no test waits this long if the page works."""
STORY = (
    "Once upon a time, there was a little girl named Lily. She had a big red ball and a small dog. The dog ran to the "
    "ball. Lily said, The ball is in the tree! Tom and Lily were happy, and they all went home."
)


def missing() -> str | None:
    """Why there is no browser, or None."""
    try:
        import playwright.sync_api
    except ImportError:
        return "needs playwright: pip install 'esolm[test]'"
    assert playwright.sync_api
    return None if _program() else f"needs a browser, one of {', '.join(NAMES)}: apt-get install chromium"


def _program() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright, with a new empty profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=_program(), args=FLAGS, timeout=PATIENCE)
        yield found
        found.close()


@functools.cache
def writer(system: str = "esolm", ends: bool = False) -> LanguageModel:
    """A random network in float64 that writes pieces of words; with `ends` also many end-of-sequence tokens."""
    text = tokenizer("bpe:340", [STORY])
    net = toy.network(text.vocab_size, 64, torch.float64)
    rare = [i for piece, i in text.core.get_vocab().items() if len(piece) == 1 and piece not in ".,!"]
    with torch.no_grad():
        net.head.bias[rare] -= 60.0  # single bytes are not words
        net.head.bias[text.eos_id] += 12.0 if ends else -60.0
    return LanguageModel(net, toy.make(system, text.mask_id, **({"alpha_0": 0.5} if system == "esolm" else {})), text)
