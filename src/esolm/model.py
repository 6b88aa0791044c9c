"""`LanguageModel`: a network with its system and tokenizer, as `load` returns it.

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .constraints.guide import Limits, PatternSpan
from .core.order import Schedule
from .core.randomness import Randomness, fold
from .data import Message, Tokenizer
from .generation.collect import collected, log_weights, stops_of
from .generation.lengths import BlankLengths, Lengths, Prior, lengths_of
from .generation.limits import spans_of
from .generation.rows import BLANK, Row, Size, prompted
from .generation.run import run
from .generation.samples import Samples
from .likelihood import orders
from .likelihood.orders import LogProb
from .net.native.engine import fold_for
from .net.protocol import Network
from .runtime import machine
from .sampling.events import Event
from .sampling.options import SamplingOptions, given_options
from .sampling.request import Request
from .storage.models import read_model
from .systems import System

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .sampling.options import SamplingKeywords, given_options


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


@dataclass(frozen=True, repr=False)
class LanguageModel:
    """Sample, infill and score with one network."""

    net: Network
    system: System
    tokenizer: Tokenizer

    def __repr__(self) -> str:
        from .viz import card

        return f"LanguageModel({card.line(self.net, self.system, self.tokenizer, self._parameters)})"

    def _repr_html_(self) -> str:
        """For notebooks: what the model is, and what can be done with it."""
        from .viz import card

        return card.draw(self.net, self.system, self.tokenizer, self._parameters, self._infills)

    def _parameters(self) -> int:
        from .training.cost import parameters

        return parameters(self.net.config)[0]

    def _infills(self) -> bool:
        """Whether the system can fill in a blank: it plans one without the network."""
        row: Row = [*[None] * (self.net.config.length - 1), 0]
        try:
            self.planned([row], len(row), SamplingOptions(), 0, 1, [[]])
        except ValueError:
            return False
        return True

    def sample(
        self,
        prompt: str | Sequence[str] | None = None,
        num_samples: int | None = None,
        length: int | None = None,
        *,
        tokens: Sequence[Sequence[int | None]] | None = None,
        part: range | None = None,
        stop: str | Sequence[str] = (),
        **options: Unpack[SamplingKeywords],
    ) -> Samples:
        """Generate texts from scratch or from a prompt.

        prompt: one text for all samples, or one for each. num_samples: in all, by default one for each prompt.
        length: tokens of a sample, the prompt included; by default the training length. tokens: given token ids by
        position and None elsewhere, one row for each sample, instead of a prompt. part: generate only these of the
        samples. stop: texts end before this, or the first of several. options: the fields of `SamplingOptions`.
        """
        events = self.stream(prompt, num_samples, length, tokens=tokens, part=part, **options)
        return collect(self, events, stops=stops_of(stop))

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
        rows, total = prompted(self.tokenizer, self.net.config.length, prompt, num_samples, length, tokens)
        return self.stream_rows(rows, total, part, given_options(options, self.stream))

    def chat(self, messages: str | Sequence[Message], length: int | None = None, **options: Any) -> str:
        """The answer to a question or to messages, by the tokenizer's chat template; options as in `sample`."""
        row = self.tokenizer.chat.row(messages, self.net.config.length if length is None else length)
        return self.tokenizer.chat.answer(self.sample(tokens=[row], **options).tokens[0][row.index(None) :])

    def infill(
        self,
        text: str | Sequence[str],
        blank: str = BLANK,
        tokens_per_blank: Size | Sequence[Size] = 8,
        num_samples: int = 1,
        length_prior: Prior | None = None,
        length_choice: str = "draw",
        **options: Unpack[SamplingKeywords],
    ) -> Samples:
        """Fill in every blank of a text, or of several, `num_samples` times each.

        blank: what marks a blank, by default a run of four or more underscores.
        tokens_per_blank: a number, or a range such as "1-12", for all blanks or for each. From a range each sample
        draws its lengths by their probability given the text around (`blank_lengths`); length_choice `best` takes the
        likeliest. length_prior: a weight for each length of the range, or by length; by default all are alike.
        options: the fields of `SamplingOptions`.
        """
        ask = (text, blank, tokens_per_blank, num_samples, None, length_prior, length_choice)
        return collect(self, self.infill_stream(*ask, **options), cut=False)

    def infill_stream(
        self,
        text: str | Sequence[str],
        blank: str = BLANK,
        tokens_per_blank: Size | Sequence[Size] = 8,
        num_samples: int = 1,
        part: range | None = None,
        length_prior: Prior | None = None,
        length_choice: str = "draw",
        **options: Unpack[SamplingKeywords],
    ) -> Iterator[Event]:
        """Fill in as `infill` does, and yield an event after each step."""
        texts = [text] if isinstance(text, str) else list(text)
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
        made = given_options(options, self.infill)
        how = (blank, tokens_per_blank, made, length_prior)
        samples = [range(i * num_samples, (i + 1) * num_samples) for i in range(len(texts))]
        each = [self.blanked_rows(some, length_choice, one, *how) for some, one in zip(samples, texts, strict=True)]
        rows, spans = ([item for found in lists for item in found] for lists in zip(*each, strict=True))
        return self.stream_rows(rows, len(rows), part, made, spans)

    def blanked_rows(self, samples: range, choice: str, *text: Any) -> tuple[list[Row], list[list[PatternSpan]]]:
        """The rows of samples of a text with blanks, and the spans of each that must match a pattern.

        choice: length_choice. text: as in `generation.lengths.lengths_of`.
        """
        return self._lengths(*text).rows(choice, samples)

    def _lengths(self, text: str, blank: str, size: Any, options: SamplingOptions, prior: Prior | None) -> Lengths:
        found = lengths_of(self.net, self.system, self.tokenizer, text, blank, size, options, prior)
        if found.open:  # a system that cannot fill in blanks says so
            row = found.text.row([sizes[0] for sizes in found.candidates])
            self.planned([row], len(row), options, 0, 1, [[]])
        return found

    def blank_lengths(
        self,
        text: str,
        tokens_per_blank: Size | Sequence[Size],
        blank: str = BLANK,
        length_prior: Prior | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> BlankLengths:
        """The lengths that the blanks of a text may have, with their probability given the text around them.

        The likelihood of the given tokens, at the positions that the lengths give them, times the prior.
        """
        text_of = (text, blank, tokens_per_blank, given_options(options, self.blank_lengths), length_prior)
        return self._lengths(*text_of).compared

    def log_weights(self, samples: Samples, batch_size: int = 32) -> Tensor:
        """Importance weights log p(x | sigma) - log q(x | sigma) of samples with a regex or json_schema, float64 [n].

        Means weighted by them estimate those of the model's samples that happen to match; the mean weight estimates
        the probability to match. One order at a time: with orders that differ, the weights are comparable only if all
        orders give the same model.
        """
        return log_weights(self.net, self.system, samples, batch_size)

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
        rows, kept = orders.conditional_rows(texts, [[]] if context is None else self._ids(context), given)
        if (longest := max(map(len, rows))) > (length := self.net.config.length):
            raise ValueError(f"a text of {longest} tokens; the model was trained on {length}: use rolling_log_prob")
        found = orders.log_prob(self.net, self.at(alpha_0).system, rows, kept, **options)
        return dataclasses.replace(found, tokenizer=self.tokenizer)

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
        whole = dataclasses.replace(found, ids=[ids], given=[[False] * len(ids)], tokenizer=self.tokenizer)
        return dataclasses.replace(whole, total=found.total.sum(0, keepdim=True), tokens=[tokens])

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

    def stream_rows(
        self,
        rows: list[Row],
        total: int,
        part: range | None,
        options: SamplingOptions,
        spans: list[list[PatternSpan]] | None = None,
    ) -> Iterator[Event]:
        """Sample rows[i % len(rows)] for each sample i of `part`, in batches that are made one after another."""
        self.check_rows(rows)
        part = range(total) if part is None else part
        longest, firsts = max(map(len, rows)), part[:: options.batch_size]
        spans = [spans_of(self.tokenizer, row, options) for row in rows] if spans is None else spans

        def batch(first: int) -> tuple[Request, Schedule, Randomness]:
            some = [i % len(rows) for i in range(first, min(first + options.batch_size, part.stop))]
            own = [spans[i] for i in some]
            return self.planned([rows[i] for i in some], longest, options, first, total, own)

        begun = [batch(first) for first in firsts[:1]]  # a wrong request fails before any work
        return run(self.net, self.system, itertools.chain(begun, map(batch, firsts[1:])))

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
        self,
        rows: Sequence[Row],
        longest: int,
        options: SamplingOptions,
        first: int,
        total: int,
        spans: Sequence[Sequence[PatternSpan]] | None = None,
    ) -> tuple[Request, Schedule, Randomness]:
        """Samples first, first + 1, … of `total` as the system takes them, padded to `longest` tokens.

        spans: of each row, what must match a pattern; by default what the options say about its runs of None.
        """
        spans = [spans_of(self.tokenizer, row, options) for row in rows] if spans is None else spans
        limits = Limits(spans) if any(spans) else None
        lengths = torch.tensor([len(row) for row in rows])
        x = torch.tensor([[0 if t is None else t for t in row] + [0] * (longest - len(row)) for row in rows])
        given = torch.tensor([[t is not None for t in row] + [False] * (longest - len(row)) for row in rows])
        valid = torch.arange(longest) < lengths[:, None]
        request = Request(x.to(self.net.device), given, valid, options, limits=limits)
        request.guide()  # a pattern that nothing matches fails before any work
        rng = Randomness(fold(options.seed, "sample"), first, total)
        return request, self.system.plan(request, rng), rng


def collect(lm: LanguageModel, events: Iterator[Event], cut: bool = True, stops: Sequence[str] = ()) -> Samples:
    """Run a stream to its end; cut and stops as in `generation.collect.collected`."""
    return collected(lm.tokenizer, events, cut, stops)
