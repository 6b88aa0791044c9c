"""The documentation site is built without warnings and without the network, and shows what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import esolm
from esolm import cli

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags that make a browser load a file."""


class Page(HTMLParser):
    """The files that a page loads, its anchors, and the text of its paragraphs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.paragraphs: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids.add(found.get("id") or "")
        if tag in LOADED and not (tag == "link" and found.get("rel") in ("canonical", "prev", "next")):
            self.loads += filter(None, [found.get(LOADED[tag])])
        if tag == "p":
            self.inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.paragraphs[-1] += data


def check_files(folder: Path, path: Path, page: Page) -> None:
    """Everything that a page loads is part of the site."""
    for address in page.loads:
        if not address.startswith("data:"):
            assert not re.match(r"\w+:|//", address), f"{path} loads {address}"
            file = address.partition("?")[0].partition("#")[0]
            assert ((folder if file.startswith("/") else path.parent) / file.lstrip("/")).exists(), f"{path}: {address}"


@pytest.mark.timeout(1800)  # for a loaded machine
def test_the_site_is_built_offline_and_complete(tmp_path: Path) -> None:
    """One test, since the build takes half a minute of one core."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=f"needs {name}: pip install 'esolm[docs]'")
    unreachable = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = {**os.environ, **unreachable, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.relative_to(tmp_path).as_posix(): Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    for name, page in pages.items():
        check_files(tmp_path, tmp_path / name, page)
        lists = [text for text in page.paragraphs if re.search(r"\n(- |\d+\. |\|)", text)]
        assert not lists, f"{name}: a list or a table without an empty line before it: {lists[0][:200]}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text()), sheet
    api = pages["reference/python/index.html"].ids
    assert {f"esolm.{name}" for name in esolm.__all__} <= api
    assert "esolm.LanguageModel.sample" in api
    assert "esolm.core.visibility.Visibility.dense" in pages["reference/python/core.html"].ids
    assert {f"esolm-{name}" for name in cli.COMMANDS} <= pages["reference/command-line.html"].ids
    assert {"write-a-system-in-forty-lines"} <= pages["contributing.html"].ids
