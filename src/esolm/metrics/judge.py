"""Sample quality by an outside judge: a causal language model that took no part in the training, and sample entropy.

Perplexity alone is misleading: a repeated sentence has a very low one. The entropy of a sample's tokens reveals that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import tokenizer as make_tokenizer
from ..likelihood.estimators import standard_error
from ..likelihood.orders import windows
from .outside_models import UNLIMITED, OutsideModel, batches, load_causal
from .samples import is_samples, read_samples, read_texts


def judge(
    file: str,
    judge: str,
    batch_size: int = 8,
    device: str = "cpu",
    tokenizer: str | None = None,
    delimiter: str | None = None,
    num_texts: int | None = None,
    long: Literal["windows", "chunks", "cut"] = "windows",
    max_tokens: int | None = None,
    bos: bool = True,
    first: bool = True,
    eos: Literal["cut", "first", "all"] = "cut",
) -> dict[str, Any]:
    """Generative perplexity and entropy of the samples that `esolm sample --out` wrote, or of real texts.

    `long_texts` counts the texts that are longer than the judge's context.

    Args:
        file: JSON lines with `text` and `tokens`; with `tokenizer`, a corpus as in `esolm prepare`.
        judge: A causal language model for transformers: a folder, a .gguf file, or a name on the hub.
        batch_size: Texts in one pass of the judge.
        device: Device of the judge.
        tokenizer: For a corpus: the tokenizer or model that gives the tokens of the entropy, as in `esolm prepare`. For
            samples with eos first or all: that of the model that wrote them.
        delimiter: For a corpus: the line that separates its documents, as in `esolm prepare`.
        num_texts: Judge only the first texts.
        long: How a text that is longer than the judge's context is scored: in overlapping windows, each token once
            after at least half a context; in chunks, each as a text of its own; or cut to the context.
        max_tokens: Cut each text to this number of the judge's tokens.
        bos: Put the judge's beginning-of-text token before each text, or chunk. Without it, the first token cannot be
            scored.
        first: Score the first token of each text, or chunk.
        eos: cut scores a sample up to its first end-of-sequence token. The others score it whole: first without the
            end-of-sequence tokens after the first one of a text, or chunk; all with every token.

    Raises:
        ValueError: If the file or the judge cannot be read, or no text has a token to score.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    samples = _samples(file, tokenizer, delimiter, num_texts, eos != "cut")
    outside = load_causal(judge, device)
    end = outside.tokenizer.eos_token or ""
    texts = [sample["text"] if eos == "cut" else end.join(sample["text"]) for sample in samples]
    judged = judged_nats(outside, texts, batch_size, long, max_tokens, bos, first, every_eos=eos != "first")
    if not judged.counts.any():
        raise ValueError(f"none of the {len(texts)} texts in {file} has a token that the judge can score")
    return _summary(judged, texts, [sample["tokens"] for sample in samples])


def _summary(judged: Judged, texts: Sequence[str], tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The numbers that `judge` returns. tokens: those of each sample, by the tokenizer of the entropy."""
    nats, counts = judged.nats, judged.counts
    entropies = torch.tensor([entropy(each) for each in tokens], dtype=torch.float64)
    mean, size = float(nats.sum() / counts.sum()), sum(len(text.encode()) for text in texts)
    error = standard_error(nats, counts)
    return {
        "samples": len(texts),
        "long_texts": judged.long,
        "cut_texts": judged.cut,
        "empty_texts": int((counts == 0).sum()),
        "tokens": int(counts.sum()),
        "generative_perplexity": math.exp(mean),
        "nats": mean,
        "stderr": error if math.isfinite(error) else None,
        "bits_per_byte": None if judged.cut else float(nats.sum()) / math.log(2) / size,
        "entropy": float(entropies.mean()),
        "entropy_stderr": float(entropies.std()) / math.sqrt(len(texts)) if len(texts) > 1 else None,
    }


def _samples(
    file: str, tokenizer: str | None, delimiter: str | None, limit: int | None, whole: bool
) -> list[dict[str, Any]]:
    """The texts to judge, with their tokens; whole: each as a list of the texts between its EOS tokens."""
    if whole and (tokenizer is None or not is_samples(Path(file))):
        raise ValueError(
            "eos first and all judge whole samples: give the file that `esolm sample --out` wrote, and with "
            "--tokenizer the model that wrote it"
        )
    if tokenizer is None:
        return read_samples(Path(file))[:limit]
    made = make_tokenizer(tokenizer)
    if not whole:
        return [{"text": text, "tokens": made.encode(text)} for text in read_texts(file, delimiter, limit)]
    samples = read_samples(Path(file))[:limit]
    for sample in samples:
        parts: list[list[int]] = [[]]
        for id in sample["tokens"]:
            parts.append([]) if id == made.eos_id else parts[-1].append(id)
        sample["text"] = [made.decode(part) for part in parts]
    return samples


def entropy(tokens: Sequence[int]) -> float:
    """Entropy of the sample's token frequencies, in nats: low where few tokens are repeated."""
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    return -sum(share * math.log(share) for share in shares)


class Judged(NamedTuple):
    """Nats and number of scored tokens of each text, float64 [n], and how many texts were too long, or cut."""

    nats: Tensor
    counts: Tensor
    long: int
    cut: int


@torch.inference_mode()
def judged_nats(
    outside: OutsideModel,
    texts: Sequence[str],
    batch_size: int,
    long: str = "windows",
    max_tokens: int | None = None,
    bos: bool = True,
    first: bool = True,
    every_eos: bool = True,
) -> Judged:
    """Score texts by an outside model; the options are those of `judge`.

    With bos a text follows the judge's beginning-of-text token. If it has none, the first token is not scored.
    """
    model, tokenizer = outside
    start = [tokenizer.bos_token_id] if bos and tokenizer.bos_token_id is not None else []
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    room = outside.positions - len(start)
    keep = min(max_tokens or UNLIMITED, room if long == "cut" else UNLIMITED)
    step = room if long == "chunks" else UNLIMITED
    kept = [ids[:keep] for ids in encoded]
    rows = [(i, ids[k : k + step]) for i, ids in enumerate(kept) for k in range(0, len(ids), step)]
    scored = [_scored(ids, len(start), first, None if every_eos else tokenizer.eos_token_id) for _, ids in rows]
    half = max(1, outside.positions // 2)
    parts = [
        (number, begin, new, end)
        for number, (_, ids) in enumerate(rows)
        for begin, new, end in windows(len(start) + len(ids), outside.positions, half)
    ]
    pieces = [(start + rows[number][1])[begin:end] for number, begin, _, end in parts]
    nats, counts = torch.zeros(2, len(texts), dtype=torch.float64)
    for some, x, real in batches(pieces, batch_size, 0, next(model.parameters()).device, "judging"):
        logits = model(input_ids=x, attention_mask=real.long()).logits
        for place, row, scores in zip(some, x, logits):
            number, begin, new, end = parts[place]
            wanted = scored[number][begin:end] & (torch.arange(begin, end) >= max(new, begin + 1))
            # One text at a time: a float copy of all logits of a batch takes hundreds of megabytes.
            nats[rows[number][0]] += _nats(scores[: end - begin], row[: end - begin], wanted)
            counts[rows[number][0]] += wanted.sum()
    lengths = [len(ids) for ids in encoded]
    return Judged(nats, counts, sum(n > room for n in lengths), sum(n > keep for n in lengths))


def _scored(ids: Sequence[int], skipped: int, first: bool, eos: int | None) -> Tensor:
    """Which tokens of `skipped` ones and ids are scored, bool: of the id `eos` only the first."""
    row = torch.tensor([*[-1] * skipped, *ids])
    again = (row == eos) & ((row == eos).cumsum(0) > 1) if eos is not None else torch.zeros_like(row, dtype=torch.bool)
    return ~again & (torch.arange(len(row)) >= skipped + (not first))


def _nats(logits: Tensor, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Sum over the wanted tokens, not the first, each predicted from those before it; float64 [] on the CPU."""
    wanted = wanted[1:].to(logits.device)
    return F.cross_entropy(logits[:-1][wanted].float(), tokens[1:][wanted], reduction="none").cpu().double().sum()
