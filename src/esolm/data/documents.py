"""Documents, and how a JSON record or a file is turned into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class TooLittleText(ValueError):
    """A split has too little text for the tokenizer or for one sequence."""


class Document(NamedTuple):
    """A text and, for conditional data, its prompt."""

    text: str
    prompt: str | None = None


DocumentStream = Callable[[], Iterator[Document]]  # can be started any number of times
SplitStream = Callable[[], Iterator[tuple[str, Document]]]  # the same, as ("train" or "valid", document)


@dataclass(frozen=True)
class Reading:
    """How a record or a file becomes documents."""

    field: str = "text"
    prompt_field: str | None = None  # set for conditional data, whose text is in target_field
    target_field: str = "target"
    lines: bool = False  # each line of a text file is a document

    def record(self, record: Any, where: str) -> Iterator[Document]:
        """Yield the documents of one JSON record: a list of sentences is joined, a list of targets gives one each."""
        if self.prompt_field is None:
            yield Document(_joined(_value(record, self.field, where)))
            return
        prompt = _joined(_value(record, self.prompt_field, where))
        targets = _value(record, self.target_field, where)
        for target in [targets] if isinstance(targets, str) else targets:
            yield Document(target, prompt)


def _value(record: Any, field: str, where: str) -> str | list[str]:
    value = record.get(field) if isinstance(record, dict) else None
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return value
    fields = ", ".join(map(repr, record)) if isinstance(record, dict) else "none"
    raise ValueError(f"{where}: no text in field {field!r}; the record's fields are {fields}")


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)
