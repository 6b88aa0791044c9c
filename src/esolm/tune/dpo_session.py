"""`esolm tune dpo`: learn from pairs of answers."""

from __future__ import annotations

import time
from typing import Any

from ..data import Manifest
from ..net.protocol import Forward
from ..runtime.distributed import Ranks
from ..training import parallel
from ..training.config import RunConfig
from ..training.loss import check_finite, validate
from ..training.trainer import Record
from .config import DpoConfig
from .dpo import DpoObjective, Pair, PairBatches, read_pairs
from .reference import Reference
from .session import TuneSession


class DpoSession(TuneSession):
    """The part of one rank in a run of `esolm tune dpo`."""

    config: DpoConfig

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        assert isinstance(config, DpoConfig)
        if not config.data:
            raise ValueError("there are no pairs to learn from: give --data PAIRS.jsonl")
        self.pairs: list[Pair]
        super().__init__(config, ranks)
        self.reference = Reference.of(config, self.network, self.compute, ranks)
        self.objective()  # raises ValueError for a system without the likelihood

    def read(self, config: RunConfig) -> Any:
        self.pairs = read_pairs(config.data, self.model)
        return self.pairs

    def sources(self, config: RunConfig, manifest: Manifest, ranks: Ranks) -> tuple[PairBatches, PairBatches]:
        assert isinstance(config, DpoConfig)
        config.batch.micro_batches(ranks.rank, ranks.world)  # raises ValueError if the batch does not divide
        valid = self.pairs if config.dpo.valid is None else read_pairs(config.dpo.valid, self.model)
        return (
            PairBatches(self.pairs, config.batch.size, config.seed),
            PairBatches(valid, config.validation.batch_size),
        )

    def objective(self) -> DpoObjective:
        """The objective, with sums of its own."""
        return DpoObjective(self.config.dpo, self.system, self.reference)

    def step(self, net: Forward) -> Record:
        start, objective = time.perf_counter(), self.objective()
        changed = self.update(net, objective, self.batches)
        return self.record({**changed, "pairs": self.means(objective)}, start)

    def means(self, objective: DpoObjective) -> dict[str, float]:
        """Share of pairs in which the chosen answer gained more, the mean margin, and the gains, over all ranks."""
        names = ("accuracy", "margin", "chosen", "rejected")
        *sums, pairs = self.ranks.sum([objective.sums.get(name, 0.0) for name in (*names, "pairs")])
        return {name: value / max(pairs, 1) for name, value in zip(names, sums, strict=True)}

    def validate(self, net: Forward) -> Record:
        """Loss and accuracy of the averaged weights, on the same pairs with the same orders each time."""
        start, learner, objective = time.perf_counter(), self.learner, self.objective()
        learner.net.eval()
        with learner.ema.applied(learner.net):
            limit = self.config.validation.batches
            terms = validate(net, objective, self.held_out, limit, self.compute, self.ranks)
        parallel.forget(learner.net)
        check_finite({"validation dpo": terms["dpo"]}, learner.step, self.folder)
        self.bound = terms["dpo"]
        self.validation = {"loss": self.bound, "accuracy": terms["accuracy"], "margin": terms["margin"]}
        return {"step": learner.step, "validation": self.validation, "time": {"seconds": time.perf_counter() - start}}
