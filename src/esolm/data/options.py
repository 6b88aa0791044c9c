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
    """bytes, bpe:SIZE (trained on the train split), gpt2, bert-base-uncased, NAME:PATH or a path."""
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
    """How documents become sequences: wrap, cls, pad, single or conditional (default: cls for lm1b, otherwise wrap)."""
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
    lines: bool = False
    """Whether each line of a text file is a document."""
    detokenizer: Literal["lm1b", "wikitext", "ptb", "lambada"] | None = None
    """Rules that undo the tokenised spacing of a corpus (lm1b applies its own by default)."""
    workers: int | None = None
    """Chunks encoded in parallel (default: one per core); the result does not depend on it."""
    seed: int = 0
    """Seed of the hash that selects the validation documents."""
    part: str | None = None
    """K/N encodes only the K-th of N parts, so that N processes, on one machine or on several that share `out`, can
    work at the same time. The same call without it then joins the parts; the result is that of one process."""

    def __post_init__(self) -> None:
        conditional = (self.prompt_field, self.target_field, self.target_length, self.separator)
        if not self.conditional and conditional != ("prompt", "target", None, "\n"):
            raise ValueError(
                "prompt_field, target_field, target_length and separator apply only to the conditional packing: give "
                "--packing conditional, or omit them"
            )
        if self.holdout is not None and self.holdout < 1:
            raise ValueError(f"holdout is {self.holdout}: it must be at least 1")
        if self.part is not None and trained(self.tokenizer):
            raise ValueError(
                f"tokenizer {self.tokenizer} is trained on the whole corpus, which --part cannot do: give the path of "
                "a trained tokenizer"
            )
        self.part_of  # noqa: B018  raises for a malformed part

    @property
    def conditional(self) -> bool:
        """Whether sequences have a prompt."""
        return self.packing == "conditional"

    @property
    def reading(self) -> Reading:
        """How files and records are read."""
        prompt_field = self.prompt_field if self.conditional else None
        return Reading(self.field, prompt_field, self.target_field, self.lines)

    @property
    def reserved(self) -> int:
        """Tokens reserved for a target and its EOS."""
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
