"""Speculative sampling against one token at a time: passes, acceptance and time of a trained model.

Shapes: B batch, d drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model import Event, LanguageModel, load
from .report import named, table
from .timing import interleaved, ratio, summary

ONE, ADAPTIVE = "one token", "adaptive"
QUARTERS = 4
COLUMNS = {
    "window": "name", "passes": "passes", "rows/pass": "rows_per_pass", "× faster": "faster",
    "quartiles": "faster_quartiles", "s/sample": "seconds_per_sample", "accepted at 1, 2, 4, 8": "near",
}  # fmt: skip


@dataclass
class DraftTally:
    """Passes and rows of the samples of one case, and its judged and accepted drafts by distance and by quarter."""

    nfe: list[int] = field(default_factory=list)
    fed: int = 0
    drafted: int = 0
    distance: dict[int, list[int]] = field(default_factory=dict)  # from the last verified token: judged, accepted
    quarter: dict[int, list[int]] = field(default_factory=dict)

    def add(self, events: list[Event]) -> None:
        """Add the passes of one batch."""
        drawn = torch.stack([event.committed.drawn.sum(1) for event in events])  # [passes, B]
        nfe = (drawn > 0).sum(0)
        self.nfe += nfe.tolist()
        if events[0].committed.drafts is None:  # each pass feeds one token and one mask, the first only the mask
            self.fed += int((2 * nfe - 1).sum())
        before = drawn.cumsum(0) - drawn
        for event, done in zip(events, before, strict=True):
            if (drafts := event.committed.drafts) is not None:
                self.fed += int(drafts.fed.sum())
                self.drafted += int(drafts.drawn.sum())
                self.judge(drafts.drawn, drafts.accepted, done, drawn.sum(0))

    def judge(self, real: Tensor, accepted: Tensor, done: Tensor, total: Tensor) -> None:
        """Count the judged drafts of a pass: those up to and including the first rejection."""
        for row, kept in enumerate(accepted.tolist()):
            for j in range(min(kept + 1, int(real[row].sum()))):
                at = (QUARTERS * (int(done[row]) + j)) // int(total[row])
                for counts in (self.distance.setdefault(j, [0, 0]), self.quarter.setdefault(at, [0, 0])):
                    counts[0] += 1
                    counts[1] += j < kept

    def report(self) -> dict[str, Any]:
        """Return means over samples and the acceptance rates of judged drafts."""
        passes = torch.tensor(self.nfe, dtype=torch.float64)
        judged, accepted = (sum(counts[k] for counts in self.distance.values()) for k in (0, 1))
        return {
            "passes": round(passes.mean().item(), 2),
            "passes_error": round((passes.std() / len(passes) ** 0.5).item(), 2) if len(passes) > 1 else None,
            "rows_per_pass": round(self.fed / sum(self.nfe), 2),
            "drafted": self.drafted,
            "accepted": accepted,
            "rejected": judged - accepted,
            "acceptance_by_distance": [_share(self.distance[j]) for j in sorted(self.distance)],
            "acceptance_by_quarter": [_share(self.quarter[j]) for j in sorted(self.quarter)],
        }


def _share(counts: list[int]) -> dict[str, Any]:
    return {"judged": counts[0], "accepted": round(counts[1] / counts[0], 3)}


def measure(
    lm: LanguageModel, alpha_0: float, windows: list[int], batch: int, length: int, rounds: int, shape: dict[str, Any]
) -> dict[str, Any]:
    """Time every window and one token at a time in turn, at one alpha_0."""
    cases: dict[str, dict[str, Any]] = {ONE: {"sampler": "first_hitting"}}
    cases |= {str(w): {"sampler": "speculative", "window": w} for w in windows}
    cases |= {ADAPTIVE: {"sampler": "speculative"}}
    tallies = {name: DraftTally() for name in cases}

    def draw(name: str, i: int) -> None:
        options = {"alpha_0": alpha_0, **shape, **cases[name]}
        tallies[name].add(list(lm.stream(None, batch, length, seed=i, batch_size=batch, **options)))

    seconds = interleaved({name: partial(draw, name) for name in cases}, rounds)
    found = {}
    for name, tally in tallies.items():
        found[name] = tally.report()
        found[name]["seconds_per_sample"] = round(summary(seconds[name]).median / batch, 4)
        found[name] |= ratio(seconds[ONE], seconds[name]).record("faster", 3, "faster_quartiles")
    return {"alpha_0": alpha_0, "length": length, "batch": batch, "windows": found}


def run(
    run: str,
    windows: list[int] | None = None,
    alpha_0: list[float] | None = None,
    lengths: list[int] | None = None,
    batch: int = 1,
    rounds: int = 9,
    temperature: float = 1.0,
    top_p: float = 1.0,
    which: str = "best",
    precision: str = "float32",
    engine: str = "auto",
) -> dict[str, Any]:
    """Measure passes, acceptance and time of speculative sampling against one token at a time, on an Eso-LM (B).

    Args:
        run: run or checkpoint.
        windows: tokens drafted per pass; 2, 4, 8 and 16 by default. The adaptive window is always included.
        alpha_0: values of alpha_0 for the order; 1, 0.25 and 0 by default.
        lengths: sample lengths; the training length by default.
        batch: samples per batch.
        rounds: timed batches of each case; passes and acceptance also include the warm-up batch.
        temperature: sampling temperature.
        top_p: nucleus mass.
        which: checkpoint of the run, best or last.
        precision: float32, bf16, int8, int4 or auto.
        engine: native, torch or auto.
    """
    lm = load(run, which=which, precision=precision, engine=engine)
    shape = {"temperature": temperature, "top_p": top_p}
    found = []
    for length in lengths or [lm.net.config.length]:
        for share in alpha_0 or [1.0, 0.25, 0.0]:
            result = measure(lm, share, windows or [2, 4, 8, 16], batch, length, rounds, shape)
            found.append(result)
            rows = named(result["windows"])
            for row in rows:
                near = row["acceptance_by_distance"]
                row["near"] = " ".join(f"{near[j]['accepted']:.2f}" for j in (0, 1, 3, 7) if j < len(near))
            table(f"alpha_0 = {share:g}, {length} tokens, batch {batch}", COLUMNS, rows)
    return {"cases": found}
