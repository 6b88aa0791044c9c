"""`esolm score`: the likelihood of texts, with its error."""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from ..likelihood import scoring as evaluate
from ..likelihood.orders import is_exact, name_of
from ..model import LanguageModel, load, with_alpha_0
from ..net.protocol import trainable
from ..runtime import distributed, machine
from ..runtime.distributed import ALONE, Ranks
from ..runtime.nested import differing
from ..storage import folder
from .parsing import parse, parser

EVERY = 60.0
"""Seconds between two writings of the work file."""


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
    texts = [evaluate.read(lm, spec, **reading, detokenizer=o.detokenizer) for spec in corpora]
    about = identity(lm, texts, o) if o.work or ranks.world > 1 else {}
    files = Work(o.work, about, ranks)

    def work_all() -> list[dict[str, Any]]:
        ranks.agree(about)
        with files as work:
            return [score_one(lm, sequences, o, work, i, ranks) for i, sequences in enumerate(texts)]

    return work_all


def score_one(
    lm: LanguageModel, sequences: evaluate.Sequences, o: Scoring, work: Work, i: int, ranks: Ranks
) -> dict[str, Any]:
    """The record of corpus i."""
    settings: dict[str, Any] = {key: getattr(o, key) for key in ("antithetic", "num_draws", "seed", "batch_size")}
    start, each = time.perf_counter(), o.num_draws
    if o.estimator != "nelbo":
        each = 1 if is_exact(lm.system, sequences.given is not None) else o.orders
        settings |= {"known": work.known(i), "keep": work.keeper(i)}
    with bar(sequences.name, len(ranks.share(len(sequences))) * each, ranks.rank > 0) as advance:
        found = evaluate.score(lm, sequences, o.estimator, o.orders, advance=advance, ranks=ranks, **settings)
    return {**found.record(), "seconds": time.perf_counter() - start}


def open_model(run: str, device: str, alpha_0: float | None, weights: str = "ema") -> LanguageModel:
    """The model of a run with another alpha_0, if one is given."""
    lm = load(run, weights, device=str(machine.pick_device(device)))
    return dataclasses.replace(lm, system=with_alpha_0(lm.system, alpha_0))


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


class Work:
    """Log-weights on disk, written whole or not at all, of one model, data and seed.

    Each of several processes keeps what it finds in a part of its own; at the end, or by the next command, whatever its
    number of processes, the parts become one file.
    """

    def __init__(self, path: str | None, identity: dict[str, Any], ranks: Ranks = ALONE) -> None:
        self.path, self.identity, self.ranks = None if path is None else Path(path), identity, ranks
        self.matrices: dict[str, Tensor] = {}
        self.changed, self.saved = False, time.monotonic()
        for file in self.files():
            self._read(file)

    def files(self) -> list[Path]:
        """The file and its parts, as many as there are."""
        if self.path is None:
            return []
        parts = sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*"))
        return [file for file in (self.path, *parts) if file.exists()]

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                theirs = json.loads((file.metadata() or {})["identity"])
                matrices = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is no work file of esolm score ({error}): give another --work") from error
        pairs = differing(theirs, self.identity).items()
        if pairs:
            other = "; ".join(f"{key} is {a!s:.12} there and {b!s:.12} here" for key, (a, b) in pairs)
            raise ValueError(f"{path} is of another model, data or seed: {other}. Give another --work, or remove it")
        for key, matrix in matrices.items():
            self.matrices[key] = _united(self.matrices.get(key, matrix), matrix)

    def known(self, index: int) -> Tensor | None:
        """What is known of one corpus."""
        return self.matrices.get(str(index))

    def keeper(self, index: int) -> Callable[[Tensor], None]:
        """What takes the matrix of one corpus and writes the file now and then."""

        def keep(matrix: Tensor) -> None:
            self.matrices[str(index)], self.changed = matrix, True
            if self.path is not None and time.monotonic() - self.saved >= EVERY:
                self.save(self.own(self.path))

        return keep

    def own(self, path: Path) -> Path:
        """The file of this process while others work too."""
        return path if self.ranks.world == 1 else path.with_name(f"{path.name}.part-{self.ranks.rank}")

    def save(self, path: Path) -> None:
        """Write everything under another name, then rename it."""
        partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.matrices, partial, {"identity": json.dumps(self.identity)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        self.changed, self.saved = False, time.monotonic()

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is None:
            return
        if error is not None:
            if self.changed:
                self.save(self.own(self.path))
        elif self.ranks.rank == 0:  # every process has everything now
            parts = [file for file in self.files() if file != self.path]
            if self.changed or parts:
                self.save(self.path)
            for part in parts:
                part.unlink()


def _united(one: Tensor, other: Tensor) -> Tensor:
    """What either of two matrices knows, [n, K]."""
    width = max(one.shape[1], other.shape[1])
    one, other = (F.pad(t, (0, width - t.shape[1]), value=math.nan) for t in (one, other))
    return torch.where(one.isnan(), other, one)


def identity(lm: LanguageModel, texts: list[evaluate.Sequences], o: Scoring) -> dict[str, Any]:
    """What log-weights depend on, besides their number."""
    system = {"name": name_of(lm.system), **dataclasses.asdict(lm.system)}  # type: ignore[call-overload]
    data = {f"{i}": sequences.sha256 for i, sequences in enumerate(texts)}
    about = {
        "model": folder.fingerprint(trainable(lm.net).state_dict()),
        "system": system,
        "seed": o.seed,
        "antithetic": o.antithetic,
        "data": data,
    }
    return json.loads(json.dumps(about))
