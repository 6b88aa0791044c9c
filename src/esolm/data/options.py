"""The options of `prepare`, declared once for Python and the command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from .documents import Reading
from .tokenizer import trained

P = ParamSpec("P")
Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `prepare`."""

    corpus: str
    """Files, folders or globs as PATH[,PATH…] (or text:PATH[,PATH…]), pydocs, lm1b[:PATH], openwebtext[:PATH] or
    hf:NAME[,CONFIG]."""
    out: str | Path
    """The folder to create."""
    tokenizer: str = "bpe:4096"
    """bytes, bpe:SIZE (trained on the train split), gpt2, bert-base-uncased, NAME:PATH, a path, or the name
    of a bundled model."""
    length: int = 256
    """Tokens per sequence."""
    valid: str | None = None
    """A separate corpus for the validation split, as a spec like `corpus`."""
    valid_fraction: float = 0.05
    """Fraction held out for validation: of the documents, chosen by a hash of their content, or, if these are too few,
    the last part of the text."""
    holdout: int | None = None
    """Hold out the last N documents instead (openwebtext: 100000)."""
    packing: Literal["wrap", "cls", "pad", "single", "conditional"] | None = None
    """How documents become sequences: wrap, cls, pad, single or conditional (default: conditional for chats, cls for
    lm1b, otherwise wrap)."""
    field: str = "text"
    """The field of a JSON record that contains the text."""
    prompt_field: str = "prompt"
    """The field that contains the prompt, for the conditional packing."""
    target_field: str = "target"
    """The field that contains the target, for the conditional packing."""
    target_length: int | None = None
    """Tokens reserved for a target and its EOS, for the conditional packing (default: a quarter of the length)."""
    separator: str = "\n"
    """Text appended to every prompt, for the conditional packing."""
    num_eos: int | None = None
    """EOS tokens that are scored after a target, for the conditional packing; what follows is padding (default: all to
    the end of the sequence, which any-order systems need; 1 is enough for ar)."""
    chat: bool = False
    """Whether records are conversations, or prompts and targets as turns of user and assistant, rendered by the
    tokenizer's chat template (needs esolm[hf]); answers are scored."""
    messages_field: str = "messages"
    """The field that contains the messages of a conversation, each with a role and a content."""
    turns: Literal["last", "all"] = "last"
    """The answers of a conversation that are learned: the last, or all, each in a sequence of its own."""
    lines: bool = False
    """Whether each line of a text file is a document."""
    delimiter: str | None = None
    """A line that separates the documents of a text file, for example <|endoftext|>; the documents are stripped of
    surrounding whitespace."""
    detokenizer: str | None = None
    """Rules that undo the tokenised spacing of a corpus: lm1b, wikitext, ptb, lambada or scientific_papers, or several
    joined by commas (lm1b applies its own by default)."""
    workers: int | None = None
    """Chunks encoded in parallel (default: one per core); the result does not depend on it."""
    seed: int = 0
    """Seed of the hash that selects the validation documents."""
    part: str | None = None
    """K/N encodes only the K-th of N parts, so that N processes, on one machine or on several that share `out`, can
    work at the same time. The same call without it then joins the parts; the result is that of one process."""

    def __post_init__(self) -> None:
        conditional = (self.prompt_field, self.target_field, self.target_length, self.separator, self.num_eos)
        if not self.conditional and conditional != ("prompt", "target", None, "\n", None):
            raise ValueError(
                "prompt_field, target_field, target_length, separator and num_eos apply only to the conditional "
                "packing: give --packing conditional, or omit them"
            )
        if self.lines and self.delimiter is not None:
            raise ValueError("with --lines every line is a document, so there is no --delimiter: choose one")
        self._check_chat()
        if self.num_eos is not None and self.num_eos < 1:
            raise ValueError(f"num_eos is {self.num_eos}: it must be at least 1, or null for all")
        if self.holdout is not None and self.holdout < 1:
            raise ValueError(f"holdout is {self.holdout}: it must be at least 1")
        if self.part is not None and trained(self.tokenizer):
            raise ValueError(
                f"tokenizer {self.tokenizer} is trained on the whole corpus, which --part cannot do: give the path of "
                "a trained tokenizer"
            )
        self.part_of  # noqa: B018  raises for a malformed part

    def _check_chat(self) -> None:
        if not self.chat:
            if (self.messages_field, self.turns) != ("messages", "last"):
                raise ValueError("messages_field and turns apply only to chats: add --chat, or omit them")
            return
        if not self.conditional:
            raise ValueError(f"packing is {self.packing}, and chats need conditional: omit it")
        if (self.target_length, self.separator, self.detokenizer) != (None, "\n", None):
            raise ValueError(
                "target_length, separator and detokenizer have no effect on chats, which the template renders whole: "
                "omit them"
            )
        if trained(self.tokenizer):
            raise ValueError(
                f"tokenizer {self.tokenizer} is trained on the corpus and has no chat template: give the folder of a "
                "tokenizer or model that has one"
            )

    @property
    def conditional(self) -> bool:
        """Whether sequences have a prompt."""
        return self.packing == "conditional" or (self.chat and self.packing is None)

    @property
    def reading(self) -> Reading:
        """How files and records are read."""
        prompt_field = self.prompt_field if self.conditional else None
        messages_field = self.messages_field if self.chat else None
        return Reading(
            self.field, prompt_field, self.target_field, self.lines, messages_field, self.turns, self.delimiter
        )

    @property
    def reserved(self) -> int | None:
        """Tokens reserved for a target and its EOS; None for chats, whose prompts are not cut."""
        if self.chat:
            return None
        return self.length // 4 if self.target_length is None else self.target_length

    @property
    def part_of(self) -> tuple[int, int]:
        """The part as (index from 0, number of parts)."""
        k, _, n = "1/1".partition("/") if self.part is None else self.part.partition("/")
        if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
            raise ValueError(f"part is {self.part!r}: it must be K/N with 1 <= K <= N, for example 3/8")
        return int(k) - 1, int(n)


def takes(options: Callable[P, Options]) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Let a function of an options class be called with the fields of the class as arguments."""

    def decorate(function: Callable[[Options], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(options(*args, **kwargs))

        call.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        return call

    return decorate
