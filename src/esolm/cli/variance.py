"""`esolm variance`: how much single estimates of the bound of one sequence spread."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..core.randomness import Randomness, fold
from ..likelihood import scoring as evaluate
from ..likelihood.orders import log_weights, order_function
from ..model import LanguageModel
from .parsing import parse
from .score import bar, number, open_model, scoring_parser

Row = tuple[Tensor, Tensor | None, Tensor | None]
"""x, valid and given of one sequence."""


@dataclass(frozen=True)
class Trials:
    """The options of `esolm variance`."""

    trials: int = 100
    """How often each estimate is made."""
    num_samples: int = 10
    """Draws of time and masks in one trial."""
    sequence: int = 0
    """The place of the sequence in the corpus, from 0."""
    alpha_0: float | None = None
    """Another share of diffusion than in training."""
    length: int | None = None
    """Tokens in a sequence; null is the training length."""
    batch_size: int = 32
    """Sequences in one pass."""
    seed: int = 0
    """Decides everything that is drawn."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda`, `mps`."""
    json: bool = False
    """Print JSON and nothing else."""

    def __post_init__(self) -> None:
        for name, least in (("trials", 2), ("num_samples", 1), ("sequence", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return variance(**parse(scoring_parser("variance", Trials), argv))


def variance(run: str, corpus: str, **options: Any) -> int:
    """Mean and standard deviation of single estimates of the bound of one sequence, as a table or JSON."""
    o = Trials(**options)
    lm = open_model(run, o.device, o.alpha_0)
    texts = evaluate.read(lm, corpus, length=o.length, num_sequences=o.sequence + 1)
    if len(texts) <= o.sequence:
        raise ValueError(f"sequence is {o.sequence}; {corpus} has {len(texts)}, counted from 0")
    rows = texts.rows(torch.tensor([o.sequence]), lm.net.device)
    tokens = float(texts.tokens[o.sequence])
    strata = "stratified times" if getattr(lm.system, "loss", None) == "any_order" else "as esolm score"
    with bar(corpus, 2 * o.trials * o.num_samples) as advance:
        found = {
            "over t and z_t, independent times": (o.num_samples, over_times(lm, rows, o, advance)),
            f"over t and z_t, {strata}": (o.num_samples, over_strata(lm, rows, o, advance)),
            "over sigma, one order": (1, over_orders(lm, rows, o)),
        }
    records: list[dict[str, Any]] = []
    for name, (samples, nats) in found.items():
        each = nats / tokens
        records.append({"estimator": name, "samples": samples, "mean": float(each.mean()), "sd": float(each.std())})
    if o.json:
        about = {"corpus": corpus, "tokens": int(tokens), "trials": o.trials, "estimators": records}
        print(json.dumps(about, indent=1, allow_nan=False))
        return 0
    table = Table("estimator", "samples / trial", "mean", "S.D.", title=f"nats/token over {o.trials} trials")
    for r in records:
        table.add_row(r["estimator"], str(r["samples"]), number(r["mean"]), number(r["sd"]))
    Console().print(table)
    return 0


@torch.no_grad()
def draw(lm: LanguageModel, system: Any, rows: Row, rng: Randomness, train: bool, count: int) -> Tensor:
    """The system's bound of one sequence by `count` draws, the first of which is rng's first: float64 [count]."""
    copies = (None if t is None else t.repeat(count, 1) for t in rows)
    terms = system.terms(lm.net, *copies, rng, train)
    return torch.stack([term.nats.double().sum(1) for term in terms]).sum(0).cpu()


def with_options(system: Any, **options: Any) -> Any:
    """The system with those of the options that it has."""
    return dataclasses.replace(system, **{key: value for key, value in options.items() if hasattr(system, key)})


def over_times(lm: LanguageModel, rows: Row, o: Trials, advance: Callable[[int], None]) -> Tensor:
    """The paper's estimate: independent times, weight -alpha'_t / (1 - alpha_t) on the nats of the masks; [trials].

    At alpha_0 = 1 the weight is unbounded and the variance infinite: the standard deviation grows with the trials.
    """
    system = with_options(lm.system, t_min=0.0, weights="elbo", loss="two_term")
    unbounded = getattr(system, "alpha_0", 1.0) == 1
    total, found = o.trials * o.num_samples, []
    for first in range(0, total, o.batch_size):
        count = min(o.batch_size, total - first)
        rng = Randomness(fold(o.seed, "times"), first, max(total, 1 << 16))  # so many strata that times are free
        found.append(draw(lm, system, rows, rng, unbounded, count))
        advance(count)
    return torch.cat(found).view(o.trials, o.num_samples).mean(1)


def over_strata(lm: LanguageModel, rows: Row, o: Trials, advance: Callable[[int], None]) -> Tensor:
    """The two terms as `esolm score` draws them: stratified and, where weights are unbounded, by numbers of masks;
    [trials]."""
    system, found = with_options(lm.system, loss="two_term"), []
    for trial in range(o.trials):
        rng = Randomness(fold(fold(o.seed, "strata"), trial), 0, o.num_samples)
        found.append(draw(lm, system, rows, rng, False, o.num_samples).mean())
        advance(o.num_samples)
    return torch.stack(found)


def over_orders(lm: LanguageModel, rows: Row, o: Trials) -> Tensor:
    """The any-order bound with one order; [trials]."""
    nats_of, alpha_0 = order_function(lm.net, lm.system)
    x, valid, given = rows
    rng = Randomness(fold(o.seed, "orders"))
    return -log_weights(nats_of, x, alpha_0, rng, range(o.trials), False, valid, given, rows=o.batch_size)[0]
