"""`esolm infill`: fill in the blanks of a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..sampling.options import SamplingOptions
from .generation_options import CONSTRAINTS, MODEL, add_options, run_generation, sampling_options
from .layout import group
from .parsing import parse, parser

if TYPE_CHECKING:
    from ..model import LanguageModel
    from ..sampling.events import Event
    from .generate import Job


def make_parser() -> Any:
    """The parser."""
    made = parser('infill MODEL "The ____ fox"', "Fill in the blanks of a text.")
    made.add_argument("run", **MODEL)
    made.add_argument("text", type=str, metavar="TEXT", help="The text, with blanks.")
    made.add_argument("--blank", type=str, default="____", help="Marks a blank; by default four or more underscores.")
    sizes = "Tokens of every blank, or of each in turn, as in 3,5; a range such as 1-12 is chosen from by likelihood."
    made.add_argument("--tokens_per_blank", type=list[int | str], default=[8], help=sizes)
    weights = "A weight for each length of a range, as in 3,2,1; all are alike if it is not given."
    made.add_argument("--length_prior", type=list[float] | None, help=weights)
    choice = "Draw the lengths of a range by their probabilities, or take the best."
    made.add_argument("--length_choice", type=Literal["draw", "best"], default="draw", help=choice)
    add_options(made)
    group(made, "blanks", ("blank", "tokens_per_blank", "length_prior", "length_choice", "num_samples"))
    group(made, "constraints", CONSTRAINTS)
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return run_generation(parse(make_parser(), argv), plan)


def plan(lm: LanguageModel, options: Mapping[str, Any]) -> Job:
    """The samples of one text."""
    from .generate import Job

    text, sizes, number = (options[key] for key in ("text", "tokens_per_blank", "num_samples"))
    per_blank = sizes[0] if len(sizes) == 1 else sizes
    asked = (text, options["blank"], per_blank, sampling_options(options), options["length_prior"])
    rows, spans = lm.blanked_rows(range(number), options["length_choice"], *asked)

    def stream(part: range, **settings: Any) -> Iterator[Event]:
        return lm.stream_rows(rows, number, part, SamplingOptions(**settings), spans)

    return Job(number, max(map(len, rows)), stream, lambda i: {"given": text}, cut=False)
