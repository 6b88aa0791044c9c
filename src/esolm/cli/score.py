"""`esolm score`: the likelihood of texts, with its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .generation_options import MODEL
from .layout import group
from .parsing import add_json, announce, parse, parser


@dataclass(frozen=True)
class Scoring:
    """The options of `esolm score`."""

    estimator: Literal["nelbo", "exact", "any-order", "iw", "jackknife"] = "nelbo"
    """The system's own bound; the likelihood itself (ar, esolm at alpha_0 = 0, bd3lm with blocks of at most 8); the
    mean over orders, the importance-weighted bound, or the jackknife of it."""
    num_orders: int | None = None
    """Orders drawn for each sequence, K; null is 1 for any-order and 100 for iw and jackknife."""
    antithetic: bool = False
    """Draw orders in pairs, one and its reverse."""
    num_draws: int = 1
    """Draws of the nelbo for each sequence."""
    alpha_0: float | None = None
    """Evaluate at another alpha_0 than in training."""
    num_sequences: int | None = None
    """Score only the first N sequences of each corpus."""
    length: int | None = None
    """Tokens in a sequence; null is the training length."""
    split: Literal["valid", "train"] = "valid"
    """The split of prepared data, and of corpora that have one."""
    field: str = "text"
    """The field of a JSON record that holds the text."""
    detokenizer: str | None = None
    """Rules that undo the tokenised spacing of a corpus: lm1b, wikitext, ptb, lambada or scientific_papers, or several
    joined by commas."""
    lines: bool = False
    """Whether each line of a text file is a text of its own."""
    newlines: bool = False
    """With lines: keep the line break at the end of each text, as the records of WikiText do."""
    delimiter: str | None = None
    """The line that separates the texts of a file, as in `esolm prepare`."""
    eos: bool = True
    """Whether each text ends with EOS."""
    frame: bool = False
    """Begin each sequence with BOS, end it with EOS, both scored and part of its length, and drop the incomplete last
    sequence, as the paper's authors do for zero-shot likelihood."""
    batch_size: int = 32
    """Sequences in one pass."""
    seed: int = 0
    """Determines times, masks and orders."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or mps."""
    weights: Literal["ema", "model"] = "ema"
    """The averaged weights, or the raw ones."""
    work: str | None = None
    """A file for log-weights: the same command resumes from it, and a larger num_orders reuses it."""
    json: bool = False
    """Print JSON and nothing else."""

    def __post_init__(self) -> None:
        if self.work is not None and not self.draws_orders:
            raise ValueError(f"work is {self.work!r}, but {self.estimator} has no log-weights to keep: leave it out")
        if not self.draws_orders and (self.num_orders is not None or self.antithetic):
            advice = "give --estimator any-order, iw or jackknife, or --num_draws for nelbo"
            raise ValueError(f"the estimator {self.estimator} draws no orders: {advice}")
        if self.estimator != "nelbo" and self.num_draws != 1:
            advice = "leave it out" if self.estimator == "exact" else "give --num_orders"
            raise ValueError(f"num_draws is {self.num_draws}, which only nelbo takes: {advice}")

    @property
    def draws_orders(self) -> bool:
        """Whether the estimator is one over drawn orders."""
        return self.estimator not in ("nelbo", "exact")

    @property
    def orders(self) -> int:
        """K."""
        default = 1 if self.estimator == "any-order" else 100
        return default if self.num_orders is None else self.num_orders


def make_parser() -> Any:
    """The parser."""
    made = scoring_parser("score", Scoring)
    group(made, "estimate", ("estimator", "num_orders", "antithetic", "num_draws", "alpha_0"))
    texts = (
        "num_sequences",
        "length",
        "split",
        "field",
        "detokenizer",
        "lines",
        "newlines",
        "delimiter",
        "eos",
        "frame",
    )
    group(made, "texts", texts)
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    given = parse(make_parser(), argv)
    model, corpora = given.pop("run"), given.pop("corpora")
    options = Scoring(**given)
    announce(f"loading {model} …", quiet=options.json)
    from .score_work import score

    return score(model, corpora, options)


def scoring_parser(word: str, options: type) -> Any:
    """The parser of `esolm score` or `esolm variance`."""
    several = word == "score"
    about = "Likelihood of texts, with its error." if several else "Spread of single estimates of a bound."
    made = parser(f"{word} MODEL CORPUS|FILE|FOLDER{' …' if several else ''}", about)
    made.add_argument("run", **MODEL)
    number: dict[str, Any] = {"nargs": "+"} if several else {}
    what = "Prepared data, a text file or folder, or the name of a corpus, as in `esolm prepare`."
    made.add_argument("corpora" if several else "corpus", type=str, metavar="CORPUS", help=what, **number)
    made.add_class_arguments(options, as_group=False, skip={"json"})
    add_json(made)
    return made
