"""MAUVE: how close the distribution of samples is to that of real texts, seen through an outside model.

The features of both sets are quantised together by k-means. The score is the area under the frontier of
exp(-c KL(q | r)) and exp(-c KL(p | r)) over the mixtures r = w p + (1 - w) q of the two histograms (Pillutla et al.,
2021): close to 1 for equal distributions, close to 0 for disjoint ones. Settings and steps are those of the authors'
package (mauve-text), which is under the GPL and needs faiss; this implementation is independent and gives its values.

Shapes: n texts of one set, N of both, W features, K buckets.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import Loader
from ..data.manifest import FILE as MANIFEST
from ..runtime.progress import track
from ..sampling.events import until
from .outside_models import UNLIMITED, batches, is_causal, load_causal, load_encoder
from .samples import read_records, read_samples

LEAST = 20  # texts of a set: two buckets of ten
PER_BUCKET, VARIANCE, REDOS, ITERATIONS = 10, 0.9, 5, 500
CLUSTERINGS = 5  # the score is their mean: over seeds, one clustering of 64 texts gave 0.39 ± 0.10
SCALE, POINTS = 5.0, 25  # c, and the number of mixtures on the frontier


def mauve(
    file: str,
    references: str,
    embedder: str,
    buckets: int | None = None,
    resamples: int = 10,
    seed: int = 0,
    batch_size: int = 16,
    device: str = "cpu",
    max_tokens: int | None = None,
    pooling: Literal["mean", "last", "first"] | None = None,
) -> dict[str, Any]:
    """MAUVE between the samples that `esolm sample --out` wrote and real texts.

    Args:
        file: JSON lines with `text` and `tokens`.
        references: JSON lines with `text`, or prepared data, whose validation sequences are cut to the samples' length.
            As many references as samples are compared, chosen at random.
        embedder: A folder with a transformers model: an encoder, whose states are averaged, or a causal language model
            (also a .gguf file), whose last state is used.
        max_tokens: Cut texts to this number of the embedder's tokens, special ones included; the paper's authors take
            512.
        pooling: The features of a text: the mean of the states of its tokens, or the state of the last or of the first
            token.
        buckets: Number of k-means clusters; by default a tenth of the number of samples.
        resamples: Bootstrap resamples for the standard error; 0 leaves it out.
        seed: Seed of the choice of references, of k-means and of the bootstrap.
        batch_size: Texts in one pass of the embedder.
        device: Device of the embedder.

    Raises:
        ValueError: If a file or folder cannot be read, or there are too few texts.
    """
    samples = read_samples(Path(file))
    n, length = len(samples), max(len(sample["tokens"]) for sample in samples)
    theirs = reference_texts(Path(references), 2 * n, length, seed)  # as many again for the ceiling
    _check(n, len(theirs), buckets, resamples)
    embed = Embedder(embedder, device, max_tokens, pooling)
    texts = [sample["text"] for sample in samples]
    features = embed([*texts, *theirs], batch_size)
    q, p = torch.arange(n), torch.arange(n, min(2 * n, len(features)))
    half = len(theirs) // 2
    ceiling = [torch.arange(n, n + 2 * half).chunk(2)] if half >= max(LEAST, buckets or 0) else []
    jobs = [(p, q), *ceiling, *again(p, q, resamples, seed)]
    scores = [score(features[a], features[b], seed, buckets) for a, b in track(jobs, "comparing")]
    return {
        "samples": n,
        "references": len(p),
        "bytes_per_sample": mean_bytes(texts),
        "bytes_per_reference": mean_bytes(theirs[:n]),
        "buckets": buckets or bucket_count(len(p), n),
        "mauve": scores[0],
        "mauve_stderr": statistics.stdev(scores[-resamples:]) if resamples else None,
        "ceiling": scores[1] if ceiling else None,
    }


def _check(samples: int, references: int, buckets: int | None, resamples: int) -> None:
    """Raise ValueError if there are too few texts for the options."""
    fewest = min(samples, references)
    if fewest < LEAST:
        raise ValueError(f"{samples} samples and {references} references: MAUVE needs at least {LEAST} of each")
    if buckets is not None and not 2 <= buckets <= fewest:
        raise ValueError(f"buckets is {buckets}: it must be from 2 to {fewest}, the number of texts")
    if resamples != 0 and resamples < 2:
        raise ValueError(f"resamples is {resamples}: it must be 0, for no standard error, or at least 2")


def mean_bytes(texts: Sequence[str]) -> float:
    """Mean number of UTF-8 bytes of a text: MAUVE is low for sets of different lengths, whatever they say."""
    return sum(len(text.encode()) for text in texts) / len(texts)


def reference_texts(path: Path, count: int, length: int, seed: int) -> list[str]:
    """At most `count` texts of a file or of the validation split of prepared data, chosen at random."""
    if (path / MANIFEST).is_file():
        return valid_texts(path, count, length, seed)
    advice = "give JSON lines with `text`, or a folder that `esolm prepare` wrote"
    texts = []
    for number, record in read_records(path, advice).items():
        if not isinstance(record.get("text"), str):
            raise ValueError(f"line {number} of {path} has no `text`: {advice}")
        texts.append(record["text"])
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return [texts[i] for i in order[:count].tolist()]


def valid_texts(folder: Path, count: int, length: int, seed: int) -> list[str]:
    """Validation sequences as texts, cut at `length` tokens and at the end-of-sequence token, as samples are."""
    loader = Loader(folder, "valid", seed=seed)
    if loader.manifest.length < length:
        raise ValueError(
            f"samples of {length} tokens, but sequences of {loader.manifest.length} in {folder}: sample with "
            f"--length {loader.manifest.length}, or prepare longer sequences"
        )
    batch = Loader(folder, "valid", min(count, loader.sequences), seed).batch(0)
    tokenizer, texts = loader.manifest.load_tokenizer(), []
    for row, ids in enumerate(batch.x[:, :length].tolist()):
        given = 0 if batch.given is None else int(batch.given[row].sum())
        texts.append(tokenizer.decode(until(ids, tokenizer.eos_id, range(given, length))))
    return texts


class Embedder:
    """Unit feature vectors of texts, by an outside model on disk."""

    def __init__(
        self, path: str, device: str = "cpu", max_tokens: int | None = None, pooling: str | None = None
    ) -> None:
        """max_tokens: cut texts to it, or else to the length that the model takes. pooling: mean, last or first; by
        default last for a causal language model and mean for an encoder."""
        if not (Path(path).is_file() if Path(path).suffix == ".gguf" else Path(path).is_dir()):
            raise ValueError(f"no folder {path}: give a folder with a transformers model, or a .gguf file")
        if max_tokens is not None and max_tokens < 3:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 3, two of which may be special")
        causal = is_causal(path)
        self.outside = load_causal(path, device) if causal else load_encoder(path, device)
        self.model = self.outside.model.base_model  # without the head
        self.pooling = pooling or ("last" if causal else "mean")
        self.limit = min(self.outside.tokenizer.model_max_length, self.outside.positions, max_tokens or UNLIMITED)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], batch_size: int) -> Tensor:
        """Unit vectors, float32 [n, W]; a text that is too long for the model is truncated."""
        tokenizer = self.outside.tokenizer
        empty = tokenizer.eos_token_id or 0  # an empty text may have no tokens at all
        found = tokenizer(list(texts), truncation=True, max_length=self.limit, padding=False)
        rows = [ids or [empty] for ids in found["input_ids"]]
        order: list[int] = []
        features = []
        for some, x, real in batches(rows, batch_size, tokenizer.pad_token_id or 0, self.model.device, "embedding"):
            states = self.model(input_ids=x, attention_mask=real.long()).last_hidden_state  # [B, L, W]
            if self.pooling == "mean":
                pooled = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
            else:
                place = real.sum(1) - 1 if self.pooling == "last" else torch.zeros_like(x[:, 0])
                pooled = states[torch.arange(len(some), device=x.device), place]
            features.append(F.normalize(pooled, dim=-1).cpu())
            order += some
        return torch.cat(features)[torch.tensor(order).argsort()]


def again(p: Tensor, q: Tensor, resamples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Bootstrap resamples of both sets of indices."""
    rng = torch.Generator().manual_seed(seed)

    def draw(x: Tensor) -> Tensor:
        return x[torch.randint(len(x), (len(x),), generator=rng)]

    return [(draw(p), draw(q)) for _ in range(resamples)]


def score(p: Tensor, q: Tensor, seed: int, buckets: int | None = None) -> float:
    """MAUVE of two sets of features, [n, W] each: the mean over several clusterings."""
    count = buckets or bucket_count(len(p), len(q))
    x, rng = reduced(torch.cat([p, q])), torch.Generator().manual_seed(seed)
    found = []
    for _ in range(CLUSTERINGS):
        labels = clusters(x, count, rng)
        found.append(frontier_area(histogram(labels[: len(p)], count), histogram(labels[len(p) :], count)))
    return statistics.fmean(found)


def bucket_count(*sizes: int) -> int:
    """The default number of buckets: a tenth of the smaller set, at least 2."""
    return max(2, round(min(sizes) / PER_BUCKET))


def reduced(x: Tensor) -> Tensor:
    """Normalised features projected on the principal components that hold 90 % of the variance, float64 [N, fewer]."""
    x = F.normalize(x.double(), dim=-1)
    x = x - x.mean(0)
    variance, directions = torch.linalg.eigh(x.T @ x)
    share = variance.flip(0).cumsum(0) / variance.sum()
    return x @ directions.flip(1)[:, : int((share < VARIANCE).sum()) + 1]


def clusters(x: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """The bucket of each point, int64 [N], by the best of several runs of k-means from random points."""
    unassigned = torch.full((len(x),), -1)
    best, least = unassigned, float("inf")
    for _ in range(REDOS):
        centres = x[torch.randperm(len(x), generator=rng)[:count]]
        labels = unassigned
        for _ in range(ITERATIONS):
            # The squared distance without |x|², which is the same for every centre.
            distance, nearest = torch.addmm(centres.square().sum(1), x, centres.T, alpha=-2).min(1)
            if torch.equal(nearest, labels):
                break
            labels = nearest
            sizes = labels.bincount(minlength=count)[:, None]
            sums = torch.zeros_like(centres).index_add(0, labels, x)
            centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
        if distance.sum() < least:
            best, least = labels, float(distance.sum())
    return best


def histogram(labels: Tensor, count: int) -> Tensor:
    """The fraction of texts in each bucket, float64 [K]."""
    return labels.bincount(minlength=count).double() / len(labels)


def frontier_area(p: Tensor, q: Tensor) -> float:
    """The area under the divergence frontier of two histograms, float64 [K] each."""
    some = p + q > 0
    p, q = p[some], q[some]
    w = torch.linspace(1e-6, 1 - 1e-6, POINTS, dtype=torch.float64)[:, None]
    r = w * p + (1 - w) * q
    x, y = (torch.exp(-SCALE * torch.xlogy(one, one / r).sum(1)) for one in (q, p))
    # From (1, 0) to (0, 1): x falls and y grows with w.
    x, y = F.pad(F.pad(x, (1, 0), value=1.0), (0, 1)), F.pad(F.pad(y, (0, 1), value=1.0), (1, 0))
    return float(torch.trapezoid(x, y))
