"""Approximate caches of MDLM against the sampler without one, beside the exact cache of an Eso-LM.

Shapes: B batch, L length, C candidates, R candidates of all rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.draw import Draw
from ..generation.samples import Samples
from ..model import LanguageModel, load
from ..sampling.options import CHOICES, SamplingOptions
from .report import named, table
from .timing import interleaved, ratio, summary

NONE = "none"
FREECACHE = "frozen, last_pass"
"""Cache frozen with the authors' behaviour."""
ONE, DYNAMIC = "esolm, one token", "esolm, "
COLUMNS = {
    "cache": "name", "passes": "passes", "fed/pass": "fed_per_pass", "fed/token": "fed_per_token", "× faster": "faster",
    "quartiles": "faster_quartiles", "s/sample": "seconds_per_sample", "same tokens": "same_tokens:.1%",
    "±": "same_tokens_stderr:.1%", "same texts": "same_samples:.1%", "KL": "kl:.2g",
    "KL of kept": "kl_kept:.2g",
}  # fmt: skip


@dataclass(frozen=True)
class Watching(Draw):
    """Draws as `Draw` does, and keeps the logits of the last call."""

    seen: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, uniform: Callable[[int], Tensor], mask_id: int) -> Tensor:
        self.seen[:] = [logits]
        return super().__call__(logits, uniform, mask_id)


def divergence(exact: Tensor, approximate: Tensor, mask_id: int) -> Tensor:
    """KL(exact || approximate) in nats without the mask, float64 [R]; logits [R, V]."""
    p, q = (
        t.double().index_fill(1, torch.tensor([mask_id], device=t.device), -torch.inf) for t in (exact, approximate)
    )
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0).sum(-1)


@torch.inference_mode()
def divergences(
    lm: LanguageModel, rows: list[list[int | None]], options: SamplingOptions
) -> tuple[list[float], list[float]]:
    """The mean divergence of the candidates of all passes from a full pass over the same tokens, and that of the kept
    ones, of each row.

    Raises ValueError for a sampler that does not choose positions.
    """
    request, schedule, rng = lm.planned(rows, max(map(len, rows)), options, 0, len(rows))
    draw = Watching(options.temperature, options.top_p, options.top_k)
    request, mask_id = dataclasses.replace(request, draw=draw), lm.system.mask_id
    tokens = torch.where(request.given, request.x.cpu(), mask_id)
    found, kept, owner, keeper = (list[Tensor]() for _ in range(4))
    for step in lm.system.sample(lm.net, request, schedule, rng):
        if step.candidates is None:
            raise ValueError(f"sampler {options.sampler} does not choose positions: use confidence or threshold")
        exact = lm.system.logits(lm.net, Batch(tokens.to(lm.net.device), request.valid.to(lm.net.device)))
        row, column = step.candidates.asked.nonzero(as_tuple=True)
        at = step.candidates.position[row, column]
        values = torch.zeros(step.candidates.asked.shape, dtype=torch.float64)
        values[row, column] = divergence(exact[row.to(exact.device), at.to(exact.device)], draw.seen[0], mask_id).cpu()
        found.append(values[row, column])
        owner.append(row)
        kept.append(values.gather(1, step.candidates.column)[step.drawn])
        row, column = step.drawn.nonzero(as_tuple=True)
        keeper.append(row)
        tokens[row, step.position[row, column]] = step.token.cpu()[row, column]
    return by_row(found, owner, len(rows)), by_row(kept, keeper, len(rows))


def by_row(values: list[Tensor], owner: list[Tensor], rows: int) -> list[float]:
    """The mean of the values of each row."""
    value, row = torch.cat(values), torch.cat(owner)
    return [float(value[row == i].mean()) for i in range(rows)]


def fed_in(samples: Samples) -> int:
    """Positions fed in all passes; without a count, those of Eso-LM: each token once as a mask and, but for those of
    the last step, once as itself."""
    if samples.fed is not None:
        return sum(map(sum, samples.fed))
    return sum(2 * sum(map(len, steps)) - len(steps[-1]) for steps in samples.steps)


def settings(caches: list[str], shared: dict[str, Any], refresh: int | None) -> dict[str, dict[str, Any]]:
    """The sampling options of each cache by name; raises ValueError for an unknown one."""
    cases: dict[str, dict[str, Any]] = {}
    for name in caches:
        kind, _, freeze = name.partition(", ")
        if kind not in CHOICES["cache"] or (freeze and name != FREECACHE):
            raise ValueError(f"no cache {name!r}: choose from {', '.join(CHOICES['cache'])} and {FREECACHE!r}")
        cases[name] = {**shared, "cache": kind}
        if kind != NONE and refresh is not None:
            cases[name]["refresh"] = refresh
        if freeze:
            cases[name]["freeze"] = freeze
    return cases


def agreement(plain: list[list[int]], found: list[list[int]]) -> dict[str, float | None]:
    """The share of equal tokens as a mean over the texts, which have one length, and the share of equal texts."""
    shares = [sum(a == b for a, b in zip(*pair, strict=True)) / len(pair[0]) for pair in zip(plain, found, strict=True)]
    return {**over_texts("same_tokens", shares), "same_samples": sum(each == 1 for each in shares) / len(shares)}


def over_texts(name: str, values: list[float]) -> dict[str, float | None]:
    """The mean over different texts as `name`, and its standard error; None for one text."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: statistics.fmean(values), f"{name}_stderr": error}


def measure(
    models: dict[str, tuple[LanguageModel, dict[str, Any]]], length: int, batch: int, rounds: int, seeds: int
) -> dict[str, dict[str, Any]]:
    """Time every case, a model with its options, in turn; compare those of MDLM with the one without a cache."""
    made: dict[str, list[Samples]] = {name: [] for name in models}

    def sampled(name: str) -> Callable[[int], None]:
        model, options = models[name]
        return lambda i: made[name].append(model.sample(None, batch, length, seed=i, batch_size=batch, **options))

    seconds = interleaved({name: sampled(name) for name in models}, rounds)
    plain = [ids for samples in made[NONE] for ids in samples.tokens]
    found: dict[str, dict[str, Any]] = {}
    for name, (model, options) in models.items():
        fed, nfe = sum(map(fed_in, made[name])), sum(sum(samples.nfe) for samples in made[name])
        record: dict[str, Any] = {
            "passes": nfe / (batch * len(made[name])),
            "fed_per_pass": fed / nfe,
            "fed_per_token": fed / (length * batch * len(made[name])),
            "seconds_per_sample": summary(seconds[name]).median / batch,
            **ratio(seconds[NONE], seconds[name]).record("faster", 3, "faster_quartiles"),
        }
        if "cache" in options:
            record |= agreement(plain, [ids for samples in made[name] for ids in samples.tokens])
            apart = [
                divergences(model, [[None] * length] * batch, SamplingOptions(**options, seed=i)) for i in range(seeds)
            ]
            record |= over_texts("kl", [value for each, _ in apart for value in each])
            record |= over_texts("kl_kept", [value for _, each in apart for value in each])
        found[name] = record
    return found


def cached(run: str, temperature: float, precision: str, engine: str) -> LanguageModel:
    """Load the MDLM; raises ValueError for another system, and for a temperature with which all texts are equal."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, with which all texts are equal: give one above 0")
    lm = load(run, precision=precision, engine=engine)
    if lm.system.name != "mdlm":
        raise ValueError(f"{run} is a model of {lm.system.name}; the caches belong to mdlm")
    return lm


def run(
    run: str,
    eso: str | None = None,
    caches: list[str] | None = None,
    sampler: str = "threshold",
    tau: float | None = None,
    num_steps: int | None = None,
    confidence: str | None = None,
    block_length: int = 32,
    refresh: int | None = None,
    length: int | None = None,
    batch: int = 1,
    rounds: int = 11,
    seeds: int = 6,
    temperature: float = 1.0,
    top_p: float = 1.0,
    precision: str = "float32",
    engine: str = "auto",
) -> dict[str, Any]:
    """Compare the approximate caches of an MDLM with the sampler without a cache: agreement, fed positions and time.

    Every text has its own seed, and draws the same random numbers with a cache as without one. The shares of equal
    tokens and the KL are means over the texts, with standard errors. KL is that of each candidate's distribution from
    a full pass over the same tokens, averaged over the passes of a text.

    Args:
        run: run or checkpoint of an MDLM.
        eso: run or checkpoint of an Eso-LM (B), whose exact cache is timed too, with a window of block_length.
        caches: none, prefix, dual, delayed, frozen and "frozen, last_pass"; all by default.
        sampler: threshold or confidence.
        tau: confidence at which sampler threshold keeps a token; 0.9 by default.
        num_steps: steps of sampler confidence; one token at a time by default.
        confidence: probability, entropy or margin.
        block_length: positions of a block.
        refresh: passes from one full pass to the next; the default of each cache if not given.
        length: tokens of a sample; the training length by default.
        batch: samples per batch.
        rounds: timed batches of each case; agreement and fed positions also include the warm-up batch.
        seeds: batches over which the KL is averaged.
        temperature: sampling temperature above 0; a greedy sampler would draw the same text with every seed.
        top_p: nucleus of the draws.
        precision: float32, bf16, int8, int4 or auto.
        engine: native, torch or auto.
    """
    lm = cached(run, temperature, precision, engine)
    length = lm.net.config.length if length is None else length
    given = {"tau": tau, "num_steps": num_steps, "confidence": confidence}
    shared = {name: value for name, value in given.items() if value is not None}
    drawn = {"temperature": temperature, "top_p": top_p}
    shared |= {"sampler": sampler, **drawn}
    names = list(dict.fromkeys([NONE, *(caches or [*CHOICES["cache"], FREECACHE])]))
    cases = settings(names, {**shared, "block_length": block_length}, refresh)
    models = {name: (lm, options) for name, options in cases.items()}
    if eso is not None:
        exact = load(eso, precision=precision, engine=engine)
        models[ONE] = exact, {"sampler": "first_hitting", **drawn}
        models[DYNAMIC + sampler] = exact, {**shared, "window": block_length}
    found = measure(models, length, batch, rounds, seeds)
    table(f"{sampler}, {length} tokens in blocks of {block_length}, batch {batch}", COLUMNS, named(found))
    return {"length": length, "batch": batch, "caches": found}
