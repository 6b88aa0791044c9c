"""What is measured of the runs and models of this experiment."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import esolm
from esolm.core.randomness import Randomness
from esolm.metrics.molecules import molecules as measured
from esolm.metrics.samples import read_samples
from esolm.model import LanguageModel
from esolm.storage.models import read_model
from esolm.training.runs import read_metrics
from esolm.tune.dpo import DpoObjective, PairBatches, read_pairs
from esolm.tune.estimators import Estimator
from esolm.tune.options import Dpo, Rollout
from esolm.tune.reference import Reference
from esolm.tune.rewards import Molecules, sudoku
from esolm.tune.rollout import Prompts, draw

ATOMS = 16
"""The first percentile of MOSES: with fewer atoms a molecule does not count as whole."""


def curve(run: Path) -> list[dict[str, Any]]:
    """Rewards of the steps of a run against the tokens that its network was fed; time by its parts."""
    tokens, found = 0, []
    for record in (each for each in read_metrics(run) if "reward" in each):
        tokens += sum(record["network_tokens"].values())
        reward = record["reward"]
        parts = {key: round(value, 4) for key, value in reward.get("parts", {}).items()}
        seconds = {key: round(value, 3) for key, value in record["time"]["parts"].items()}
        about = {"step": record["step"], "network_tokens": tokens, "reward": round(reward["mean"], 4)}
        found.append({**about, "distinct": reward["distinct"], **parts, "seconds": seconds})
    return found


def molecules(file: Path, train: Path) -> dict[str, Any]:
    """Validity, size, uniqueness and novelty of samples, and the mean QED of the whole ones."""
    found = measured(str(file), str(train), "prediction")
    texts = [sample["prediction"] for sample in read_samples(file)]
    whole = [parts["qed"] for parts in Molecules(atoms=ATOMS)(texts, [{}] * len(texts)) if parts["whole"]]
    return {**found, "qed": statistics.fmean(whole) if whole else None}


def solved(model: Path, puzzles: Path) -> dict[str, float]:
    """The share of puzzles that each sampler solves."""
    lm = esolm.load(model, which="last", precision="float32")
    prompts = Prompts.read(str(puzzles), lm, Rollout(blank="_"))
    ways: dict[str, dict[str, Any]] = {
        "random": {"sampler": "first_hitting", "alpha_0": 1.0},
        "left_to_right": {"sampler": "left_to_right"},
        "confidence": {"sampler": "confidence", "temperature": 0.0},
    }
    found = {}
    for name, options in ways.items():
        texts = lm.sample(tokens=prompts.rows, batch_size=128, **options).texts
        found[name] = statistics.fmean(parts["solved"] for parts in sudoku(texts, prompts.data))
    return found


@torch.no_grad()
def estimators(model: Path, number: int) -> dict[str, Any]:
    """Each estimate of log p minus the exact value: its mean and standard deviation over samples, in nats.

    `passes` counts network calls, `tokens` the tokens fed for one sample. The spread of the elbo over its own draws is
    `noise`.
    """
    stored = read_model(model)
    lm = LanguageModel(*stored)
    found: dict[str, Any] = {}
    kinds = [("onepass", 1), *(("stepmerge", n) for n in (2, 4, 8, 16, 32)), *(("elbo", n) for n in (1, 4, 16))]
    for name, rollout in {"parallel": Rollout(num_steps=16), "one by one": Rollout(sampler="first_hitting")}.items():
        prompts = Prompts.read(None, lm, Rollout(prompt=">"))
        drawn = draw(lm, prompts.rows * number, len(prompts.rows[0]), rollout.sampling(3), 0, number)

        def value(kind: str, n: int, seed: int = 0, drawn: Any = drawn) -> Tensor:
            estimate = Estimator(lm.system, kind, segments=n, draws=n)
            return estimate(lm.net, drawn.batch, drawn.schedule, Randomness(seed, 0, number)).sum(1).double()

        exact = value("exact", 1)
        rows = {"exact": {"nats": -exact.mean().item(), "sd of log p": exact.std().item()}}
        for kind, n in kinds:
            change = value(kind, n) - exact
            about = {
                "bias": change.mean().item(),
                "sd": change.std().item(),
                "stderr": change.std().item() / number**0.5,
            }
            if kind == "elbo":
                again = value(kind, n, 1) - exact
                about["noise"] = ((change - again).square().mean() / 2).sqrt().item()
            rows[f"{kind} {n}"] = {**about, "passes": n if kind == "elbo" else 1}
        found[name] = {kind: {k: round(v, 4) for k, v in about.items()} for kind, about in rows.items()}
    return found


@torch.no_grad()
def margins(base: Path, run: Path, file: Path, number: int) -> dict[str, Any]:
    """Variance over orders of DPO's margin (u - v) of a pair: with common orders, independent ones, and the elbo."""
    lm, tuned = LanguageModel(*read_model(base)), read_model(run, which="last").net
    pairs = read_pairs(str(file), lm)[:number]
    batch, found = PairBatches(pairs, len(pairs)).batch(0), {}
    for estimator in ("exact", "elbo"):
        for common in (True, False):
            options = Dpo(beta=1.0, estimator=estimator, common=common)  # type: ignore[arg-type]
            objective = DpoObjective(options, lm.system, Reference(lm.net))
            values = []
            for seed in range(8):
                rng = Randomness(seed, 0, len(pairs))
                u, v = (objective.log_p(tuned, batch, rng) - objective.log_p(lm.net, batch, rng)).chunk(2)
                values.append((u - v).double())
            each = torch.stack(values)
            found[f"{estimator}, {'common' if common else 'independent'}"] = {
                "variance": round(each.var(0).mean().item(), 4),
                "mean": round(each.mean().item(), 4),
                "stderr": round(each.mean(0).std().item() / math.sqrt(len(pairs)), 4),
            }
    return found
