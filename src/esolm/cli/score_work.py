"""The work of `esolm score`: read, score and print. `esolm variance` shares parts of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..likelihood import scoring
from ..likelihood.orders import is_exact
from ..likelihood.texts import Sequences, read
from ..likelihood.work_file import WorkFile
from ..model import LanguageModel, load
from ..net.protocol import trainable
from ..runtime import distributed
from ..runtime.distributed import Ranks
from ..runtime.files import making
from ..storage import folder
from ..systems import options_of
from .estimates import check_scoring
from .output import check_writable
from .score import Scoring


def score(run: str, corpora: list[str], o: Scoring) -> int:
    """Score each corpus, and print a table or JSON. Under torchrun the processes share the sequences."""
    with distributed.join(o.device, distributed.PATIENCE) as ranks:
        ranks.everywhere(lambda: prepare(run, corpora, o, ranks))()
    return 0


def prepare(run: str, corpora: list[str], o: Scoring, ranks: Ranks) -> Callable[[], None]:
    """Read the model and the texts; return a function that scores them and prints the result before it is saved."""
    if o.work is not None:
        with making(path := Path(o.work)):
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path, "--work")
    lm = open_model(run, o.device if ranks.world == 1 else str(ranks.device), o.alpha_0, o.weights)
    keys = (
        "split",
        "length",
        "num_sequences",
        "field",
        "detokenizer",
        "lines",
        "newlines",
        "delimiter",
        "eos",
        "frame",
    )
    reading: dict[str, Any] = {key: getattr(o, key) for key in keys} | {"advice": None if ranks.rank else "add"}
    texts = [read(spec, lm.tokenizer, lm.net.config.length, **reading) for spec in corpora]
    for sequences in texts:
        check_scoring(lm.net, sequences, o.batch_size, passes(lm, sequences, o), quiet=ranks.rank > 0)
    about = identity(lm, texts, o) if o.work or ranks.world > 1 else {}
    files = WorkFile(o.work, about, ranks)

    def work_all() -> None:
        ranks.agree(about)
        with files as work:
            records = [score_one(lm, sequences, o, work, i, ranks) for i, sequences in enumerate(texts)]
            if ranks.rank == 0 and o.json:
                print(json.dumps(records, indent=1, allow_nan=False))
            elif ranks.rank == 0:
                show(records)

    return work_all


def score_one(
    lm: LanguageModel, sequences: Sequences, o: Scoring, work: WorkFile, i: int, ranks: Ranks
) -> dict[str, Any]:
    """The record of corpus i."""
    settings: dict[str, Any] = {key: getattr(o, key) for key in ("antithetic", "num_draws", "seed", "batch_size")}
    start, total = time.perf_counter(), len(ranks.share(len(sequences))) * passes(lm, sequences, o)
    if o.draws_orders:
        settings |= {"known": work.known(i), "keep": work.keeper(i)}
    with bar(sequences.name, total, ranks.rank > 0) as advance:
        found = scoring.score(lm, sequences, o.estimator, o.orders, advance=advance, ranks=ranks, **settings)
    return {**found.record(), "seconds": time.perf_counter() - start}


def passes(lm: LanguageModel, sequences: Sequences, o: Scoring) -> int:
    """Passes over each sequence."""
    if o.estimator == "nelbo":
        return o.num_draws
    if is_exact(lm.system, sequences.batch.given is not None):
        return 1
    return lm.system.exact_passes if o.estimator == "exact" else o.orders


def open_model(run: str, device: str, alpha_0: float | None, weights: str = "ema") -> LanguageModel:
    """The model, at another alpha_0 if one is given."""
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
    """Print one row per corpus and, where several orders were drawn, the curve over their number."""
    console, first = Console(highlight=False), records[0]
    orders = "" if first["num_orders"] is None else f", K = {first['num_orders']}"
    exact = first["kind"] == "exact"
    title = "exact" if exact else f"{first['estimator']} ({first['kind']}{orders})"
    table = Table(title=title, title_justify="left")
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
    """Four decimals, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def identity(lm: LanguageModel, texts: list[Sequences], o: Scoring) -> dict[str, Any]:
    """Everything that log-weights depend on, besides their number."""
    data = {f"{i}": sequences.sha256 for i, sequences in enumerate(texts)}
    about = {
        "model": folder.fingerprint(trainable(lm.net).state_dict()),
        "system": options_of(lm.system),
        "seed": o.seed,
        "antithetic": o.antithetic,
        "data": data,
    }
    return json.loads(json.dumps(about))
