"""Links of the documents: they work in the files as they are, and are rewritten for the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Pages of the site that stand for documents of the repository's root."""
PIECE = re.compile(
    r"^ *(?P<fence>```|~~~).*?^ *(?P=fence) *$"  # a block of code
    r"|(?P<image>!?)\[(?P<label>(?:`[^`]*`|[^\[\]`])*)\]\((?P<address>[^()\s]+)\)"
    r"|(?P<ticks>`+).+?(?P=ticks)",  # code in a line
    re.MULTILINE | re.DOTALL,
)


def rewrite(markdown: str, source: str, repository: str | None = None) -> str:
    """The document with links that work on the site; code is left alone.

    source: its path from the root. A link to a file that is not on the site leads to the repository, if that has an
    address; otherwise only its text stays.
    """
    page = OUTSIDE.get(source) or posixpath.relpath(source, "docs")

    def one(found: re.Match[str]) -> str:
        image, label, address = found["image"], found["label"], found["address"]
        if address is None or re.match(r"#|mailto:|\w+://", address):
            return found[0]
        file, mark, anchor = address.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        inside = OUTSIDE.get(target) or (posixpath.relpath(target, "docs") if target.startswith("docs/") else None)
        if inside is None:
            if repository is None:
                return label
            return f"{image}[{label}]({repository.rstrip('/')}/blob/main/{target}{mark}{anchor})"
        if target == "README.md":
            mark = anchor = ""  # its headings are not those of the home page
        if (ROOT / "docs" / inside).is_dir():
            inside += "/README.md"
        return f"{image}[{label}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return PIECE.sub(one, markdown)
