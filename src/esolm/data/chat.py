"""Conversations as token ids, by the chat template of a tokenizer.

A template is rendered by transformers in jinja's sandbox, which runs no code of the folder. Its special tokens become
ids; the spelling of a special token inside a message stays text, so that a message cannot end its own turn or begin
another one. While the template is rendered, a character of a message with which a special token begins or ends is
replaced by a private stand-in, so every spelling in the rendered text comes from the template. The spellings then get
private names, the stand-ins become characters again, and a copy of the tokenizer that knows the special tokens by
their private names encodes the whole text at once, as transformers would.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models

from .documents import ROLES, Message
from .tokenizer import Tokenizer

_STAND_IN, _OPEN, _CLOSE = 0x10F000, "\U0010fff0", "\U0010fff1"
_RESERVED = re.compile("[\U0010f000-\U0010ffff]")
_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro +%}"
"""Replaces the date of today, which some templates write: ids must not depend on the day. The date is Llama 3's own
default."""


class ChatFormat:
    """Renders and encodes conversations by the chat template of a tokenizer.

    Raises ValueError if the tokenizer has no template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer {tokenizer.name} has no chat template: write one to chat_template.jinja in the folder of "
                "the tokenizer or model, for example that of the model's instruct version"
            )
        self.tokenizer = tokenizer
        added = tokenizer.core.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        plain = [token.content for token in added.values() if not token.special]
        self._spelling = _any_of(self.special)
        self._edges = sorted({edge for spelling in self.special for edge in (spelling[0], spelling[-1])})
        # Added tokens that are not special (<think>) stay as they are: templates look for them in answers.
        self._edge = re.compile("|".join([*map(re.escape, plain), f"([{re.escape(''.join(self._edges))}])"]))
        self._core = _private(tokenizer.core)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the next answer begins."""
        return self._without_bos(self._encode([self.render(messages, True)])[0])

    def row(self, messages: str | Sequence[Message], length: int) -> list[int | None]:
        """The prompt of a conversation, or of one question, and None to `length` tokens for the answer."""
        ids = self.prompt([_message("user", messages)] if isinstance(messages, str) else messages)
        if len(ids) >= length:
            raise ValueError(f"the conversation has {len(ids)} tokens and length is {length}: raise length")
        return [*ids, *[None] * (length - len(ids))]

    def pairs(self, conversations: Sequence[tuple[Sequence[Message], str]]) -> list[tuple[list[int], list[int]]]:
        """The ids of each prompt and of its answer; of what the template writes after an answer only the special token
        that ends the turn is kept, and no EOS, which the packing adds."""
        prompts = [self.render(before, True) for before, _ in conversations]
        wholes = [self.render([*before, _message("assistant", answer)]) for before, answer in conversations]
        for prompt, whole in zip(prompts, wholes):
            if not whole.startswith(prompt):
                raise ValueError(
                    f"the chat template of tokenizer {self.tokenizer.name} does not begin an answer as its generation "
                    f"prompt ends: {prompt[-40:]!r}; change the template so that it does"
                )
        rests = [whole[len(prompt) :] for prompt, whole in zip(prompts, wholes)]
        found = []
        for head, ids, rest in zip(*map(self._encode, (prompts, wholes, rests))):
            # When sampling, the prompt is encoded alone: a token across its end would never occur.
            target = ids[len(head) :] if ids[: len(head)] == head else rest
            found.append((self._without_bos(head), self._without_end(target)))
        return found

    def answer(self, ids: Sequence[int]) -> str:
        """The text of a generated answer: up to the first special token, which is EOS or ends the turn."""
        ends = (i for i, token in enumerate(ids) if token in self._special_ids)
        return self.tokenizer.decode(ids[: next(ends, None)])

    def render(self, messages: Sequence[Message], generate: bool = False) -> str:
        """The text of a conversation, with private names for special tokens; generate: an answer is to follow."""
        checked = [_message(m.get("role"), m.get("content")) for m in messages]
        shown = [{"role": m["role"], "content": self._shield(m["content"])} for m in checked]
        try:
            text = self._renderer.apply_chat_template(shown, tokenize=False, add_generation_prompt=generate)
        except Exception as error:  # jinja's errors, and those that the template raises
            roles = ", ".join(m["role"] for m in checked)
            raise ValueError(
                f"the chat template of tokenizer {self.tokenizer.name} cannot render a conversation of {roles}: {error}"
            ) from error
        named = self._spelling.sub(lambda found: _name(self.special[found[0]]), text) if self.special else text
        return re.sub(f"[{chr(_STAND_IN)}-\U0010ffef]", lambda found: self._edges[ord(found[0]) - _STAND_IN], named)

    def _shield(self, content: str) -> str:
        """The text with stand-ins for the characters with which special tokens begin and end."""
        if found := _RESERVED.search(content):
            raise ValueError(
                f"a message contains U+{ord(found[0]):X}, a private character that rendering uses: remove it"
            )
        if not self.special:
            return content
        return self._edge.sub(
            lambda found: chr(_STAND_IN + self._edges.index(found[1])) if found[1] else found[0], content
        )

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())

    @functools.cached_property
    def _renderer(self) -> Any:
        """A tokenizer of transformers that only renders: it has the template and the spelling of BOS and EOS."""
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise ValueError("chat templates need transformers: pip install 'esolm[hf]'") from error
        template = self.tokenizer.chat_template or ""
        ids = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        tokens = {role: self.tokenizer.core.id_to_token(i) for role, i in ids.items() if i is not None}
        empty = tokenizers.Tokenizer(models.WordLevel({}, unk_token="?"))
        dated = _DATE + template if "strftime_now" in template else template
        return PreTrainedTokenizerFast(tokenizer_object=empty, chat_template=dated, **tokens)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _without_bos(self, ids: list[int]) -> list[int]:
        """The ids without a BOS at the start: a system puts its start token (`first`) before every text itself."""
        return ids[1:] if ids and ids[0] == self.tokenizer.bos_id else ids

    def _without_end(self, ids: list[int]) -> list[int]:
        last = max((i for i, token in enumerate(ids) if token in self._special_ids), default=None)
        if last is None or self.tokenizer.decode(ids[last + 1 :]).strip():
            return ids
        return ids[: last + (ids[last] != self.tokenizer.eos_id)]


def _message(role: Any, content: Any) -> Message:
    if role not in ROLES:
        # A role becomes part of special tokens in some templates, so it must not be free text.
        raise ValueError(f"a message has the role {role!r}; it must be one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"the content of a message is {type(content).__name__}; it must be a text")
    return {"role": role, "content": content}


def _name(i: int) -> str:
    return f"{_OPEN}{i}{_CLOSE}"


def _any_of(spellings: Mapping[str, int]) -> re.Pattern[str]:
    """A pattern that prefers the longest of several spellings that begin at the same place."""
    return re.compile("|".join(re.escape(each) for each in sorted(spellings, key=len, reverse=True)))


def _private(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer with private names for its special tokens, which it recognises."""
    stored = json.loads(core.to_str())
    stored["post_processor"] = None  # it refers to tokens by their old names
    names = {token["content"]: _name(token["id"]) for token in stored["added_tokens"] if token["special"]}
    for token in stored["added_tokens"]:
        if token["special"]:
            token |= {"content": names[token["content"]], "normalized": False}
    model = stored["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:  # Unigram: pairs of a piece and its score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    made = tokenizers.Tokenizer.from_str(json.dumps(stored))
    made.encode_special_tokens = False
    moved = [token["content"] for token in stored["added_tokens"] if made.token_to_id(token["content"]) != token["id"]]
    assert not moved, f"ids changed: {moved}"
    return made
