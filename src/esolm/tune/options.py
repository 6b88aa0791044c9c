"""The option groups of `esolm tune`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from ..sampling.options import SamplingOptions

ADAPTIVE = ("confidence", "threshold")
"""Samplers whose schedule depends on the tokens."""


def _within(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {value}; it must be {limits}")


@dataclass(frozen=True)
class Grpo:
    """The objective of `esolm tune grpo`."""

    group: int = 8
    """Samples of each prompt; batch.size counts samples and must be a multiple of it."""
    estimator: Literal["exact", "onepass", "stepmerge", "elbo"] = "exact"
    """Log-likelihood of a sample: exact given its schedule; onepass (d1), every token as if the whole completion were
    masked; stepmerge (d2), the schedule in `segments` steps; elbo, a bound by `draws` random masks."""
    segments: int = 8
    """Estimator stepmerge: steps that the schedule is merged into."""
    draws: int = 4
    """Estimator elbo: masks drawn for each sample."""
    ratio: Literal["token", "sequence", "geometric"] = "token"
    """What is clipped: the ratio of new to old probability of each token (GRPO), of the whole sample, or its geometric
    mean over the tokens (GSPO)."""
    clip: float = 0.2
    """Ratios are clipped to 1 - clip .. 1 + clip_high."""
    clip_high: float | None = None
    """Null is the same as clip."""
    advantage: Literal["normalised", "centred", "raw"] = "normalised"
    """Reward minus the group's mean, over the group's standard deviation (GRPO); reward minus the mean of the others of
    the group, which leaves the gradient unbiased; or the reward itself."""
    copies: Literal["keep", "share"] = "keep"
    """What equal texts of a step get: each its reward, or an equal share of it, so that one good sample written again
    and again is worth no more than once."""
    per: Literal["sequence", "token"] = "sequence"
    """The loss is a sum over tokens and a mean over samples, or a mean over all tokens of the batch."""
    beta: float = 0.02
    """Weight of the KL divergence from the initial model; 0 needs no reference."""
    updates: int = 1
    """Updates of the weights from the same samples."""

    def __post_init__(self) -> None:
        for name in ("group", "segments", "draws", "updates"):
            _within(f"grpo.{name}", getattr(self, name), 1)
        _within("grpo.beta", self.beta, 0)
        _within("grpo.clip", self.clip, 0, 1)
        _within("grpo.clip_high", self.clip if self.clip_high is None else self.clip_high, 0)
        if self.group == 1 and self.advantage != "raw":
            raise ValueError(f"grpo.advantage {self.advantage} compares the samples of a group: raise grpo.group to 2")


@dataclass(frozen=True)
class Rollout:
    """How `esolm tune grpo` samples."""

    sampler: str | None = None
    """As in `esolm sample`, except confidence and threshold: their order depends on the tokens."""
    alpha_0: float | None = None
    """Share of the tokens that diffusion generates; null is the share the model was trained with."""
    num_steps: int | None = None
    """Steps of diffusion; null draws one token at a time."""
    parallelism: int | None = None
    """Sampler block: tokens drawn together."""
    order: tuple[int, ...] | None = None
    """Samplers order and speculative: all positions in turn, as in [2,0,1]."""
    temperature: float = 1.0
    """Divides the logits, in the sampler as in the likelihood."""
    prompt: str = ""
    """The prompt of every sample, without data."""
    length: int | None = None
    """Tokens of a sample, prompt included; null is the length the model was trained with."""
    blank: str = "____"
    """In the `text` of a row of data: marks tokens to fill in."""
    tokens_per_blank: int = 1
    """Tokens that a blank stands for."""
    batch_size: int = 64
    """Samples computed together."""
    precision: Literal["float32", "bf16"] = "float32"
    """Of the network that samples, a copy of the trained one for inference."""
    engine: Literal["auto", "native", "torch"] = "auto"
    """Of the network that samples, as in `esolm sample`."""
    keep: int = 10
    """Steps between files of samples in the run folder; 0 writes none."""
    valid: str | None = None
    """JSON lines with the prompts of validations; null takes those of the data."""

    def __post_init__(self) -> None:
        if self.sampler in ADAPTIVE:
            raise ValueError(
                f"rollout.sampler {self.sampler} chooses its positions by the tokens drawn so far: its order is part "
                "of what was drawn, and the likelihood given the order is not that of the sample. Use ancestral, "
                "first_hitting, block, left_to_right, order or speculative"
            )
        if self.temperature <= 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}; it must be above 0: a greedy sample has no likelihood"
            )
        for name in ("tokens_per_blank", "batch_size"):
            _within(f"rollout.{name}", getattr(self, name), 1)
        _within("rollout.keep", self.keep, 0)

    def sampling(self, seed: int) -> SamplingOptions:
        """The sampling options of one step."""
        names = ("sampler", "alpha_0", "num_steps", "parallelism", "order", "temperature", "batch_size")
        return SamplingOptions(**{name: getattr(self, name) for name in names}, seed=seed)


@dataclass(frozen=True)
class Reward:
    """The reward of `esolm tune grpo`."""

    name: str = ""
    """molecules, regex, sudoku, countdown, judge, or package.module:function."""
    options: str = "{}"
    """Keyword arguments of the reward, as JSON: '{"pattern": "a+"}'."""
    workers: int = 2
    """Processes that compute rewards, on each rank."""
    timeout: float = 10.0
    """Seconds after which a call is stopped; its process is replaced."""
    loading: float = 600.0
    """Seconds after which a reward that is not ready, such as a model that hangs while it is loaded, stops the run."""
    chunk: int = 16
    """Texts of one call. If a call fails, each of its texts is tried alone."""

    def __post_init__(self) -> None:
        _within("reward.workers", self.workers, 1)
        _within("reward.chunk", self.chunk, 1)
        for name in ("timeout", "loading"):
            if getattr(self, name) <= 0:
                raise ValueError(f"reward.{name} is {getattr(self, name)}; it must be above 0")
        self.keywords()

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments."""
        try:
            found = json.loads(self.options)
        except ValueError as error:
            raise ValueError(f"reward.options is not JSON ({error}): give keyword arguments as {{'a': 1}}") from error
        if not isinstance(found, dict):
            raise ValueError(f"reward.options is {self.options}; it must be a JSON object")
        return found


@dataclass(frozen=True)
class Dpo:
    """The objective of `esolm tune dpo`."""

    beta: float = 0.1
    """Scale of the log-ratios: a small one allows the model to move further from the initial one."""
    estimator: Literal["exact", "elbo"] = "exact"
    """Log-likelihoods of the answers: exact given an order, or a bound by random masks."""
    orders: int = 1
    """Orders, or masks, drawn for each pair; their log-likelihoods are averaged."""
    common: bool = True
    """Both answers of a pair take the same orders or masks, and model and reference always do."""
    alpha_0: float | None = None
    """Share of diffusion in the orders; null is the share the model was trained with."""
    valid: str | None = None
    """JSON lines with the pairs of validations; null validates on the first pairs of the data."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(f"dpo.beta is {self.beta}; it must be above 0")
        _within("dpo.orders", self.orders, 1)
