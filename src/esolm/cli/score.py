"""`esolm score`: the likelihood of texts, with its error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..likelihood import scoring
from ..likelihood.orders import is_exact
from ..likelihood.texts import Sequences, read
from ..likelihood.work import WorkFile
from ..model import LanguageModel, load
from ..net.protocol import trainable
from ..runtime import distributed
from ..runtime.distributed import Ranks
from ..storage import folder
from ..systems import options_of
from .parsing import parse, parser


@dataclass(frozen=True)
class Scoring:
    """The options of `esolm score`."""

    estimator: Literal["nelbo", "any-order", "iw", "jackknife"] = "nelbo"
    """The system's own bound, the mean over orders, the importance-weighted bound, or the jackknife of it."""
    num_orders: int | None = None
    """Orders drawn for each sequence, K; null is 1 for any-order and 100 for iw and jackknife."""
    antithetic: bool = False
    """Draw orders in pairs, one and its reverse."""
    num_draws: int = 1
    """Draws of the nelbo for each sequence."""
    alpha_0: float | None = None
    """Another share of diffusion than in training."""
    num_sequences: int | None = None
    """Score only the first so many sequences of each corpus."""
    length: int | None = None
    """Tokens in a sequence; null is the training length."""
    split: Literal["valid", "train"] = "valid"
    """The split of prepared data, and of corpora that have one."""
    field: str = "text"
    """The field of a JSON record that holds the text."""
    detokenizer: Literal["lm1b", "wikitext", "ptb", "lambada"] | None = None
    """The rules that undo a corpus's tokenised spacing."""
    batch_size: int = 32
    """Sequences in one pass."""
    seed: int = 0
    """Decides times, masks and orders."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda`, `mps`."""
    weights: Literal["ema", "model"] = "ema"
    """The averaged weights, or the raw ones."""
    work: str | None = None
    """A file that keeps log-weights, so that the same command goes on where it stopped, and K can be raised."""
    json: bool = False
    """Print JSON and nothing else."""

    def __post_init__(self) -> None:
        if self.work is not None and self.estimator == "nelbo":
            raise ValueError(f"work is {self.work!r}; it keeps log-weights, and the nelbo has none: leave it out")
        if self.estimator == "nelbo" and (self.num_orders is not None or self.antithetic):
            raise ValueError("the nelbo draws no orders: give --estimator any-order, iw or jackknife, or --num_draws")
        if self.estimator != "nelbo" and self.num_draws != 1:
            raise ValueError(f"num_draws is {self.num_draws}; {self.estimator} draws orders: give --num_orders")

    @property
    def orders(self) -> int:
        """K."""
        default = 1 if self.estimator == "any-order" else 100
        return default if self.num_orders is None else self.num_orders


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return score(**parse(scoring_parser("score", Scoring), argv))


def scoring_parser(word: str, options: type) -> Any:
    """The parser of `esolm score` or `esolm variance`."""
    several = word == "score"
    about = "Likelihood of texts, with its error." if several else "Spread of single estimates of a bound."
    made = parser(f"{word} MODEL CORPUS|FILE|FOLDER{' …' if several else ''}", about)
    made.add_argument("run", type=str, help="A run, or one checkpoint of it.")
    number: dict[str, Any] = {"nargs": "+"} if several else {}
    what = "Prepared data, a file or folder of text, or a corpus as `esolm prepare` names it."
    made.add_argument("corpora" if several else "corpus", type=str, help=what, **number)
    made.add_class_arguments(options, skip={"json"})
    made.add_argument("--json", action="store_true", help="Print JSON and nothing else.")
    return made


def score(run: str, corpora: list[str], **options: Any) -> int:
    """Score each corpus, and print a table or JSON. Under torchrun the processes share the sequences."""
    o = Scoring(**options)
    with distributed.join(o.device, distributed.PATIENCE) as ranks:
        records = ranks.everywhere(lambda: prepare(run, corpora, o, ranks))()
    if ranks.rank == 0:
        if o.json:
            print(json.dumps(records, indent=1, allow_nan=False))
        else:
            show(records)
    return 0


def prepare(run: str, corpora: list[str], o: Scoring, ranks: Ranks) -> Callable[[], list[dict[str, Any]]]:
    """Read everything; what is returned does the scoring, and gives a record of each corpus."""
    lm = open_model(run, o.device if ranks.world == 1 else str(ranks.device), o.alpha_0, o.weights)
    reading: dict[str, Any] = {key: getattr(o, key) for key in ("split", "length", "num_sequences", "field")}
    texts = [read(spec, lm.tokenizer, lm.net.config.length, **reading, detokenizer=o.detokenizer) for spec in corpora]
    about = identity(lm, texts, o) if o.work or ranks.world > 1 else {}
    files = WorkFile(o.work, about, ranks)

    def work_all() -> list[dict[str, Any]]:
        ranks.agree(about)
        with files as work:
            return [score_one(lm, sequences, o, work, i, ranks) for i, sequences in enumerate(texts)]

    return work_all


def score_one(
    lm: LanguageModel, sequences: Sequences, o: Scoring, work: WorkFile, i: int, ranks: Ranks
) -> dict[str, Any]:
    """The record of corpus i."""
    settings: dict[str, Any] = {key: getattr(o, key) for key in ("antithetic", "num_draws", "seed", "batch_size")}
    start, each = time.perf_counter(), o.num_draws
    if o.estimator != "nelbo":
        each = 1 if is_exact(lm.system, sequences.batch.given is not None) else o.orders
        settings |= {"known": work.known(i), "keep": work.keeper(i)}
    with bar(sequences.name, len(ranks.share(len(sequences))) * each, ranks.rank > 0) as advance:
        found = scoring.score(lm, sequences, o.estimator, o.orders, advance=advance, ranks=ranks, **settings)
    return {**found.record(), "seconds": time.perf_counter() - start}


def open_model(run: str, device: str, alpha_0: float | None, weights: str = "ema") -> LanguageModel:
    """The model of a run with another alpha_0, if one is given."""
    return load(run, weights, device=device).at(alpha_0)


@contextmanager
def bar(name: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, on a terminal only."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(compact=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.advance(task, done)


def show(records: list[dict[str, Any]]) -> None:
    """One row for each corpus and, where there are several orders, the curve over their number."""
    console, first = Console(highlight=False), records[0]
    orders = "" if first["num_orders"] is None else f", K = {first['num_orders']}"
    table = Table(title=f"{first['estimator']} ({first['kind']}{orders})", title_justify="left")
    table.add_column("corpus", overflow="fold")
    for column in ("ppl", "nats", "± s.e.", "bits/token", "bits/byte", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in records:
        numbers = (number(r[key]) for key in ("nats", "stderr", "bits_per_token", "bits_per_byte"))
        table.add_row(escape(r["corpus"]), f"{r['perplexity']:.2f}", *numbers, f"{r['tokens']:,}")
    console.print(table)
    if first["num_orders"] in (None, 1):
        return
    curve = Table("corpus", "K", "bound", "± s.e.", "jackknife", "± s.e.", title="nats by number of orders")
    for r in records:
        for row in r["curve"]:
            values = (row[key] for key in ("bound", "bound_stderr", "jackknife", "jackknife_stderr"))
            curve.add_row(escape(r["corpus"]), str(row["num_orders"]), *map(number, values))
    console.print(curve)
    for r in records:
        text = f"{r['corpus']}: the bound falls by {number(r['moved'])} nats/token from K/2 to K"
        console.print(text, markup=False)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def identity(lm: LanguageModel, texts: list[Sequences], o: Scoring) -> dict[str, Any]:
    """What log-weights depend on, besides their number."""
    data = {f"{i}": sequences.sha256 for i, sequences in enumerate(texts)}
    about = {
        "model": folder.fingerprint(trainable(lm.net).state_dict()),
        "system": options_of(lm.system),
        "seed": o.seed,
        "antithetic": o.antithetic,
        "data": data,
    }
    return json.loads(json.dumps(about))
