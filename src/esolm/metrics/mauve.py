"""MAUVE: how near the distribution of samples is to that of real texts, seen through an outside model.

The features of both sets are quantised together by k-means. The score is the area under the frontier of
exp(-c KL(q | r)) and exp(-c KL(p | r)) over the mixtures r = w p + (1 - w) q of the two histograms (Pillutla et al.,
2021): near 1 where they are equal, near 0 where nothing is common. Settings and steps are those of the
authors' package (mauve-text), which is under the GPL and needs faiss; the code is our own, its values the package's.

Shapes: n texts of one set, N of both, W features, K buckets.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import Loader
from ..data.manifest import FILE as MANIFEST
from ..model import until
from ..runtime.machine import keep_memory
from ..runtime.progress import track
from .judge import by_length, load_judge, padded, read

LEAST = 20  # texts of a set: two buckets of ten
PER_BUCKET, VARIANCE, REDOS, ITERATIONS = 10, 0.9, 5, 500
CLUSTERINGS = 5  # over which the score is averaged: of 64 texts, one clustering gave 0.39 ± 0.10 over its seeds
SCALE, POINTS = 5.0, 25  # c, and the mixtures on the frontier
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the architectures end that read from left to right


def mauve(
    file: str,
    references: str,
    embedder: str,
    buckets: int | None = None,
    resamples: int = 10,
    seed: int = 0,
    batch_size: int = 16,
    device: str = "cpu",
) -> dict[str, Any]:
    """MAUVE between the samples that `esolm sample --out` wrote and real texts.

    Args:
        file: JSON lines with `text` and `tokens`.
        references: JSON lines with `text`, or prepared data, whose valid sequences are cut to the samples' length.
            As many as there are samples are compared with them, chosen by the seed.
        embedder: A folder for transformers: an encoder, whose states are averaged, or a causal language model (or a
            .gguf file), of which the state of the last token is taken.
        buckets: Into which the features fall; by default a tenth of the number of samples.
        resamples: Bootstrap resamples for the standard error; 0 leaves it out.
        seed: Of the choice of references, of k-means and of the resamples.
        batch_size: Texts in one pass of the embedder.
        device: Where the embedder runs.

    Raises:
        ValueError: If a file or folder is missing or not what it should be, or there are too few texts.
    """
    samples = read(Path(file))
    n, length = len(samples), max(len(sample["tokens"]) for sample in samples)
    theirs = reference_texts(Path(references), 2 * n, length, seed)  # as many again for the ceiling
    fewest = min(n, len(theirs))
    if fewest < LEAST:
        raise ValueError(f"{n} samples and {len(theirs)} references: MAUVE needs at least {LEAST} of each")
    if buckets is not None and not 2 <= buckets <= fewest:
        raise ValueError(f"buckets is {buckets}: it must be from 2 to {fewest}, the number of texts")
    if resamples != 0 and resamples < 2:
        raise ValueError(f"resamples is {resamples}: it must be 0, for no standard error, or at least 2")
    keep_memory()
    embed = Embedder(embedder, device)
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


def mean_bytes(texts: Sequence[str]) -> float:
    """UTF-8 bytes of a text, in the mean: sets of unequal length are told apart by that alone."""
    return sum(len(text.encode()) for text in texts) / len(texts)


def reference_texts(path: Path, count: int, length: int, seed: int) -> list[str]:
    """At most `count` texts of a file or of the valid split of prepared data, at random."""
    if (path / MANIFEST).is_file():
        return valid_texts(path, count, length, seed)
    if not path.is_file():
        raise ValueError(f"no references in {path}: give JSON lines with `text`, or a folder that `esolm prepare` made")
    texts = []
    with path.open(encoding="utf-8") as opened:
        lines = list(opened)
    for number, line in enumerate(lines, 1):
        try:
            texts += [str(json.loads(line)["text"])] if line.strip() else []
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {path} is no JSON object with a `text`: {error!r}") from error
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return [texts[i] for i in order[:count].tolist()]


def valid_texts(folder: Path, count: int, length: int, seed: int) -> list[str]:
    """Sequences of the valid split, cut as samples are: to their length, and at the end of the text."""
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
    """Features of texts by a model on the disk; nothing from its folder is run."""

    def __init__(self, path: str, device: str = "cpu") -> None:
        gguf = Path(path).suffix == ".gguf"
        if not (Path(path).is_file() if gguf else Path(path).is_dir()):
            raise ValueError(f"no folder {path}: an embedder is a model of transformers on the disk, or a .gguf file")
        self.causal = gguf or is_causal(path)
        if self.causal:
            whole, self.tokenizer = load_judge(path)
            model = whole.base_model  # without the head
        else:
            model, self.tokenizer = load_encoder(path)
        self.model = model.to(device).eval()
        largest = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        self.limit = min(self.tokenizer.model_max_length, largest)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], batch_size: int) -> Tensor:
        """Unit vectors, float32 [n, W]; of a text too long for the model, its beginning."""
        nothing = self.tokenizer.eos_token_id or 0  # an empty text may have no tokens at all
        pad = self.tokenizer.pad_token_id or 0
        found = self.tokenizer(list(texts), truncation=True, max_length=self.limit, padding=False)
        rows = [ids or [nothing] for ids in found["input_ids"]]
        batches, features = by_length(rows, batch_size), []
        for some in track(batches, "embedding"):
            x, real = padded([rows[i] for i in some], pad, self.model.device)
            states = self.model(input_ids=x, attention_mask=real.long()).last_hidden_state  # [B, L, W]
            if self.causal:
                pooled = states[torch.arange(len(some), device=x.device), real.sum(1) - 1]
            else:
                pooled = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
            features.append(F.normalize(pooled, dim=-1).cpu())
        order = torch.tensor([i for some in batches for i in some])
        return torch.cat(features)[order.argsort()]


def is_causal(folder: str) -> bool:
    """Whether the model of a folder reads from left to right, by its configuration."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError("an embedder needs transformers: pip install 'esolm[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is no model of transformers: {str(error).splitlines()[0]}") from error
    if config.is_encoder_decoder:
        raise ValueError(f"{folder} is an encoder with a decoder: give an encoder or a causal language model")
    return any(name.endswith(CAUSAL) for name in config.architectures or [])


def load_encoder(folder: str) -> tuple[Any, Any]:
    """The model and tokenizer of a folder; a pooling layer may be missing, for it is not used."""
    from transformers import AutoModel, AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model, found = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{folder} is no encoder with its tokenizer: {str(error).splitlines()[0]}") from error
    if len(tokenizer) < model.config.vocab_size // 2:  # without its files transformers makes an empty one
        raise ValueError(f"{folder} has a tokenizer of {len(tokenizer)} entries: put that of the model there")
    if missing := sorted(name for name in found["missing_keys"] if "pooler" not in name):
        raise ValueError(f"{folder} lacks {len(missing)} weights of its model, as {missing[0]}: it would see noise")
    return model, tokenizer


def again(p: Tensor, q: Tensor, resamples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Both sets drawn again with replacement, for the bootstrap."""
    rng = torch.Generator().manual_seed(seed)

    def draw(x: Tensor) -> Tensor:
        return x[torch.randint(len(x), (len(x),), generator=rng)]

    return [(draw(p), draw(q)) for _ in range(resamples)]


def score(p: Tensor, q: Tensor, seed: int, buckets: int | None = None) -> float:
    """MAUVE of two sets of features, [n, W] each: the mean over several clusterings, for they differ."""
    count = buckets or bucket_count(len(p), len(q))
    x, rng = reduced(torch.cat([p, q])), torch.Generator().manual_seed(seed)
    found = []
    for _ in range(CLUSTERINGS):
        labels = clusters(x, count, rng)
        found.append(frontier_area(histogram(labels[: len(p)], count), histogram(labels[len(p) :], count)))
    return statistics.fmean(found)


def bucket_count(*sizes: int) -> int:
    """Ten texts of the smaller set for each bucket."""
    return max(2, round(min(sizes) / PER_BUCKET))


def reduced(x: Tensor) -> Tensor:
    """Unit vectors in the principal directions that hold 90 % of their variance: [N, W] -> float64 [N, fewer]."""
    x = F.normalize(x.double(), dim=-1)
    x = x - x.mean(0)
    variance, directions = torch.linalg.eigh(x.T @ x)
    share = variance.flip(0).cumsum(0) / variance.sum()
    return x @ directions.flip(1)[:, : int((share < VARIANCE).sum()) + 1]


def clusters(x: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """The bucket of each point, int64 [N], by the best of several runs of k-means, each begun at random points."""
    nowhere = torch.full((len(x),), -1)
    best, least = nowhere, float("inf")
    for _ in range(REDOS):
        centres = x[torch.randperm(len(x), generator=rng)[:count]]
        labels = nowhere
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
    """The share of each bucket, float64 [K]."""
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
