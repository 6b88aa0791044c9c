"""`esolm tune grpo`: sample, reward, learn.

A step draws batch.size samples from a copy of the network for inference, rewards them, and makes grpo.updates updates.
All of it is a function of the seed, the step and the weights, so a resumed run repeats it bit for bit.

Shapes: B batch, L length, P prompts, G samples of each.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.randomness import Randomness, fold
from ..data import Manifest
from ..model import LanguageModel
from ..net.denoiser import Denoiser
from ..net.native.engine import fold_for
from ..net.protocol import Forward
from ..runtime import files, machine
from ..runtime.distributed import Ranks
from ..training import parallel
from ..training.config import RunConfig
from ..training.trainer import Record
from .config import GrpoConfig
from .estimators import Estimator
from .grpo import GrpoObjective, advantages, shared
from .pool import Pool, Scored
from .reference import Reference
from .rollout import Counted, Drawn, Prompts, RolloutBatches, draw
from .session import TuneSession, shuffled


class Rolled(NamedTuple):
    """The samples of this rank, number `first` and those after it, and the rewards of all ranks."""

    first: int
    drawn: Drawn
    texts: list[str]
    scored: list[Scored]
    numbers: list[int]  # the row of data of each sample
    seconds: dict[str, float]


class GrpoSession(TuneSession):
    """The part of one rank in a run of `esolm tune grpo`."""

    config: GrpoConfig

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        assert isinstance(config, GrpoConfig)
        if config.batch.size % config.grpo.group:
            raise ValueError(
                f"batch.size {config.batch.size} counts samples and must be a multiple of grpo.group "
                f"{config.grpo.group}"
            )
        self.prompts: Prompts
        # Before the run folder is created: with a wrong reward in it, the corrected command would be refused.
        self.pool = ranks.everywhere(lambda: Pool(config.reward))
        try:
            super().__init__(config, ranks)
            self.estimator = Estimator.of(config.grpo, self.system, config.rollout)
            self.reference = Reference.of(config, self.network, self.compute, ranks) if config.grpo.beta else None
            ranks.everywhere(self.try_out)
        except BaseException:
            self.pool.close()
            raise

    def read(self, config: RunConfig) -> Any:
        assert isinstance(config, GrpoConfig)
        self.prompts = Prompts.read(config.data, self.model, config.rollout)
        return {"rows": self.prompts.rows, "data": self.prompts.data}

    def sources(self, config: RunConfig, manifest: Manifest, ranks: Ranks) -> tuple[Prompts, Prompts]:
        assert isinstance(config, GrpoConfig)
        config.batch.micro_batches(ranks.rank, ranks.world)  # raises ValueError if the batch does not divide
        valid = config.rollout.valid
        return self.prompts, self.prompts if valid is None else Prompts.read(valid, self.model, config.rollout)

    @torch.no_grad()
    def try_out(self) -> None:
        """Raise ValueError before the first step if the system has no such likelihood or sampler."""
        rows = self.prompts.rows[:1]
        request, schedule, rng = self.model.planned(rows, len(rows[0]), self.config.rollout.sampling(0), 0, 1)
        self.estimator(self.model.net, Batch(request.x, request.valid, request.given), schedule, rng)

    def inference(self) -> LanguageModel:
        """The current weights for sampling."""
        rollout, trained = self.config.rollout, self.network
        if self.ranks.world > 1 and self.compute.parallel == "fsdp":  # rollouts need all weights on every rank
            plain = self.model.net
            assert isinstance(plain, Denoiser)
            parallel.gather(trained, plain, self.ranks.device)
            trained = plain
        net = fold_for(trained, rollout.precision, rollout.engine, self.system.timed)
        return replace(self.model, net=net, system=self.system)

    def roll(self, prompts: Prompts, numbers: list[int], seed: int) -> Rolled:
        """Sample one text for each of the numbered rows, each rank its share, and reward them."""
        start, total = time.perf_counter(), len(numbers)
        lm = self.inference()
        refreshed = time.perf_counter()
        share = self.ranks.share(total)
        mine = [numbers[i] for i in share]
        longest = max(len(prompts.rows[i]) for i in numbers)
        options = self.config.rollout.sampling(seed)
        drawn = draw(lm, [prompts.rows[i] for i in mine], longest, options, share.start, total)
        sampled = time.perf_counter()
        scored = self.pool(drawn.texts, [prompts.data[i] for i in mine])
        texts = [text for part in self.ranks.gathered(drawn.texts) for text in part]
        every = [each for part in self.ranks.gathered(scored) for each in part]
        rewarded = time.perf_counter()
        seconds = {"refresh": refreshed - start, "sampling": sampled - refreshed, "reward": rewarded - sampled}
        return Rolled(share.start, drawn, texts, every, numbers, seconds)

    def step(self, net: Forward) -> Record:
        start, config, step = time.perf_counter(), self.config, self.learner.step
        group = config.grpo.group
        prompts = config.batch.size // group
        chosen = shuffled(step * prompts, prompts, len(self.prompts.rows), config.seed)
        rolled = self.roll(
            self.prompts, [i for i in chosen for _ in range(group)], fold(fold(config.seed, "roll"), step)
        )
        rewards = torch.tensor([each.reward for each in rolled.scored], dtype=torch.float64)
        if config.grpo.copies == "share":
            rewards = shared(rewards, rolled.texts)
        own = slice(rolled.first, rolled.first + len(rolled.drawn.texts))
        advantage = advantages(rewards.view(-1, group), config.grpo.advantage).flatten()[own]
        batches = RolloutBatches(rolled.drawn.batch, rolled.first)
        began = time.perf_counter()
        reference, fed = self.score(batches, rolled.drawn)
        learning = time.perf_counter()
        objective = GrpoObjective(
            config.grpo, self.estimator, rolled.drawn.schedule, advantage, rolled.first, reference
        )
        for number in range(config.grpo.updates):
            changed = self.update(net, objective, batches, last=number == config.grpo.updates - 1)
        seconds = {**rolled.seconds, "scoring": learning - began, "learning": time.perf_counter() - learning}
        record = self.record({**changed, **self.about(rolled), **self.policy(objective, rolled, fed)}, start)
        record["time"]["parts"] = seconds
        self.keep(rolled, record["step"])
        return record

    @torch.no_grad()
    def score(self, batches: RolloutBatches, drawn: Drawn) -> tuple[Tensor | None, int]:
        """Log-probabilities [B, L] of this rank's samples under the reference, and the tokens that it was fed."""
        if self.reference is None:
            return None, 0
        config, found = self.config, []
        key = fold(fold(config.seed, "train"), self.learner.step)  # as in `accumulate`: the draws of an elbo are common
        with self.reference.active() as net:
            counted = Counted(net)
            for first, size in config.batch.micro_batches(self.ranks.rank, self.ranks.world):
                batch = batches.batch(0, first, size).to(self.compute.device)
                schedule = drawn.schedule.rows(slice(first - batches.first, first - batches.first + size))
                with machine.autocast(batch.x.device, self.compute.precision):
                    rng = Randomness(key, first, config.batch.size)
                    found.append(self.estimator(counted, batch, schedule, rng))
        return torch.cat(found), counted.tokens

    def about(self, rolled: Rolled) -> Record:
        """Rewards and their parts, for metrics.jsonl."""
        good = [each for each in rolled.scored if each.error is None]
        values = torch.tensor([each.reward for each in good] or [0.0], dtype=torch.float64)
        names = sorted({name for each in good for name in each.parts})
        reward: dict[str, Any] = {"mean": values.mean().item(), "std": values.std(correction=0).item()}
        reward |= {"failed": len(rolled.scored) - len(good), "distinct": len({*rolled.texts}) / len(rolled.texts)}
        parts = {name: math.fsum(each.parts.get(name, 0.0) for each in good) / len(good) for name in names}
        errors = Counter(each.error for each in rolled.scored if each.error is not None).most_common(3)
        return {
            "reward": {**reward, **({"parts": parts} if parts else {})},
            **({"errors": dict(errors)} if errors else {}),
        }

    def policy(self, objective: GrpoObjective, rolled: Rolled, fed: int) -> Record:
        """Means over the drawn tokens of all updates, and the tokens that the network was fed, for metrics.jsonl."""
        sums, drawn = objective.sums, int(rolled.drawn.batch.scored.sum()) * self.config.grpo.updates
        names = [name for name in ("nats", "kl", "clipped") if name in sums]
        values = [*(sums[name] for name in names), drawn, rolled.drawn.fed, fed, sums["fed"]]
        *means, tokens, sampling, scoring, learning = self.ranks.sum(values)
        network = {"sampling": int(sampling), "scoring": int(scoring), "learning": int(learning)}
        policy = {name: value / max(tokens, 1) for name, value in zip(names, means, strict=True)}
        return {"policy": policy, "network_tokens": network}

    def keep(self, rolled: Rolled, step: int) -> None:
        """Write the samples of a step to the run folder, if it is due."""
        every = self.config.rollout.keep
        if not every or (step % every and step > 1) or self.ranks.rank:
            return
        folder = self.run / "samples"
        folder.mkdir(exist_ok=True)
        files.write(folder / f"step-{step:08d}.jsonl", lines(rolled.texts, rolled.scored, rolled.numbers))

    def validate(self, net: Forward) -> Record:
        """Rewards of the averaged weights on the same prompts with the same noise each time."""
        start, config = time.perf_counter(), self.config
        total = config.validation.batch_size * (config.validation.batches or 1)
        numbers = [i % len(self.held_out.rows) for i in range(total)]
        with self.learner.ema.applied(self.learner.net):
            rolled = self.roll(self.held_out, numbers, fold(config.seed, "valid"))
        found = self.about(rolled)["reward"]
        self.bound = -found["mean"]
        self.validation = {"loss": self.bound, "reward": found["mean"], "distinct": found["distinct"]}
        self.validation |= {"failed": found["failed"], **found.get("parts", {})}
        return {
            "step": self.learner.step,
            "validation": self.validation,
            "time": {"seconds": time.perf_counter() - start},
        }

    def close(self) -> None:
        self.pool.close()


def lines(texts: Sequence[str], scored: Sequence[Scored], numbers: Sequence[int]) -> str:
    """Samples as JSON lines: text, row of data, reward, parts, and the error of a failed one."""
    records = (
        {"text": text, "row": number, "reward": None if each.error else each.reward, **each.parts}
        | ({"error": each.error} if each.error else {})
        for text, each, number in zip(texts, scored, numbers, strict=True)
    )
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
