"""Chromium for the tests of the page, and a tiny model that writes words."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from esolm.data.tokenizer import tokenizer
from esolm.model import LanguageModel
from support import toy

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PROMPT, COUNT = "Once upon a time", 24
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


class Window:
    """A page, and what a reader does with it."""

    def __init__(self, page: Page, url: str) -> None:
        from playwright.sync_api import expect

        self.page, self.url, self.expect = page, url, expect
        expect.set_options(timeout=PATIENCE)
        page.goto("about:blank")  # another link to the same page would not load it again
        page.goto(url)
        self.expect(page.locator("#model")).to_contain_text("tokens")

    def __getitem__(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def set(self, **values: Any) -> None:
        """Set options as a reader does."""
        for name, value in values.items():
            control = self[f"#{name}"]
            if name in ("sampler", "other"):
                control.select_option(value)
            else:
                control.fill(str(value))

    def rest(self) -> None:
        """Wait until nothing runs."""
        self.expect(self["#halt"]).to_be_hidden()
        self.expect(self["#text"]).not_to_have_attribute("aria-busy", "true")

    def generate(self, source: str = PROMPT, **values: Any) -> str:
        """Generate a text with a seed; returns what is shown."""
        self.set(**{"seed": 7, "count": COUNT, "sampler": "", **values})
        self["#source"].fill(source)
        self["#go"].click()
        self.rest()
        return self.text()

    def text(self, box: str = "#text") -> str:
        return self[box].evaluate("box => box.textContent")

    def word(self, number: int) -> Locator:
        return self["#text .word"].nth(number)

    def tokens(self, number: int) -> range:
        """The positions of the tokens of a word."""
        first, last = (int(self.word(number).get_attribute(f"data-{name}") or "") for name in ("first", "last"))
        return range(first, last + 1)

    def click(self, number: int) -> None:
        self.word(number).click()
        self.rest()

    def drag(self, first: int, last: int) -> None:
        self.sweep(first, last)
        self.rest()

    def sweep(self, first: int, last: int) -> None:
        """Drag from a word to another, and do not wait."""
        for action, number in (("down", first), ("up", last)):
            box = self.word(number).bounding_box()
            assert box is not None
            self.page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
            getattr(self.page.mouse, action)()

    def tool(self, name: str) -> None:
        self[f"input[value={name}]"].check()

    def error(self) -> str:
        """The error that is shown: a sentence."""
        self.expect(self["#error"]).to_be_visible()
        found = self["#error"].inner_text()
        assert re.fullmatch(r"[A-Z0-9].*[.!?]", found, re.DOTALL)
        return found


CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = (each) => {
    for (; each; each = each.parentElement) {
      const found = parse(getComputedStyle(each).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const worst = {};
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility({ opacityProperty: true })) continue;
    const pair = [luminance(parse(getComputedStyle(parent).color)), luminance(behind(parent))].sort((a, b) => b - a);
    const name = parent.id || parent.className || parent.tagName;
    worst[name] = Math.min(worst[name] ?? 21, (pair[0] + 0.05) / (pair[1] + 0.05));
  }
  return worst;
}"""
"""The lowest contrast of visible text with what is behind it, by element."""
