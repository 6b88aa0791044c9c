"""The sampling options, declared once for Python, the command line and the benchmarks.

Imports nothing heavy, so that `esolm sample --help` answers at once.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

OF_SOME_SAMPLERS = (
    "alpha_0", "num_steps", "parallelism", "order", "window", "confidence", "tau", "block_length", "cache", "refresh",
    "freeze",
)  # fmt: skip
"""Options that only some samplers take; a system lists them in `System.samplers`."""

CHOICES = {
    "confidence": ("probability", "entropy", "margin"),
    "cache": ("none", "prefix", "dual", "delayed", "frozen"),
    "freeze": ("next_pass", "last_pass"),
    "match": ("generated", "text"),
}
"""Options that take one of several names."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample. Null, the value of an option that is not given, leaves the choice to the system."""

    sampler: str | None = None
    """ancestral, first_hitting, block, left_to_right, order, speculative, confidence or threshold, as far as the system
    has them."""
    alpha_0: float | None = None
    """Share of the tokens that diffusion generates; null is the share the model was trained with."""
    num_steps: int | None = None
    """Steps T, of diffusion or of the sampler confidence; null draws one token at a time."""
    parallelism: int | None = None
    """Sampler block: tokens drawn together."""
    order: Sequence[int] | None = None
    """Samplers order and speculative: all positions in turn, as in 2,0,1."""
    window: int | None = None
    """Sampler speculative: tokens drafted ahead of a pass; null adapts it. Samplers confidence and threshold of esolm:
    undecided positions, from the left, that a pass may choose from; null takes all."""
    confidence: Literal["probability", "entropy", "margin"] | None = None
    """Samplers confidence and threshold: probability of the drawn token (null), exp(-entropy) of its distribution, or
    probability of the likeliest token minus that of the second."""
    tau: float | None = None
    """Sampler threshold: every token of at least this confidence is kept; null is 0.9."""
    block_length: int | None = None
    """Samplers confidence and threshold of mdlm: positions are denoised in blocks of this length, from left to right;
    null is one block."""
    cache: Literal["none", "prefix", "dual", "delayed", "frozen"] | None = None
    """Approximate KV cache of mdlm: none (null), prefix and dual (Fast-dLLM), delayed (dKV-Cache) or frozen
    (FreeCache)."""
    refresh: int | None = None
    """Passes from one full pass to the next: of a block with cache prefix, dual (null: only its first) and delayed
    (null: 8), of the sample with cache frozen (null: only its first)."""
    freeze: Literal["next_pass", "last_pass"] | None = None
    """Cache frozen: keys and values of a block are kept from the pass after its last tokens (null), or, as FreeCache
    does, from the pass that draws them, where they are still masks."""
    given_order: Literal["ascending", "random"] = "ascending"
    """Order among the given tokens."""
    regex: str | Sequence[str | None] | None = None
    """What is generated must match this regular expression; for a text with several blanks also one for each, null or
    empty where anything may stand."""
    json_schema: str | Mapping[str, Any] | Sequence[Any] | None = None
    """What is generated must be JSON of this schema; as regex, one for all blanks or one for each."""
    match: Literal["generated", "text"] | None = None
    """What regex or json_schema describes: what is generated, which is each blank or what follows the prompt (null), or
    the whole text with what is given in it."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability mass."""
    top_k: int | None = None
    """Keep this many of the most likely tokens."""
    seed: int = 0
    """Determines every sample, each on its own."""
    batch_size: int = 32
    """Samples computed together; their text does not depend on it."""

    def __post_init__(self) -> None:
        if self.alpha_0 is not None and not 0 <= self.alpha_0 <= 1:
            raise ValueError(f"alpha_0 is {self.alpha_0}; it must be between 0 and 1")
        if self.tau is not None and not 0 <= self.tau <= 1:
            raise ValueError(f"tau is {self.tau}; it must be between 0 and 1")
        for name in ("num_steps", "parallelism", "window", "batch_size", "block_length", "refresh"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


class SamplingKeywords(TypedDict, total=False):
    """`SamplingOptions` as keyword arguments, for editors and type checkers; a test compares the two."""

    sampler: str | None
    alpha_0: float | None
    num_steps: int | None
    parallelism: int | None
    order: Sequence[int] | None
    window: int | None
    confidence: Literal["probability", "entropy", "margin"] | None
    tau: float | None
    block_length: int | None
    cache: Literal["none", "prefix", "dual", "delayed", "frozen"] | None
    refresh: int | None
    freeze: Literal["next_pass", "last_pass"] | None
    given_order: Literal["ascending", "random"]
    regex: str | Sequence[str | None] | None
    json_schema: str | Mapping[str, Any] | Sequence[Any] | None
    match: Literal["generated", "text"] | None
    temperature: float
    top_p: float
    top_k: int | None
    seed: int
    batch_size: int


def given_options(options: Mapping[str, Any], method: Callable[..., Any]) -> SamplingOptions:
    """The sampling options of a call of a method; raises TypeError, with a near name, for one that does not exist."""
    fields = SamplingOptions.__dataclass_fields__
    for name in options:
        if name not in fields:
            near = difflib.get_close_matches(name, [*inspect.signature(method).parameters, *fields], 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(fields)}"
            raise TypeError(f"no sampling option {name!r}: {hint}")
    return SamplingOptions(**options)
