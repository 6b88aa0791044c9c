"""The model `esolm` of the lm-evaluation-harness. This module also runs the harness's command line with it:

    python -m esolm.interop.harness run --model esolm --model_args pretrained=stories --tasks …

`lm_eval` alone does not know the model, because it has no plugins. Likelihoods are those of `esolm score`: log p of a
continuation, with its context given and first in every order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError("esolm.interop.harness needs the lm-evaluation-harness: pip install 'esolm[eval]'") from error

from ..core.batch import Batch
from ..core.randomness import fold
from ..generation.collect import before_stop
from ..likelihood import scoring
from ..likelihood.orders import padded, windows
from ..likelihood.texts import Sequences
from ..model import load
from ..runtime.machine import pick_device
from ..sampling.events import until

DEFAULT_DEVICE = "cuda:0"
"""The default of the harness's command line, with or without a GPU."""
LEFT_TO_RIGHT = "left_to_right"


@register_model("esolm")
class HarnessModel(LM):
    """A run, a checkpoint, a model folder or a bundled model in the interface of the harness.

    estimator, num_orders, antithetic, num_draws, seed, alpha_0: as in `esolm score`. stride: new tokens in each window
    of a rolling likelihood, by default all. greedy: whether to check that a continuation is the greedy one, which takes
    one generation each. sampler, num_steps: the sampler of `generate_until`.
    """

    def __init__(
        self,
        pretrained: str,
        estimator: str = "iw",
        num_orders: int = 16,
        antithetic: bool = False,
        num_draws: int = 1,
        alpha_0: float | None = None,
        weights: str = "ema",
        which: str = "best",
        stride: int | None = None,
        greedy: bool = True,
        sampler: str | None = None,
        num_steps: int | None = None,
        max_gen_toks: int | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if device is None or (device == DEFAULT_DEVICE and not torch.cuda.is_available()):
            device = "auto"
        lm = load(pretrained, weights, which, str(pick_device(device)))
        self.lm = lm.at(alpha_0)
        self.length = lm.net.config.length
        self.estimator = estimator.replace("_", "-")
        if self.estimator not in scoring.ESTIMATORS:
            raise ValueError(f"no estimator {estimator!r}: choose one of {', '.join(scoring.ESTIMATORS)}")
        self.options: dict[str, Any] = {"num_orders": num_orders, "antithetic": antithetic, "num_draws": num_draws}
        self.sampling = {"sampler": sampler, "num_steps": num_steps}
        self.stride, self.greedy, self.seed = self.length if stride is None else stride, greedy, seed
        self.max_gen_toks = max(1, self.length // 4) if max_gen_toks is None else max_gen_toks
        self.batch_size = int(str(batch_size)) if str(batch_size).isdecimal() else 32  # also for "auto"
        self._device = lm.net.device

    @property
    def tokenizer_name(self) -> str:
        """The key of the harness's cache of requests."""
        return self.lm.tokenizer.sha256

    def get_model_info(self) -> dict[str, Any]:
        """The model's entry in the results file."""
        return {"system": self.lm.system.name, "estimator": self.estimator, **self.options, "seed": self.seed}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether greedy sampling gives the continuation."""
        pairs = [self._pair(*request.args) for request in requests]
        values = self._sum([self._windows(*pair) for pair in pairs])
        same = self._is_greedy(pairs) if self.greedy else [False] * len(pairs)
        found = list(zip(values, same, strict=True))
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts in windows of the training length; each token is scored once."""
        texts = []
        for request in requests:
            ids = self.lm.tokenizer.encode(request.args[0])
            parts = windows(len(ids), self.length, self.stride) if ids else []
            texts.append([(ids[start:end], first - start) for start, first, end in parts])
        found = self._sum(texts)
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the end-of-sequence token or a stop text."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for key, places in groups.items():
            options = json.loads(key)
            made = self._continue([requests[i].args[0] for i in places], options)
            for i, text in zip(places, made, strict=True):
                found[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """The tokens of both and the number of context tokens; the context is truncated on the left to fit."""
        stem = context.rstrip()  # a space before a word is part of the word's token
        ids = self.lm.tokenizer.encode(context + continuation)
        if not ids:
            raise ValueError("context and continuation are both empty: give at least one token to score")
        count = min(len(self.lm.tokenizer.encode(stem)), len(ids) - 1)
        room = self.length - (len(ids) - count)
        cut = max(0, count - (room if room >= 0 else self.length // 2))
        return ids[cut:], count - cut

    def _windows(self, ids: list[int], count: int) -> list[tuple[list[int], int]]:
        """One window, or for a longer continuation several that score half their length each."""
        if len(ids) <= self.length:
            return [(ids, count)]
        found, half = [], max(1, self.length // 2)
        for first in range(count, len(ids), half):
            start, end = max(0, min(first + half, len(ids)) - self.length), min(first + half, len(ids))
            found.append((ids[start:end], first - start))
        return found

    def _sum(self, texts: Sequence[Sequence[tuple[list[int], int]]]) -> list[float]:
        """log p of each text, the sum over its windows: their tokens, and how many of them are context."""
        parts = [(owner, *window) for owner, found in enumerate(texts) for window in found]
        values = self._score([ids for _, ids, _ in parts], [count for _, _, count in parts])
        sums: dict[int, float] = {}
        for (owner, _, _), value in zip(parts, values, strict=True):
            sums[owner] = sums.get(owner, 0.0) + value
        return [sums.get(owner, 0.0) for owner in range(len(texts))]

    def _score(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[float]:
        """log p of each row after its first `counts` tokens, whatever the batch size."""
        values, groups = [0.0] * len(rows), dict[int, list[int]]()
        step = math.lcm(self.lm.system.block_size, 8)  # rows of similar length need little padding
        for i, row in enumerate(rows):
            groups.setdefault(min(-(-len(row) // step) * step, max(self.length, len(row))), []).append(i)
        for wide, places in groups.items():
            x, valid = (F.pad(t, (0, wide - t.shape[1])) for t in padded([rows[i] for i in places]))
            given = torch.arange(wide) < torch.tensor([counts[i] for i in places])[:, None]
            kept = None if valid.all() else valid, given if given.any() else None
            seed = self.seed if wide == self.length else fold(self.seed, wide)
            sequences = Sequences("harness", Batch(x, *kept), 0)
            options = {**self.options, "seed": seed, "batch_size": self.batch_size}
            for i, nats in zip(places, scoring.score(self.lm, sequences, self.estimator, **options).nats.tolist()):
                values[i] = -nats
        return values

    def _is_greedy(self, pairs: Sequence[tuple[list[int], int]]) -> list[bool]:
        """Whether each continuation is the greedy one, left to right if the system can sample so."""
        rows = [[*ids[:count], *[None] * (len(ids) - count)] for ids, count in pairs]
        sampler = LEFT_TO_RIGHT if LEFT_TO_RIGHT in self.lm.system.samplers else None
        made = self._sample(rows, temperature=0.0, sampler=sampler)
        return [found[: len(ids)] == ids for found, (ids, _) in zip(made, pairs, strict=True)]

    def _continue(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Continuations of contexts with the same options, named as in the harness or in transformers."""
        stops = options.get("until") or []
        count = int(options.get("max_gen_toks") or options.get("max_new_tokens") or self.max_gen_toks)
        if not 1 <= count < self.length:
            raise ValueError(
                f"max_gen_toks is {count}; it must be from 1 to {self.length - 1}, below the training length"
            )
        encoded = [self.lm.tokenizer.encode(context)[count - self.length :] for context in contexts]
        draw: dict[str, Any] = {"temperature": 0.0}
        if options.get("do_sample") or float(options.get("temperature") or 0) > 0:
            draw = {"temperature": float(options.get("temperature", 1.0)), "top_p": float(options.get("top_p", 1.0))}
            draw["top_k"] = int(options["top_k"]) if options.get("top_k") else None
        rows = [[*ids, *[None] * count] for ids in encoded]
        made = self._sample(rows, **{**self.sampling, **draw})
        end = self.lm.tokenizer.eos_id
        texts = [self.lm.tokenizer.decode(until(ids[len(c) : len(c) + count], end)) for ids, c in zip(made, encoded)]
        stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        return [before_stop(text, stops) for text in texts]

    def _sample(self, rows: Sequence[Sequence[int | None]], **options: Any) -> list[list[int]]:
        """Sample the tokens that are None; rows are extended to whole blocks."""
        block = self.lm.system.block_size
        rows = [[*row, *[None] * (-len(row) % block)] for row in rows]
        options = {**options, "seed": self.seed, "batch_size": self.batch_size}
        return self.lm.sample(tokens=rows, **options).tokens if rows else []


def main() -> None:
    """Run the harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
