"""`LanguageModel`: a network with its system and tokenizer, as `load` returns it.

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .core.draw import BadLogits
from .core.order import Schedule
from .core.randomness import Randomness, fold
from .data import Message, Tokenizer
from .likelihood import orders
from .likelihood.orders import LogProb
from .net.native.engine import fold_for
from .net.protocol import Network
from .runtime import machine
from .sampling.events import Event, Samples, Work, costs, until
from .sampling.options import SamplingOptions
from .sampling.request import Request, Step
from .storage.models import read_model
from .systems import System

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .sampling.options import SamplingKeywords

Row = list[int | None]
"""The tokens of a sample: given ids, and None where a token is to be drawn."""
BLANK = "____"


def load(
    path: str | Path,
    weights: str = "ema",
    which: str = "best",
    device: str = "cpu",
    precision: str | None = None,
    engine: str = "auto",
) -> LanguageModel:
    """Load the model of a run folder, a checkpoint, a model folder (`esolm export`, `esolm convert`, transformers), or
    a bundled model by its name, such as `stories`.

    weights: `ema`, or `model` for the raw ones. which: `best` (lowest validation loss) or `last` checkpoint of a run.
    device: `auto` (a GPU if there is one), `cpu`, `cuda`, `mps`.
    precision: `float32`, `bf16`, `int8` and `int4` (weights only), or `auto` (bf16 where the machine is fast at it)
    convert the network for inference, which makes it faster and read-only; None leaves it as it was trained.
    engine: with a precision, `native` runs sampling in the native library, `torch` in PyTorch, and `auto` in the native
    library if it was built and the CPU has AVX2.
    """
    machine.settle()
    place = machine.pick_device(device)
    stored = read_model(path, weights, which, str(place))
    net: Network = stored.net
    if precision is None and engine != "auto":
        raise ValueError(f"engine {engine} needs a precision: float32, bf16, int8, int4 or auto")
    if precision is not None:
        net = fold_for(stored.net, machine.pick_weights(precision, place), engine, stored.system.timed)
    return LanguageModel(net, stored.system, stored.tokenizer)


@dataclass(frozen=True)
class LanguageModel:
    """Sample, infill and score with one network."""

    net: Network
    system: System
    tokenizer: Tokenizer

    def sample(
        self,
        prompt: str | Sequence[str] | None = None,
        num_samples: int | None = None,
        length: int | None = None,
        *,
        tokens: Sequence[Sequence[int | None]] | None = None,
        part: range | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> Samples:
        """Generate texts from scratch or from a prompt.

        prompt: one text for all samples, or one for each. num_samples: in all, by default one for each prompt.
        length: tokens of a sample, the prompt included; by default the training length.
        tokens: given token ids by position and None elsewhere, one row for each sample, instead of a prompt.
        part: generate only these of the samples. options: the fields of `SamplingOptions`.
        """
        return collect(self, self.stream(prompt, num_samples, length, tokens=tokens, part=part, **options))

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        num_samples: int | None = None,
        length: int | None = None,
        *,
        tokens: Sequence[Sequence[int | None]] | None = None,
        part: range | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> Iterator[Event]:
        """Generate as `sample` does, and yield an event after each step."""
        return self._stream(*self._rows(prompt, num_samples, length, tokens), part, SamplingOptions(**options))

    def _rows(
        self,
        prompt: str | Sequence[str] | None,
        num_samples: int | None,
        length: int | None,
        tokens: Sequence[Sequence[int | None]] | None,
    ) -> tuple[list[Row], int]:
        """The different rows to sample, which repeat in turn, and the number of samples."""
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
        if tokens is not None:
            if prompt is not None or length is not None:
                raise ValueError("give either tokens, or prompt and length")
            if num_samples not in (None, len(tokens)):
                raise ValueError(f"num_samples is {num_samples}; there are {len(tokens)} rows of tokens: leave it out")
            return [list(row) for row in tokens], len(tokens)
        if not (prompt is None or isinstance(prompt, str | Sequence)):
            raise ValueError(f"prompt is {prompt!r}; it must be a text or several. For a number write num_samples=…")
        length = self.net.config.length if length is None else length
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1")
        prompts = [prompt or ""] if prompt is None or isinstance(prompt, str) else list(prompt)
        total = len(prompts) if num_samples is None else num_samples
        if len(prompts) not in (1, total):
            raise ValueError(f"{len(prompts)} prompts for {total} samples: give one prompt, or one for each sample")
        encoded = [self.tokenizer.encode(text) for text in prompts]
        if (longest := max(map(len, encoded), default=0)) > length:
            raise ValueError(f"the prompt has {longest} tokens and length is {length}: raise length")
        return [[*ids, *[None] * (length - len(ids))] for ids in encoded], total

    def chat(self, messages: str | Sequence[Message], length: int | None = None, **options: Any) -> str:
        """The answer to a question or to messages, by the tokenizer's chat template; options as in `sample`."""
        row = self.tokenizer.chat.row(messages, self.net.config.length if length is None else length)
        return self.tokenizer.chat.answer(self.sample(tokens=[row], **options).tokens[0][row.index(None) :])

    def infill(
        self,
        text: str | Sequence[str],
        blank: str = BLANK,
        tokens_per_blank: int | Sequence[int] = 8,
        num_samples: int = 1,
        **options: Unpack[SamplingKeywords],
    ) -> Samples:
        """Fill in every blank of a text, or of several, `num_samples` times each.

        blank: what marks a blank, by default a run of four or more underscores.
        options: the fields of `SamplingOptions`.
        """
        events = self.infill_stream(text, blank, tokens_per_blank, num_samples, **options)
        return collect(self, events, cut=False)

    def infill_stream(
        self,
        text: str | Sequence[str],
        blank: str = BLANK,
        tokens_per_blank: int | Sequence[int] = 8,
        num_samples: int = 1,
        part: range | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> Iterator[Event]:
        """Fill in as `infill` does, and yield an event after each step."""
        texts = [text] if isinstance(text, str) else list(text)
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
        rows = [self.row_with_blanks(each, blank, tokens_per_blank) for each in texts]
        repeated = [row for row in rows for _ in range(num_samples)]
        return self._stream(repeated, len(repeated), part, SamplingOptions(**options))

    def row_with_blanks(self, text: str, blank: str, tokens_per_blank: int | Sequence[int]) -> Row:
        """The tokens of a text, with None for those of its blanks."""
        parts = re.split(f"{BLANK}_*", text) if blank == BLANK else text.split(blank)
        if self.tokenizer.spaced:  # the space before a blank is part of the word that fills it
            parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
        pieces = [self.tokenizer.encode(parts[0]), *map(self.tokenizer.encode_after, parts[1:])]
        blanks = len(pieces) - 1
        if not blanks:
            raise ValueError(f"the text has no blank: mark what is to be filled in with {blank!r}")
        sizes = [tokens_per_blank] * blanks if isinstance(tokens_per_blank, int) else list(tokens_per_blank)
        if len(sizes) != blanks or min(sizes) < 1:
            raise ValueError(f"tokens_per_blank is {sizes}; the text has {blanks} blanks, each of at least one token")
        row = Row(pieces[0])
        for size, piece in zip(sizes, pieces[1:], strict=True):
            row += [*[None] * size, *piece]
        return row

    def log_prob(
        self,
        text: str | Sequence[Any],
        context: str | Sequence[Any] | None = None,
        given: Sequence[Any] | None = None,
        alpha_0: float | None = None,
        **options: Any,
    ) -> LogProb:
        """log p of texts given their context, over orders that begin with the context.

        text: a text, token ids, or several of either. context: the same, which comes before the text; one for all or
        one for each. given: positions of the text that are context too; for all or for each.
        options: num_orders, estimator, antithetic, given_order, seed, batch_size of `likelihood.orders.log_prob`.
        """
        texts = self._ids(text)
        if not texts or not all(texts):
            raise ValueError("there is no text to score: give at least one token for each")
        contexts = [[]] if context is None else self._ids(context)
        places = [list(p) if isinstance(p, Sequence) else p for p in given or ()]
        each = places if places and isinstance(places[0], list) else [places]
        if {len(contexts), len(each)} - {1, len(texts)}:
            counts = f"{len(texts)} texts, {len(contexts)} contexts, {len(each)} given"
            raise ValueError(f"{counts}: give one, or one for each")
        rows, kept = [], []
        for i, ids in enumerate(texts):
            before, seen = contexts[i % len(contexts)], set(each[i % len(each)])
            if not seen <= set(range(len(ids))):
                raise ValueError(f"given positions {sorted(seen)} are not all among the text's 0 .. {len(ids) - 1}")
            rows.append([*before, *ids])
            kept.append([*[True] * len(before), *(p in seen for p in range(len(ids)))])
        if (longest := max(map(len, rows))) > (length := self.net.config.length):
            raise ValueError(f"a text of {longest} tokens; the model was trained on {length}: use rolling_log_prob")
        return orders.log_prob(self.net, self.at(alpha_0).system, rows, kept, **options)

    def rolling_log_prob(
        self, text: str | Sequence[int], stride: int | None = None, length: int | None = None, **options: Any
    ) -> LogProb:
        """log p of one text of any length, each token scored once.

        Windows of `length` tokens, by default the training length, score `stride` new tokens each, by default half the
        length, after length - stride tokens of context. Options as in `log_prob`.
        """
        alpha_0 = options.pop("alpha_0", None)
        if not any(texts := self._ids(text)) or len(texts) > 1:
            raise ValueError(f"{len(texts)} texts: give one, of at least one token")
        ids = texts[0]
        length = self.net.config.length if length is None else length
        parts = orders.windows(len(ids), length, max(1, length // 2) if stride is None else stride)
        rows = [ids[start:end] for start, _, end in parts]
        kept = [[start + i < first for i in range(end - start)] for start, first, end in parts]
        found = orders.log_prob(self.net, self.at(alpha_0).system, rows, kept, **options)
        tokens = [t for (start, first, _), values in zip(parts, found.tokens) for t in values[first - start :]]
        return dataclasses.replace(found, total=found.total.sum(0, keepdim=True), tokens=[tokens])

    def at(self, alpha_0: float | None) -> LanguageModel:
        """The same model evaluated at another alpha_0; None leaves it."""
        return self if alpha_0 is None else dataclasses.replace(self, system=self.system.with_alpha_0(alpha_0))

    def _ids(self, text: str | Sequence[Any]) -> list[list[int]]:
        """One row of token ids for each text."""
        items = [text] if isinstance(text, str) else list(text)
        if items and isinstance(items[0], int):
            items = [items]
        rows = [self.tokenizer.encode(item) if isinstance(item, str) else [int(i) for i in item] for item in items]
        self._check(token for row in rows for token in row)
        return rows

    def _check(self, tokens: Iterable[int]) -> None:
        vocabulary = self.net.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocabulary or token == self.system.mask_id:
                raise ValueError(f"token {token} is not one of the {vocabulary} ids of the vocabulary, or the mask")

    def _stream(self, rows: list[Row], total: int, part: range | None, options: SamplingOptions) -> Iterator[Event]:
        """Sample rows[i % len(rows)] for each sample i of `part`, in batches that are made one after another."""
        self.check_rows(rows)
        part = range(total) if part is None else part
        longest, firsts = max(map(len, rows)), part[:: options.batch_size]

        def batch(first: int) -> tuple[Request, Schedule, Randomness]:
            some = [rows[i % len(rows)] for i in range(first, min(first + options.batch_size, part.stop))]
            return self.planned(some, longest, options, first, total)

        begun = [batch(first) for first in firsts[:1]]  # a wrong request fails before any work
        return self._run(itertools.chain(begun, map(batch, firsts[1:])))

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise ValueError unless the rows have known tokens and there is a token to draw."""
        if not rows:
            raise ValueError("there is nothing to generate: give at least one prompt, text or row of tokens")
        if not all(rows):
            raise ValueError("a row of tokens is empty: give at least one position, None where it is to be drawn")
        self._check(t for row in rows for t in row if t is not None)
        if not any(None in row for row in rows):
            raise ValueError("every token is given, which leaves nothing to generate: raise length")

    def planned(
        self, rows: Sequence[Row], longest: int, options: SamplingOptions, first: int, total: int
    ) -> tuple[Request, Schedule, Randomness]:
        """Samples first, first + 1, … of `total` as the system takes them, padded to `longest` tokens."""
        lengths = torch.tensor([len(row) for row in rows])
        x = torch.tensor([[0 if t is None else t for t in row] + [0] * (longest - len(row)) for row in rows])
        given = torch.tensor([[t is not None for t in row] + [False] * (longest - len(row)) for row in rows])
        request = Request(x.to(self.net.device), given, torch.arange(longest) < lengths[:, None], options)
        rng = Randomness(fold(options.seed, "sample"), first, total)
        return request, self.system.plan(request, rng), rng

    def _run(self, batches: Iterable[tuple[Request, Schedule, Randomness]]) -> Iterator[Event]:
        for request, schedule, rng in batches:
            begin, first = time.perf_counter(), rng.first
            tokens = torch.where(request.given, request.x.cpu(), self.system.mask_id)
            if not schedule.nfe.any():  # all of this batch is given: one event that commits nothing
                none = torch.zeros(len(tokens), 0, dtype=torch.long)
                yield Event(0, schedule.sizes.shape[1], Step(none, none, none.bool()), tokens, schedule, first)
                continue
            iterator = self.system.sample(self.net, request, schedule, rng)
            for k in range(1 << 62):
                try:
                    with torch.inference_mode():  # not held while the caller looks at an event
                        step = next(iterator, None)
                except BadLogits as error:
                    raise ValueError(f"sampling failed at step {k} of samples from {first} on: {error}") from error
                if step is None:
                    break
                row, column = step.drawn.nonzero(as_tuple=True)
                tokens[row, step.position[row, column]] = step.token.cpu()[row, column]
                yield Event(k, schedule.sizes.shape[1], step, tokens, schedule, first, time.perf_counter() - begin)
                begin = time.perf_counter()


def collect(lm: LanguageModel, events: Iterator[Event], cut: bool = True) -> Samples:
    """Run a stream to its end. cut: the text ends at the first end-of-sequence token that was generated."""
    passes, last, seconds, work = 0, dict[int, Event](), 0.0, dict[int, Work]()
    for event in events:
        last[event.first] = event
        passes += event.committed.drawn.shape[1] > 0
        work.setdefault(event.first, Work()).add(event.committed)
        seconds += event.seconds
    texts, tokens, steps = [], [], []
    for event, done in zip(last.values(), work.values(), strict=True):
        schedule = event.schedule
        for row, ids in enumerate(event.tokens.tolist()):
            ids = ids[: int(schedule.lengths[row])]
            tokens.append(ids)
            steps.append(schedule.steps(row) if done.steps is None else done.steps[row])
            drawn = set(schedule.free(row))
            texts.append(lm.tokenizer.decode(until(ids, lm.tokenizer.eos_id, drawn) if cut else ids))
    nfe, speculation, fed = costs(list(work.values()))
    return Samples(texts, tokens, nfe, passes, steps, seconds, speculation, fed)
