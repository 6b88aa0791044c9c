"""`esolm variance`: the spread of single estimates of the bound of one sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .layout import group
from .parsing import announce, parse
from .score import scoring_parser


@dataclass(frozen=True)
class Trials:
    """The options of `esolm variance`."""

    trials: int = 100
    """Repetitions of each estimate."""
    num_samples: int = 10
    """Draws of time and masks in one trial."""
    sequence: int = 0
    """Index of the sequence in the corpus, from 0."""
    alpha_0: float | None = None
    """Evaluate at another alpha_0 than in training."""
    length: int | None = None
    """Tokens in a sequence; null is the training length."""
    batch_size: int = 32
    """Sequences in one pass."""
    seed: int = 0
    """Determines times, masks and orders."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or mps."""
    json: bool = False
    """Print JSON and nothing else."""

    def __post_init__(self) -> None:
        for name, least in (("trials", 2), ("num_samples", 1), ("sequence", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


def make_parser() -> Any:
    """The parser."""
    made = scoring_parser("variance", Trials)
    group(made, "estimate", ("trials", "num_samples", "sequence", "alpha_0", "length"))
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    return measure(**parse(make_parser(), argv))


def measure(run: str, corpus: str, **options: Any) -> int:
    """Mean and standard deviation of single estimates of the bound of one sequence, as a table or JSON."""
    o = Trials(**options)
    announce(f"loading {run} …", quiet=o.json)
    import torch

    from ..likelihood import variance
    from ..likelihood.texts import read
    from .score_work import bar, number, open_model

    lm = open_model(run, o.device, o.alpha_0)
    reading: dict[str, Any] = {"length": o.length, "num_sequences": o.sequence + 1, "advice": "prepare the file with"}
    texts = read(corpus, lm.tokenizer, lm.net.config.length, **reading)
    if len(texts) <= o.sequence:
        raise ValueError(f"sequence is {o.sequence}; {corpus} has {len(texts)}, counted from 0")
    sequence = texts.rows(torch.tensor([o.sequence]), lm.net.device)
    tokens = float(texts.tokens[o.sequence])
    shared: dict[str, Any] = {"trials": o.trials, "seed": o.seed}
    draws = {"num_samples": o.num_samples, **shared}
    with bar(corpus, 2 * o.trials * o.num_samples) as advance:
        # first, because a system without a bound over times refuses it before any pass
        times = variance.over_times(lm, sequence, batch_size=o.batch_size, advance=advance, **draws)
        strata = variance.over_strata(lm, sequence, advance=advance, **draws)
    found: dict[str, tuple[int, Any]] = {
        "over t and z_t, independent times": (o.num_samples, times),
        "over t and z_t, as esolm score": (o.num_samples, strata),
    }
    if lm.system.any_order:
        found["over sigma, one order"] = (1, variance.over_orders(lm, sequence, batch_size=o.batch_size, **shared))
    records: list[dict[str, Any]] = []
    for name, (samples, nats) in found.items():
        each = nats / tokens
        records.append({"estimator": name, "samples": samples, "mean": float(each.mean()), "sd": float(each.std())})
    if o.json:
        about = {"corpus": corpus, "tokens": int(tokens), "trials": o.trials, "estimators": records}
        print(json.dumps(about, indent=1, allow_nan=False))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("estimator", "samples / trial", "mean", "S.D.", title=f"nats/token over {o.trials} trials")
    for r in records:
        table.add_row(r["estimator"], str(r["samples"]), number(r["mean"]), number(r["sd"]))
    Console().print(table)
    return 0
