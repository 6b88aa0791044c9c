"""`esolm infill`: fill in the blanks of a text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .generation_options import add_options, run_generation
from .parsing import parse, parser

if TYPE_CHECKING:
    from ..model import LanguageModel
    from .generate import Job


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    made = parser('infill MODEL "The ____ fox"', "Fill in the blanks of a text.")
    made.add_argument("run", type=str, help="A run, a checkpoint, a model folder, or a bundled model by its name.")
    made.add_argument("text", type=str, help="The text, with blanks.")
    made.add_argument("--blank", type=str, default="____", help="Marks a blank; by default four or more underscores.")
    sizes = "Tokens of every blank, or of each in turn, as in 3,5."
    made.add_argument("--tokens_per_blank", type=list[int], default=[8], help=sizes)
    add_options(made)
    return run_generation(parse(made, argv), plan)


def plan(lm: LanguageModel, options: Mapping[str, Any]) -> Job:
    """The samples of one text."""
    from .generate import Job

    text, blank, sizes, number = (options[key] for key in ("text", "blank", "tokens_per_blank", "num_samples"))
    per_blank = sizes[0] if len(sizes) == 1 else sizes
    stream = functools.partial(lm.infill_stream, text, blank, per_blank, number)
    length = len(lm.tokenizer.encode(text)) + max(sizes) * text.count(blank)
    return Job(number, length, stream, lambda i: {"given": text}, cut=False)
