"""Documents, and how a JSON record or a file is turned into them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Message = dict[str, str]
"""A turn of a conversation: its `role` and its `content`."""
ROLES = ("system", "user", "assistant", "tool")
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # lines that separate documents in other people's files


class TooLittleText(ValueError):
    """A split has too little text for the tokenizer or for one sequence."""


class Document(NamedTuple):
    """A text and, for conditional data, its prompt; for chats an answer and the messages before it, as JSON."""

    text: str
    prompt: str | None = None
    group: str | None = None  # documents with the same group lie in the same split


DocumentStream = Callable[[], Iterator[Document]]  # can be started any number of times
SplitStream = Callable[[], Iterator[tuple[str, Document]]]  # the same, as ("train" or "valid", document)


@dataclass(frozen=True)
class Reading:
    """How a record or a file becomes documents."""

    field: str = "text"
    prompt_field: str | None = None  # set for conditional data, whose text is in target_field
    target_field: str = "target"
    lines: bool = False  # each line of a text file is a document
    messages_field: str | None = None  # set for chats, which are in this field or in those of prompt and target
    turns: Literal["last", "all"] = "last"  # the answers of a chat that are documents
    delimiter: str | None = None  # the line that separates the documents of a text file
    newlines: bool = False  # with lines: each document ends with its line break

    def record(self, record: Any, where: str) -> Iterator[Document]:
        """Yield the documents of one JSON record: a list of sentences is joined, a list of targets gives one each."""
        if self.prompt_field is None:
            yield Document(_joined(_value(record, self.field, where)))
            return
        if self.messages_field is not None and isinstance(record, dict) and self.messages_field in record:
            yield from self._chat(record[self.messages_field], where)
            return
        prompt = _joined(_value(record, self.prompt_field, where))
        if self.messages_field is not None:
            prompt = to_json([{"role": "user", "content": prompt}])
        targets = _value(record, self.target_field, where)
        for target in [targets] if isinstance(targets, str) else targets:
            yield Document(target, prompt)

    def _chat(self, messages: Any, where: str) -> Iterator[Document]:
        """Yield the last answer of a conversation, or all of them, each after the messages before it."""
        wrong = f"{where}: {self.messages_field!r} must be a list of messages, each with a role and a content"
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError(wrong)
        turns = [{key: message.get(key) for key in ("role", "content")} for message in messages]
        if bad := [turn for turn in turns if turn["role"] not in ROLES or not isinstance(turn["content"], str)]:
            raise ValueError(f"{wrong}, a text; roles are {', '.join(ROLES)}; found {bad[0]}")
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i > 0]
        if not answers:
            raise ValueError(f"{where}: no message of the role assistant after another message, so nothing to learn")
        asked = next((turn["content"] for turn in turns if turn["role"] == "user"), None)
        for i in answers if self.turns == "all" else answers[-1:]:
            yield Document(turns[i]["content"], to_json(turns[:i]), asked)


def ends(text: str) -> Iterator[str]:
    """The lines of a text that look like a forgotten delimiter."""
    if any(end in text for end in _ENDS):
        yield from (line.strip() for line in text.splitlines() if line.strip() in _ENDS)


def report_ends(found: Mapping[str, int], name: str, advice: str) -> None:
    """Say on standard error how often `ends` found each line; advice: the words before the option that is missing."""
    for line, count in found.items():
        print(
            f'the lines "{line}" of {name} ({count}) were read as text: if they separate documents, {advice} '
            f'--delimiter "{line}"',
            file=sys.stderr,
        )


def watched(texts: Iterable[str], name: str, advice: str | None = "add") -> Iterator[str]:
    """The texts; after the last one that is taken, `report_ends` of them, unless the advice is None."""
    found: Counter[str] = Counter()
    try:
        for text in texts:
            found.update(ends(text))
            yield text
    finally:
        if advice is not None:
            report_ends(found, name, advice)


def to_json(messages: list[Message]) -> str:
    """Messages as the prompt of a document."""
    return json.dumps(messages, ensure_ascii=False)


def _value(record: Any, field: str, where: str) -> str | list[str]:
    value = record.get(field) if isinstance(record, dict) else None
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return value
    fields = ", ".join(map(repr, record)) if isinstance(record, dict) else "none"
    raise ValueError(f"{where}: no text in field {field!r}; the record's fields are {fields}")


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)
