"""How well a model predicts texts: what is scored, by which estimator, and with what error.

Shapes: n sequences, L length, K orders.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.noise import scored_tokens
from ..core.randomness import Randomness, fold
from ..data import Document, Loader, Manifest, Tokenizer, corpora, detokenize
from ..net.protocol import Network
from ..runtime.distributed import ALONE, Ranks
from . import estimators
from .orders import is_exact, log_weights, order_function

ESTIMATORS = ("nelbo", "any-order", "iw", "jackknife")
Advance = Callable[[int], None]
"""Told how many sequences more have been scored."""


class Model(Protocol):
    """What is scored with: a network, its system and its tokenizer."""

    @property
    def net(self) -> Network: ...

    @property
    def system(self) -> Any: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class Sequences:
    """Texts to be scored, cut to one length."""

    name: str
    x: Tensor  # int64 [n, L]
    valid: Tensor | None  # bool [n, L]; padding is neither seen nor scored
    given: Tensor | None  # bool [n, L]; given tokens are seen and not scored
    bytes: int  # UTF-8 bytes of the scored text

    def __len__(self) -> int:
        return len(self.x)

    @property
    def tokens(self) -> Tensor:
        """Scored tokens of each sequence, float64 [n]."""
        return scored_tokens(self.x, self.valid, self.given).sum(1).double()

    @property
    def sha256(self) -> str:
        """A hash of all that is scored and seen."""
        digest = hashlib.sha256(repr(tuple(self.x.shape)).encode())
        for part in (self.x, self.valid, self.given):
            digest.update(b"none" if part is None else part.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def rows(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, valid and given of some sequences; a mask that says nothing is None."""
        valid, given = (None if t is None else t[index] for t in (self.valid, self.given))
        valid = None if valid is None or valid.all() else valid.to(device)
        given = None if given is None or not given.any() else given.to(device)
        return self.x[index].to(device), valid, given


def read(
    lm: Model,
    spec: str,
    *,
    split: str = "valid",
    length: int | None = None,
    num_sequences: int | None = None,
    field: str = "text",
    detokenizer: str | None = None,
) -> Sequences:
    """The first sequences of prepared data, of a file or folder of text, or of a corpus, by the model's tokenizer.

    length: tokens of a sequence, by default the training length. A file is scored whole; a corpus with a split of its
    own, and pydocs, by that split. Raises ValueError for the data of another tokenizer.
    """
    if num_sequences is not None and num_sequences < 1:
        raise ValueError(f"num_sequences is {num_sequences}; it must be at least 1")
    if (Path(spec) / "manifest.json").is_file():
        if field != "text" or detokenizer is not None:
            raise ValueError(f"{spec} is prepared data, read and detokenised already: leave field and detokenizer out")
        return _prepared(lm, spec, split, length, num_sequences)
    length = lm.net.config.length if length is None else length
    if length < 1:
        raise ValueError(f"length is {length}; it must be at least 1")
    if not Path(spec).exists() and ":" not in spec and spec not in corpora.SPECS:
        raise ValueError(f"no file or folder {spec!r}, nor a corpus: choose one of {corpora.SPECS}")
    corpus = corpora.corpus(f"text:{spec}" if Path(spec).exists() else spec, corpora.Reading(field))
    rules = detokenize.known(detokenizer) or corpus.detokenizer
    documents = (detokenize.detokenize(d.text, rules) for d in _documents(corpus, split))
    ids, size = _stream(documents, lm.tokenizer, None if num_sequences is None else num_sequences * length)
    if not len(ids):
        raise ValueError(f"there is no text in {spec!r}: nothing to score")
    missing = -len(ids) % length
    x = torch.from_numpy(np.pad(ids, (0, missing))).view(-1, length)
    valid = None if not missing else (torch.arange(x.numel()) < len(ids)).view_as(x)
    return Sequences(spec, x, valid, None, size)


def _prepared(lm: Model, folder: str, split: str, length: int | None, limit: int | None) -> Sequences:
    manifest = Manifest.load(folder)
    if manifest.tokenizer_sha256 != lm.tokenizer.sha256:
        raise ValueError(
            f"{folder} was made by tokenizer {manifest.tokenizer} ({manifest.tokenizer_sha256[:12]}), the model has "
            f"{lm.tokenizer.name} ({lm.tokenizer.sha256[:12]}): prepare it with the run as --tokenizer"
        )
    if length is not None and length != manifest.length:
        raise ValueError(f"length is {length}, and {folder} was prepared with {manifest.length}: prepare it again")
    if length is None and manifest.length > lm.net.config.length:
        long, trained = manifest.length, lm.net.config.length
        raise ValueError(f"{folder} has sequences of {long}, the model was trained on {trained}: give --length {long}")
    loader = Loader(folder, split, 256, shuffle=False)
    count = loader.sequences if limit is None else min(limit, loader.sequences)
    batches = [loader.batch(step) for step in range(-(-count // 256))]
    valid, given = (None if parts[0] is None else torch.cat(parts)[:count] for parts in list(zip(*batches))[1:])
    x, whole = torch.cat([batch.x for batch in batches])[:count], manifest.splits[split]
    size = whole.bytes if count == whole.sequences else _bytes(x[scored_tokens(x, valid, given)], lm.tokenizer)
    return Sequences(folder, x, valid, given, size)


def _bytes(ids: Tensor, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of ids, special tokens apart."""
    special = (tokenizer.mask_id, tokenizer.eos_id, tokenizer.bos_id)
    return len(tokenizer.decode(i for i in ids.tolist() if i not in special).encode())


def _documents(corpus: corpora.Corpus, split: str) -> Iterator[Document]:
    """The split that the corpus has of its own, or makes by content, or all of a file."""
    if split not in ("train", "valid"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'valid'")
    if corpus.name.startswith("text:"):
        return corpus.train()
    if corpus.valid is not None:
        return corpus.train() if split == "train" else corpus.valid()
    return (document for name, document in corpora.split(corpus, None, 0.05)() if name == split)


def _stream(texts: Iterable[str], tokenizer: Tokenizer, limit: int | None) -> tuple[np.ndarray, int]:
    """The ids of all texts, each ended by EOS, at most `limit` of them, and the bytes of the text in them."""
    if tokenizer.eos_id is None:
        raise ValueError(f"documents are joined by an end of text, and tokenizer {tokenizer.name} has none")
    found, held, size = [], 0, 0
    for text in texts:
        encoded = tokenizer.core.encode(text, add_special_tokens=False)
        ids, room = [*encoded.ids, tokenizer.eos_id], math.inf if limit is None else limit - held
        if len(ids) > room:
            ids = ids[: int(room)]
            text = text[: encoded.offsets[len(ids) - 1][1]]
        found.append(np.array(ids, np.int64))
        held += len(ids)
        size += len(text.encode())
        if held == limit:
            break
    return np.concatenate(found) if found else np.empty(0, np.int64), size


@dataclass(frozen=True)
class Score:
    """What an estimator says about some sequences, in nats, each sequence on its own."""

    corpus: str
    estimator: str
    kind: str  # exact, bound or estimate
    nats: Tensor  # float64 [n]
    tokens: Tensor  # float64 [n]
    bytes: int
    terms: dict[str, Tensor]  # float64 [n] each; they add up to nats
    num_orders: int | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    moved: float | None = None  # nats per token: the bound at K/2 minus the bound at K

    def record(self) -> dict[str, Any]:
        """As JSON holds it; what does not exist is None."""
        nats = self._mean(self.nats)
        return {
            "corpus": self.corpus,
            "perplexity": math.exp(min(nats, 700.0)),
            "nats": nats,
            "stderr": _finite(estimators.standard_error(self.nats, self.tokens)),
            "bits_per_token": nats / math.log(2),
            "bits_per_byte": float(self.nats.sum()) / math.log(2) / self.bytes if self.bytes else None,
            "tokens": int(self.tokens.sum()),
            "sequences": len(self.nats),
            "estimator": self.estimator,
            "kind": self.kind,
            "num_orders": self.num_orders,
            "terms": {name: self._mean(value) for name, value in self.terms.items()},
            "curve": self.curve,
            "moved": self.moved,
        }

    def _mean(self, nats: Tensor) -> float:
        return float(nats.sum() / self.tokens.sum())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def nelbo(
    lm: Model,
    sequences: Sequences,
    seed: int = 0,
    num_draws: int = 1,
    batch_size: int = 32,
    advance: Advance = lambda done: None,
    ranks: Ranks = ALONE,
) -> Score:
    """The system's own bound, the mean of num_draws draws for each sequence.

    The times (or numbers of masks) of all draws of all sequences are one stratified set, dealt at random. Neither the
    batches nor their size matter, nor how many processes share the sequences.
    """
    if num_draws < 1 or batch_size < 1:
        raise ValueError(f"num_draws is {num_draws} and batch_size {batch_size}; both must be at least 1")
    total = len(sequences) * num_draws
    device = lm.net.device
    mine = ranks.share(len(sequences))
    draws = range(mine.start * num_draws, mine.stop * num_draws)

    def own() -> list[tuple[str, Tensor]]:
        found = []
        for first in draws[::batch_size]:
            index = torch.arange(first, min(first + batch_size, draws.stop)) // num_draws
            rng = Randomness(fold(seed, "nelbo"), first, total)
            for term in lm.system.terms(lm.net, *sequences.rows(index, device), rng, False):
                found.append((term.name, term.nats.double().sum(1).cpu()))
            advance(len(index))
        return found

    found: dict[str, list[Tensor]] = {}
    for name, nats in itertools.chain(*ranks.gathered(ranks.everywhere(own))):
        found.setdefault(name, []).append(nats)
    terms = {name: torch.cat(parts).view(-1, num_draws).mean(1) for name, parts in found.items()}
    kind = "exact" if is_exact(lm.system, sequences.given is not None) else "bound"
    nats = torch.stack(list(terms.values())).sum(0)
    return Score(sequences.name, "nelbo", kind, nats, sequences.tokens, sequences.bytes, terms)


def weigh(
    lm: Model,
    sequences: Sequences,
    num_orders: int,
    seed: int = 0,
    antithetic: bool = False,
    batch_size: int = 32,
    known: Tensor | None = None,
    advance: Advance = lambda done: None,
    keep: Callable[[Tensor], None] = lambda matrix: None,
    ranks: Ranks = ALONE,
) -> Tensor:
    """log p(x | sigma_k) of each sequence under K orders of its own, float64 [n, K].

    known: such a matrix of any number of orders, NaN where it is not known. keep: is shown the matrix whenever more of
    it is. Order k of a sequence depends on the seed and its place alone, so K may be raised later, and processes may
    share the sequences.
    """
    if num_orders < 1 or batch_size < 1:
        raise ValueError(f"num_orders is {num_orders} and batch_size {batch_size}; both must be at least 1")
    if antithetic and num_orders % 2:
        raise ValueError(f"num_orders is {num_orders}; antithetic orders come in pairs: give an even number")
    nats_of, alpha_0 = order_function(lm.net, lm.system)
    n, device = len(sequences), lm.net.device
    width = num_orders if known is None else max(num_orders, known.shape[1])
    matrix = torch.full((n, width), math.nan, dtype=torch.float64)
    if known is not None:
        matrix[:, : known.shape[1]] = known
    per_pass, mine = max(1, batch_size // n), ranks.share(n)

    def own() -> Tensor:
        for first in mine[::batch_size]:
            index = torch.arange(first, min(first + batch_size, mine.stop))
            x, valid, given = sequences.rows(index, device)
            rng = Randomness(fold(seed, "score"), first, n)
            for start in range(0, num_orders, per_pass):
                numbers = range(start, min(start + per_pass, num_orders))
                block = matrix[first : first + len(index), start : numbers.stop]
                if block.isnan().any():
                    block[:] = log_weights(nats_of, x, alpha_0, rng, numbers, antithetic, valid, given, rows=batch_size)
                    if not block.isfinite().all():
                        raise ValueError(f"a likelihood of {sequences.name} is not finite: the weights are damaged")
                    keep(matrix)
                advance(block.numel())
        return matrix[mine.start : mine.stop]

    matrix = torch.cat(ranks.gathered(ranks.everywhere(own)))
    if ranks.world > 1:
        keep(matrix)
    return matrix[:, :num_orders]


def from_weights(log_w: Tensor, sequences: Sequences, estimator: str, exact: bool = False, pair: int = 1) -> Score:
    """The estimate that log-weights [n, K] give; pair 2: orders 2i and 2i+1 are antithetic."""
    num_orders, weight = log_w.shape[1], sequences.tokens
    if estimator not in ESTIMATORS[1:]:
        raise ValueError(f"no estimator {estimator!r} of orders: choose one of {', '.join(ESTIMATORS[1:])}")
    if exact or estimator == "any-order":
        nats = -log_w.mean(1)
    else:
        nats = estimators.bound(log_w) if estimator == "iw" else estimators.jackknife(log_w, pair)
    kind = "exact" if exact else "estimate" if estimator == "jackknife" else "bound"
    curve, moved = [], None
    for k, values in estimators.curve(log_w, estimators.decades(num_orders), pair).items():
        row: dict[str, Any] = {"num_orders": k}
        for name in ("bound", "jackknife"):
            value = values.get(name)
            row[name] = None if value is None else float(value.sum() / weight.sum())
            row[f"{name}_stderr"] = None if value is None else _finite(estimators.standard_error(value, weight))
        curve.append(row)
    if num_orders > 1:
        half, whole = (estimators.curve(log_w, [k])[k]["bound"] for k in (num_orders // 2, num_orders))
        moved = float((half - whole).sum() / weight.sum())
    found = {estimator.replace("-", "_"): nats}
    return Score(sequences.name, estimator, kind, nats, weight, sequences.bytes, found, num_orders, curve, moved)


def score(
    lm: Model,
    sequences: Sequences,
    estimator: str = "nelbo",
    num_orders: int = 100,
    antithetic: bool = False,
    num_draws: int = 1,
    seed: int = 0,
    batch_size: int = 32,
    advance: Advance = lambda done: None,
    ranks: Ranks = ALONE,
    **work: Any,
) -> Score:
    """Any estimator on some sequences; where one order is all there is (ar, alpha_0 = 0) it is exact, with K = 1.

    work: `known` and `keep` of `weigh`.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"no estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")
    if estimator == "nelbo":
        return nelbo(lm, sequences, seed, num_draws, batch_size, advance, ranks)
    exact = is_exact(lm.system, sequences.given is not None)
    if exact:
        num_orders, antithetic = 1, False
    pair = 2 if antithetic else 1
    if estimator == "jackknife" and not exact and num_orders < 2 * pair:
        raise ValueError(f"num_orders is {num_orders}; the jackknife needs at least {2 * pair}")
    log_w = weigh(lm, sequences, num_orders, seed, antithetic, batch_size, advance=advance, ranks=ranks, **work)
    return from_weights(log_w, sequences, estimator, exact, pair)
