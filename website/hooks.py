"""Hooks of mkdocs: adds the pages that are generated or lie outside docs/, and rewrites links that leave docs/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # mkdocs imports this file by its path

from website import reference  # noqa: E402
from website.links import OUTSIDE, rewrite  # noqa: E402

API = "reference/python"


def on_config(config: Any) -> Any:
    """List a page for each package under the Python API."""
    pages = [f"{API}/index.md", *({name: f"{API}/{name}.md"} for name in reference.packages())]
    config.nav = _replaced(config.nav, f"{API}/", pages)
    return config


def _replaced(nav: Any, mark: str, pages: list[Any]) -> Any:
    """The navigation with these pages in place of the entry `mark`."""
    if isinstance(nav, list):
        return [_replaced(each, mark, pages) for each in nav]
    if isinstance(nav, dict):
        return {title: _replaced(each, mark, pages) for title, each in nav.items()}
    return pages if nav == mark else nav


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the documents of the repository's root."""
    pages = {
        "reference/command-line.md": reference.command_line(),
        "reference/configuration.md": reference.configuration(),
        f"{API}/index.md": reference.public_names(),
        **{f"{API}/{name}.md": reference.package(name) for name in reference.packages()},
    }
    for source in ("CONTRIBUTING.md", "CHANGELOG.md"):
        pages[OUTSIDE[source]] = rewrite((ROOT / source).read_text(), source, config.repo_url)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a document in docs/."""
    if page.file.generated_by is not None:
        return markdown
    return rewrite(markdown, f"docs/{page.file.src_uri}", config.repo_url)
