"""An extension of griffe: shows what docstrings say about arguments as a list.

Our docstrings describe an argument in a sentence of its own, `name: what it is.`
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def with_arguments(text: str, names: set[str]) -> str:
    """The docstring in which sentences about these arguments are items of a list."""
    if not names or re.search(r"^(Args|Raises|Returns):$", text, re.MULTILINE):
        return text
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    start = re.compile(rf"(?:^|(?<=[.;] ))((?:{known})(?:(?:, | and )(?:{known}))*)(:| \[[^]]*\]:) ")
    parts = list[str]()
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split("\n"))
        pieces = start.split(line)
        if len(pieces) == 1 or re.search(r"^( |- |\d\. )", paragraph, re.MULTILINE):
            parts.append(paragraph)
            continue
        parts += filter(None, [pieces[0].strip()])
        items = zip(pieces[1::3], pieces[2::3], pieces[3::3])
        parts.append("\n".join(f"- `{name}`{mark} {what.strip()}" for name, mark, what in items))
    return "\n\n".join(parts)


class Arguments(griffe.Extension):
    """Applies `with_arguments` to every function."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the docstring of a function that was loaded."""
        if func.docstring is not None:
            names = {parameter.name.lstrip("*") for parameter in func.parameters} - {"self", "cls"}
            func.docstring.value = with_arguments(func.docstring.value, names)
