"""What a user holds: a network, the system it was trained as, and its tokenizer.

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .core.draw import Draw
from .core.order import Schedule
from .core.randomness import Randomness, fold
from .data import Tokenizer
from .likelihood import orders as likelihood
from .likelihood.orders import LogProb
from .net import fold as folding
from .net.denoiser import Denoiser, DenoiserConfig
from .net.graph import replayed
from .net.protocol import Network, trainable
from .runtime import machine
from .sampling.request import Request, Step
from .storage import checkpoint
from .storage import folder as exported
from .systems import System, find


class Event(NamedTuple):
    """One step of a running sample: what was committed, and everything so far."""

    step: int  # 0-based, of this batch
    steps: int  # of the row that has most; where rows differ, bd3lm and variant A may need more
    committed: Step
    tokens: Tensor  # int [B, L]; the mask id where nothing is decided yet; the next event changes it
    schedule: Schedule
    first: int  # the first sample of this batch


@dataclass(frozen=True)
class Speculation:
    """What the speculative sampler tried for each sample; drafts behind a rejected one are dropped unjudged."""

    fed: list[int]  # tokens and masks, in all passes
    drafted: list[int]
    accepted: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class Samples:
    """Generated texts with their tokens and what they cost."""

    texts: list[str]
    tokens: list[list[int]]
    nfe: list[int]  # network evaluations that each row needed
    passes: int  # network calls of all batches
    steps: list[list[list[int]]]  # the schedule of each row: the positions of each step
    seconds: float
    speculation: Speculation | None = None  # of sampler speculative


def load(
    path: str | Path,
    weights: str = "ema",
    which: str = "best",
    device: str = "cpu",
    precision: str | None = None,
) -> LanguageModel:
    """The model of a run folder, of one checkpoint, or of a folder of `esolm convert`, `esolm export` or transformers.

    A name that is no folder may be that of a model that comes with the package, as `books`.
    weights: `ema`, or `model` for the raw ones. which: `best` (lowest validation loss) or `last` checkpoint of a run.
    precision: `float32`, `bf16`, `int8` (weights only) or `auto`, bf16 where the machine is fast at it, prepare the
    network for inference, which makes it faster and final; None leaves it as it was trained.
    """
    machine.settle()
    if precision is not None:
        precision = machine.pick_weights(precision, torch.device(device))
        lm = load(path, weights, which, device)
        return dataclasses.replace(lm, net=replayed(folding.fold(trainable(lm.net), precision)))
    path = find_folder(path)
    if exported.is_model(path):
        for name, value, only in (("weights", weights, "ema"), ("which", which, "best")):
            if value != only:
                raise ValueError(f"{name} is {value!r}; {path} has one set of weights: leave it out")
        return LanguageModel(*exported.read(path, device))
    folder, home = locate(path, which)
    if weights not in ("ema", "model"):
        raise ValueError(f"weights is {weights!r}; it must be 'ema' or 'model'")
    identity = checkpoint.read(folder)["identity"]
    net = Denoiser(DenoiserConfig(**identity["net"]))
    net.load_state_dict(checkpoint.load(folder, weights, device))
    options = dict(identity["system"])
    return LanguageModel(net.to(device).eval(), find(options.pop("name"))(**options), Tokenizer.load(home))


def find_folder(path: str | Path) -> Path:
    """The folder, or that of a model of the package by this name; raises ValueError if there is neither."""
    if (found := Path(path)).is_dir():
        return found
    known = exported.packaged()
    if str(path) in known:
        return known[str(path)]
    names = f", or one of {', '.join(known)}" if known else ""
    raise ValueError(f"{path} is not a folder: give a run folder or a checkpoint folder{names}")


def locate(path: Path, which: str = "best") -> tuple[Path, Path]:
    """The checkpoint that a run folder or a checkpoint folder stands for, and the run folder."""
    if which not in ("best", "last"):
        raise ValueError(f"which is {which!r}; it must be 'best' or 'last'")
    if (path / "state.json").is_file():
        return path, path.parent.parent
    root = path / "checkpoints"
    found = (checkpoint.best(root) if which == "best" else None) or checkpoint.latest(root)
    if found is None:
        raise ValueError(f"{path} has no checkpoint: train it first, or give a checkpoint folder")
    return found, path


@dataclass(frozen=True)
class LanguageModel:
    """Sample, infill and score with one network."""

    net: Network
    system: System
    tokenizer: Tokenizer

    def sample(self, num_samples: int = 1, length: int | None = None, **options: Any) -> Samples:
        """Texts from scratch or from a prompt; see `stream` for the options."""
        return collect(self, self.stream(num_samples, length, **options))

    def infill(
        self, text: str, blank: str = "____", tokens_per_blank: int | Sequence[int] = 8, **options: Any
    ) -> Samples:
        """The text with every blank filled in; see `stream` for further options."""
        return collect(self, self.infill_stream(text, blank, tokens_per_blank, **options), cut=False)

    def infill_stream(
        self,
        text: str,
        blank: str = "____",
        tokens_per_blank: int | Sequence[int] = 8,
        num_samples: int = 1,
        **options: Any,
    ) -> Iterator[Event]:
        """`infill` as it happens."""
        parts = text.split(blank)
        if self.tokenizer.spaced:  # the space before a blank is part of the word that fills it
            parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
        pieces = [self.tokenizer.encode(part) for part in parts]
        blanks = len(pieces) - 1
        if not blanks:
            raise ValueError(f"the text has no blank: mark what is to be filled in with {blank!r}")
        sizes = [tokens_per_blank] * blanks if isinstance(tokens_per_blank, int) else list(tokens_per_blank)
        if len(sizes) != blanks or min(sizes) < 1:
            raise ValueError(f"tokens_per_blank is {sizes}; the text has {blanks} blanks, each of at least one token")
        row = list[int | None](pieces[0])
        for size, piece in zip(sizes, pieces[1:], strict=True):
            row += [*[None] * size, *piece]
        return self.stream(num_samples, tokens=[row] * num_samples, **options)

    def stream(
        self,
        num_samples: int = 1,
        length: int | None = None,
        *,
        prompt: str | Sequence[str] | None = None,
        tokens: Sequence[Sequence[int | None]] | None = None,
        sampler: str | None = None,
        alpha_0: float | None = None,
        num_steps: int | None = None,
        parallelism: int | None = None,
        order: Sequence[int] | None = None,
        window: int | None = None,
        given_order: str = "ascending",
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        batch_size: int = 32,
        part: range | None = None,
    ) -> Iterator[Event]:
        """`sample` as it happens: what each step committed.

        length: tokens in all, the prompt included; by default the training length. prompt: one text for all samples or
        one for each. tokens: given token ids by position and None elsewhere, one row for each sample, instead of a
        prompt. alpha_0, num_steps (T), sampler and order may differ from training. window: tokens drawn ahead of a
        speculative pass; None adapts it. given_order: the order among the given tokens, random or ascending. seed:
        decides everything, for each sample alone: batches do not matter. part: make only these of the samples.
        """
        rows = self._rows(num_samples, length, prompt, tokens)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        settings = {
            "sampler": sampler, "alpha_0": alpha_0, "num_steps": num_steps, "parallelism": parallelism,
            "order": None if order is None else torch.tensor([list(order)]), "given_order": given_order,
            "window": window, "draw": Draw(temperature, top_p, top_k),
        }  # fmt: skip
        batches, longest = [], max(map(len, rows))
        part = range(num_samples) if part is None else part
        for first in part[::batch_size]:
            rng = Randomness(fold(seed, "sample"), first, num_samples)
            request = self._request(rows[first : min(first + batch_size, part.stop)], longest, settings)
            batches.append((request, self.system.plan(request, rng), rng))  # wrong requests fail before any work
        return self._run(batches)

    def log_prob(
        self,
        text: str | Sequence[Any],
        context: str | Sequence[Any] | None = None,
        given: Sequence[Any] | None = None,
        alpha_0: float | None = None,
        **options: Any,
    ) -> LogProb:
        """log p of texts given their context, over orders that begin with the context.

        text: a text, token ids, or several of either. context: the same, stands before the text; one for all or one
        for each. given: positions of the text that are context too, wherever they stand; for all or for each.
        options: num_orders, estimator, antithetic, given_order, seed, batch_size of `likelihood.log_prob`.
        """
        texts = self._ids(text)
        if not texts or not all(texts):
            raise ValueError("there is no text to score: give at least one token for each")
        contexts = [[]] if context is None else self._ids(context)
        places = [list(p) if isinstance(p, Sequence) else p for p in given or ()]
        each = places if places and isinstance(places[0], list) else [places]
        if {len(contexts), len(each)} - {1, len(texts)}:
            raise ValueError(f"{len(texts)} texts, {len(contexts)} contexts, {len(each)} given: one, or one for each")
        rows, kept = [], []
        for i, ids in enumerate(texts):
            before, seen = contexts[i % len(contexts)], set(each[i % len(each)])
            if not seen <= set(range(len(ids))):
                raise ValueError(f"given positions {sorted(seen)} are not all among the text's 0 .. {len(ids) - 1}")
            rows.append([*before, *ids])
            kept.append([*[True] * len(before), *(p in seen for p in range(len(ids)))])
        if (longest := max(map(len, rows))) > (length := self.net.config.length):
            raise ValueError(f"a text of {longest} tokens; the model was trained on {length}: use rolling_log_prob")
        return likelihood.log_prob(self.net, with_alpha_0(self.system, alpha_0), rows, kept, **options)

    def rolling_log_prob(
        self,
        text: str | Sequence[int],
        stride: int | None = None,
        length: int | None = None,
        alpha_0: float | None = None,
        **options: Any,
    ) -> LogProb:
        """log p of one text of any length, each token scored once: windows of `length` tokens, by default the training
        length, that score `stride` new ones (half the length by default) after length - stride of context."""
        if not any(texts := self._ids(text)) or len(texts) > 1:
            raise ValueError(f"{len(texts)} texts: give one, of at least one token")
        ids = texts[0]
        length = self.net.config.length if length is None else length
        parts = likelihood.windows(len(ids), length, max(1, length // 2) if stride is None else stride)
        rows = [ids[start:end] for start, _, end in parts]
        kept = [[start + i < first for i in range(end - start)] for start, first, end in parts]
        found = likelihood.log_prob(self.net, with_alpha_0(self.system, alpha_0), rows, kept, **options)
        tokens = [t for (start, first, _), values in zip(parts, found.tokens) for t in values[first - start :]]
        return dataclasses.replace(found, total=found.total.sum(0, keepdim=True), tokens=[tokens])

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
                raise ValueError(f"token {token} is not in the vocabulary of {vocabulary}, the mask apart")

    def _run(self, batches: list[tuple[Request, Schedule, Randomness]]) -> Iterator[Event]:
        for request, schedule, rng in batches:
            tokens = torch.where(request.given, request.x, self.system.mask_id).cpu()
            if not schedule.nfe.any():  # all of this batch is given: one event that commits nothing
                none = torch.zeros(len(tokens), 0, dtype=torch.long)
                nothing = Step(none, none, none.bool())
                yield Event(0, schedule.sizes.shape[1], nothing, tokens, schedule, rng.first)
                continue
            iterator = self.system.sample(self.net, request, schedule, rng)
            for k in range(1 << 62):
                with torch.inference_mode():  # not held while the caller looks at an event
                    step = next(iterator, None)
                if step is None:
                    break
                row, column = step.drawn.nonzero(as_tuple=True)
                tokens[row, step.position[row, column]] = step.token.cpu()[row, column]
                yield Event(k, schedule.sizes.shape[1], step, tokens, schedule, rng.first)

    def _rows(
        self,
        num_samples: int,
        length: int | None,
        prompt: str | Sequence[str] | None,
        tokens: Sequence[Sequence[int | None]] | None,
    ) -> list[list[int | None]]:
        """Given ids and None, one row of its length for each sample."""
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
        if tokens is not None:
            if prompt is not None or len(tokens) != num_samples:
                raise ValueError(f"give either prompt or tokens, and {num_samples} rows of tokens, one for each sample")
            rows = [list(row) for row in tokens]
            if length is not None and {len(row) for row in rows} != {length}:
                raise ValueError(f"length is {length} and the rows of tokens are not: leave length out")
            if not all(rows):
                raise ValueError("a row of tokens is empty: give at least one position, None where it is to be drawn")
        else:
            length = self.net.config.length if length is None else length
            if length < 1:
                raise ValueError(f"length is {length}; it must be at least 1")
            prompts = [prompt or ""] * num_samples if prompt is None or isinstance(prompt, str) else list(prompt)
            if len(prompts) != num_samples:
                raise ValueError(f"{len(prompts)} prompts for {num_samples} samples: give one, or one for each")
            rows = []
            for text in prompts:
                ids = self.tokenizer.encode(text)
                if len(ids) > length:
                    raise ValueError(f"the prompt has {len(ids)} tokens and length is {length}: raise length")
                rows.append([*ids, *[None] * (length - len(ids))])
        self._check(t for row in rows for t in row if t is not None)
        if not any(None in row for row in rows):
            raise ValueError("every token is given, which leaves nothing to generate: raise length")
        return rows

    def _request(self, rows: list[list[int | None]], longest: int, settings: dict[str, Any]) -> Request:
        device = self.net.device
        lengths = torch.tensor([len(row) for row in rows])
        x = torch.tensor([[0 if t is None else t for t in row] + [0] * (longest - len(row)) for row in rows])
        given = torch.tensor([[t is not None for t in row] + [False] * (longest - len(row)) for row in rows])
        valid = torch.arange(longest) < lengths[:, None]
        return Request(x.to(device), given, valid, **settings)


def collect(lm: LanguageModel, events: Iterator[Event], cut: bool = True) -> Samples:
    """Run a stream to its end. cut: the text ends at the first end-of-sequence token that was generated."""
    begin, passes, last, speculative = time.perf_counter(), 0, {}, False
    work: dict[int, Tensor] = {}
    for event in events:
        last[event.first] = event
        passes += event.committed.drawn.shape[1] > 0
        work[event.first] = _tally(event.committed) + work.get(event.first, 0)
        speculative |= event.committed.drafts is not None
    seconds = time.perf_counter() - begin
    texts, tokens, steps = [], [], []
    for event in last.values():
        schedule = event.schedule
        for row, ids in enumerate(event.tokens.tolist()):
            length = int(schedule.given[row] + schedule.sizes[row].sum())
            ids = ids[:length]
            tokens.append(ids)
            steps.append(schedule.steps(row))
            drawn = {i for step in steps[-1] for i in step}
            texts.append(lm.tokenizer.decode(until(ids, lm.tokenizer.eos_id, drawn) if cut else ids))
    nfe, *tried = torch.cat(list(work.values())).T.tolist()
    return Samples(texts, tokens, nfe, passes, steps, seconds, Speculation(*tried) if speculative else None)


def _tally(step: Step) -> Tensor:
    """Of each row, int [B, 5]: whether it got a token, and what was fed, drafted, accepted and rejected."""
    got = step.drawn.any(1).long()
    if step.drafts is None:
        return F.pad(got[:, None], (0, 4))
    drafted, accepted = step.drafts.drawn.sum(1), step.drafts.accepted
    return torch.stack([got, step.drafts.fed, drafted, accepted, (accepted < drafted).long()], 1)


def with_alpha_0(system: System, alpha_0: float | None) -> System:
    """The system with another share of diffusion; None leaves it."""
    if alpha_0 is None:
        return system
    if not hasattr(system, "alpha_0"):
        raise ValueError(f"alpha_0 is {alpha_0}; {likelihood.name_of(system)} has none: leave it out")
    return dataclasses.replace(system, alpha_0=alpha_0)  # type: ignore[type-var]


def until(ids: list[int], end: int | None, drawn: Container[int] | None = None) -> list[int]:
    """The tokens before the first end token; of those at drawn positions, if these are given."""
    ends = (i for i, token in enumerate(ids) if token == end and (drawn is None or i in drawn))
    return ids[: next(ends, None)]


def describe(lm: LanguageModel) -> dict[str, Any]:
    """System, network and size, as JSON holds them."""
    fields = dataclasses.asdict(lm.system)  # type: ignore[call-overload]
    parameters = sum(p.numel() for p in trainable(lm.net).parameters())
    described = {"system": fields, "net": dataclasses.asdict(lm.net.config), "parameters": parameters}
    return json.loads(json.dumps(described))
