"""Sample quality by an outside judge: a causal language model that took no part in the training, and sample entropy.

Perplexity alone is misleading: a repeated sentence has a very low one. The entropy of a sample's tokens reveals that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import tokenizer as make_tokenizer
from ..likelihood.estimators import standard_error
from ..likelihood.orders import windows
from .outside_models import OutsideModel, batches, load_causal
from .samples import read_samples, read_texts


def judge(
    file: str,
    judge: str,
    batch_size: int = 8,
    device: str = "cpu",
    tokenizer: str | None = None,
    delimiter: str | None = None,
    num_texts: int | None = None,
) -> dict[str, Any]:
    """Generative perplexity and entropy of the samples that `esolm sample --out` wrote, or of real texts.

    Texts that are longer than the judge's context are scored in overlapping windows; `long_texts` counts them.

    Args:
        file: JSON lines with `text` and `tokens`; with `tokenizer`, a corpus as in `esolm prepare`.
        judge: A causal language model for transformers: a folder, a .gguf file, or a name on the hub.
        batch_size: Texts in one pass of the judge.
        device: Device of the judge.
        tokenizer: For a corpus: the tokenizer or model that gives the tokens of the entropy, as in `esolm prepare`.
        delimiter: For a corpus: the line that separates its documents, as in `esolm prepare`.
        num_texts: Judge only the first texts.

    Raises:
        ValueError: If the file or the judge cannot be read, or no text has a token to score.
    """
    if tokenizer is None:
        samples = read_samples(Path(file))[:num_texts]
    else:
        encode = make_tokenizer(tokenizer).encode
        samples = [{"text": text, "tokens": encode(text)} for text in read_texts(file, delimiter, num_texts)]
    texts = [sample["text"] for sample in samples]
    outside = load_causal(judge, device)
    nats, counts, long_texts = judged_nats(outside, texts, batch_size)
    if not counts.any():
        raise ValueError(f"none of the {len(texts)} texts in {file} has a token that the judge can score")
    entropies = torch.tensor([entropy(sample["tokens"]) for sample in samples], dtype=torch.float64)
    mean, size = float(nats.sum() / counts.sum()), sum(len(text.encode()) for text in texts)
    error = standard_error(nats, counts)
    return {
        "samples": len(samples),
        "long_texts": long_texts,
        "empty_texts": int((counts == 0).sum()),
        "generative_perplexity": math.exp(mean),
        "nats": mean,
        "stderr": error if math.isfinite(error) else None,
        "bits_per_byte": float(nats.sum()) / math.log(2) / size,
        "entropy": float(entropies.mean()),
        "entropy_stderr": float(entropies.std()) / math.sqrt(len(samples)) if len(samples) > 1 else None,
    }


def entropy(tokens: Sequence[int]) -> float:
    """Entropy of the sample's token frequencies, in nats: low where few tokens are repeated."""
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    return -sum(share * math.log(share) for share in shares)


@torch.inference_mode()
def judged_nats(outside: OutsideModel, texts: Sequence[str], batch_size: int) -> tuple[Tensor, Tensor, int]:
    """Nats and number of scored tokens of each text, float64 [n], and the number of texts that needed windows.

    A text follows the judge's beginning-of-text token. If it has none, the first token of a text is not scored. A text
    that does not fit the judge's context is split into windows: each token is scored once, after at least half a
    context of the tokens before it.
    """
    model, tokenizer = outside
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = [start + tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    limit = outside.positions
    parts = [(i, *window) for i, row in enumerate(rows) for window in windows(len(row), limit, max(1, limit // 2))]
    pieces = [rows[i][begin:end] for i, begin, _, end in parts]
    nats = torch.zeros(len(rows), dtype=torch.float64)
    for some, x, real in batches(pieces, batch_size, 0, next(model.parameters()).device, "judging"):
        logits = model(input_ids=x, attention_mask=real.long()).logits
        for place, row, scores in zip(some, x, logits):
            text, begin, first, end = parts[place]
            # One text at a time: a float copy of all logits of a batch takes hundreds of megabytes.
            nats[text] += _nats(scores[: end - begin], row[: end - begin], max(first - begin, 1))
    counts = torch.tensor([max(len(row) - 1, 0) for row in rows], dtype=torch.float64)
    return nats, counts, sum(len(row) > limit for row in rows)


def _nats(logits: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Sum over the tokens from `first` (at least 1) on, each predicted from those before it; float64 [] on the CPU."""
    return F.cross_entropy(logits[first - 1 : -1].float(), tokens[first:], reduction="none").cpu().double().sum()
