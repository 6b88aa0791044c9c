"""Baselines without a network: the perplexity of n-gram models.

Shapes: n sequences, L length, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import numpy as np


def ngram_perplexity(train: np.ndarray, held_out: np.ndarray, vocab_size: int, order: Literal[1, 2] = 2) -> float:
    """Perplexity of a smoothed unigram or bigram model of train [n, L] on all tokens of held_out [m, L].

    Unigram p(b) = (c(b) + 1) / (n + V). Bigram p(b|a) = (c(ab) + s p(b)) / (c(a) + s), with the s that is best
    on the last tenth of train, given the counts of the rest; the first token of a sequence is scored with p(b).
    """
    if order not in (1, 2):
        raise ValueError(f"no {order}-gram model: choose order 1 or 2")
    if order == 1:
        return float(np.exp(-np.log(_unigram(train, vocab_size))[held_out].mean()))
    cut = max(1, len(train) - max(1, len(train) // 10))
    strengths = 2.0 ** np.arange(0, 15)
    nats = [_bigram_nats(train[:cut], train[cut:] if cut < len(train) else train, vocab_size, s) for s in strengths]
    best = strengths[int(np.argmin(nats))]
    return float(np.exp(_bigram_nats(train, held_out, vocab_size, best)))


def _unigram(train: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.bincount(train.ravel(), minlength=vocab_size).astype(np.float64) + 1
    return counts / counts.sum()


def _bigram_nats(train: np.ndarray, held_out: np.ndarray, vocab_size: int, strength: float) -> float:
    """Mean nats per token of held_out."""
    prior = _unigram(train, vocab_size)
    keys, counts = np.unique(_pairs(train, vocab_size), return_counts=True)
    before = np.bincount(train[:, :-1].ravel(), minlength=vocab_size)
    pairs = _pairs(held_out, vocab_size)
    place = np.minimum(np.searchsorted(keys, pairs), len(keys) - 1)
    seen = np.where(keys[place] == pairs, counts[place], 0)
    a, b = pairs // vocab_size, pairs % vocab_size
    nats = -np.log((seen + strength * prior[b]) / (before[a] + strength))
    return (nats.sum() - np.log(prior[held_out[:, 0]]).sum()) / held_out.size


def _pairs(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Each pair of neighbouring tokens as one number."""
    wide = tokens.astype(np.int64)
    return (wide[:, :-1] * vocab_size + wide[:, 1:]).ravel()
