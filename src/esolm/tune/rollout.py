"""Rollouts: samples with the schedules they were drawn by, and the rows of data that they answer.

Shapes: B batch, L length, K steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.batch import Batch
from ..core.order import Schedule
from ..generation.rows import Blanked, Row
from ..metrics.samples import read_records
from ..model import LanguageModel
from ..sampling.events import until
from ..sampling.options import SamplingOptions
from .options import Rollout

_ROWS = "give JSON lines with a `prompt`, or a `text` with blanks, each"


@dataclass(frozen=True)
class Prompts:
    """What is to be completed: token ids with None where a token is drawn, and the rows of data they come from."""

    rows: list[Row]
    data: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | None, lm: LanguageModel, options: Rollout) -> Prompts:
        """The prompts of a file, or, without one, the prompt of the options; raises ValueError, naming the line."""
        length = options.length or lm.net.config.length
        if not path:
            return cls([_completed(lm, options.prompt, length, "rollout.prompt")], [{"prompt": options.prompt}])
        records = read_records(Path(path), _ROWS)
        rows = [_row(lm, record, options, length, f"line {number} of {path}") for number, record in records.items()]
        lm.check_rows(rows)
        return cls(rows, list(records.values()))


def _row(lm: LanguageModel, record: dict[str, Any], options: Rollout, length: int, where: str) -> Row:
    if isinstance(text := record.get("text"), str) and options.blank in text:
        cut = Blanked.of(lm.tokenizer, text, options.blank)
        row = cut.row([size for size, *_ in cut.candidates(options.tokens_per_blank)])
        if len(row) > length:
            raise ValueError(f"{where} has {len(row)} tokens, more than the {length} of a sample: shorten it")
        return row
    if not isinstance(prompt := record.get("prompt"), str):
        raise ValueError(f"{where} has neither a `prompt` nor a `text` with {options.blank!r}: {_ROWS}")
    return _completed(lm, prompt, length, where)


def _completed(lm: LanguageModel, prompt: str, length: int, where: str) -> Row:
    ids = lm.tokenizer.encode(prompt) if prompt else []
    if len(ids) >= length:
        raise ValueError(f"{where} has {len(ids)} tokens, which leaves nothing of the {length} of a sample: shorten it")
    return [*ids, *[None] * (length - len(ids))]


class Drawn(NamedTuple):
    """Samples and how they were drawn."""

    batch: Batch
    schedule: Schedule
    texts: list[str]
    fed: int  # tokens that went through the network


def draw(
    lm: LanguageModel, rows: Sequence[Row], longest: int, options: SamplingOptions, first: int, total: int
) -> Drawn:
    """Complete rows, which are samples first, first + 1, … of `total`, padded to `longest` tokens."""
    tokens, schedules, fed = [], [], 0
    for start in range(0, len(rows), options.batch_size):
        some = rows[start : start + options.batch_size]
        request, schedule, rng = lm.planned(some, longest, options, first + start, total)
        x = torch.where(request.given, request.x.cpu(), lm.system.mask_id)
        counted = Counted(lm.net)
        with torch.inference_mode():
            for step in lm.system.sample(counted, request, schedule, rng):
                row, column = step.drawn.nonzero(as_tuple=True)
                x[row, step.position[row, column]] = step.token.cpu()[row, column]
        tokens.append(torch.where(request.valid, x, 0))
        schedules.append(schedule)
        fed += counted.tokens
    x, schedule = torch.cat(tokens), joined(schedules)
    valid = torch.arange(longest) < schedule.lengths[:, None]
    batch = Batch(x, valid, valid & (schedule.step_of() < 0))
    return Drawn(batch, schedule, [text_of(lm, x[b], schedule, b) for b in range(len(x))], fed)


class Counted:
    """A network that counts the tokens it is fed, those in padding included."""

    def __init__(self, net: Any) -> None:
        self.net, self.tokens = net, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def __call__(self, tokens: Tensor, *more: Any, **options: Any) -> Tensor:
        self.tokens += tokens.shape[0] * tokens.shape[1]
        return self.net(tokens, *more, **options)


def joined(schedules: Sequence[Schedule]) -> Schedule:
    """The rows of several schedules of the same length."""
    most = max(schedule.sizes.shape[1] for schedule in schedules)
    sizes = [F.pad(schedule.sizes, (0, most - schedule.sizes.shape[1])) for schedule in schedules]
    parts = [(s.sigma, size, s.given, s.diffusion) for s, size in zip(schedules, sizes, strict=True)]
    return Schedule(*(torch.cat(column) for column in zip(*parts, strict=True)))


def text_of(lm: LanguageModel, x: Tensor, schedule: Schedule, row: int) -> str:
    """What a reward sees of a sample: what follows the prompt, up to the first EOS that was drawn. If tokens after the
    first drawn one are given, the whole text."""
    free = sorted(schedule.free(row))
    ids = x[: int(schedule.lengths[row])].tolist()
    kept = until(ids, lm.tokenizer.eos_id, set(free))
    first = free[0] if free else 0
    if first == 0 or free != list(range(first, len(ids))):
        return lm.tokenizer.decode(kept)
    return lm.tokenizer.decode_after(kept[first:], ids[first - 1])


@dataclass(frozen=True)
class RolloutBatches:
    """Samples `first`, first + 1, … of a step, as `training.loss.accumulate` takes them."""

    samples: Batch
    first: int

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """The samples first .. first + count of the step, counted over all ranks."""
        start = first - self.first
        return Batch(*(t[start : None if count is None else start + count] for t in self.samples if t is not None))

    def __len__(self) -> int:
        return 1
