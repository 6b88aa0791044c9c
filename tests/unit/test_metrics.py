"""n-gram perplexities approach that of the source of the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from esolm.metrics.ngrams import ngram_perplexity


def chain(rng: np.random.Generator, n: int, length: int, vocab: int, table: np.ndarray) -> np.ndarray:
    tokens = np.empty((n, length), np.int64)
    tokens[:, 0] = rng.integers(0, vocab, n)
    for i in range(1, length):
        tokens[:, i] = (table.cumsum(1)[tokens[:, i - 1]] < rng.random((n, 1))).sum(1)
    return tokens


def test_bigram_perplexity_approaches_that_of_a_markov_chain():
    rng = np.random.default_rng(0)
    table = rng.dirichlet(np.full(6, 0.2), 6)
    train, held_out = chain(rng, 4000, 30, 6, table), chain(rng, 500, 30, 6, table)
    nats = -np.log(table[held_out[:, :-1], held_out[:, 1:]]).sum() + len(held_out) * np.log(6)
    own = np.exp(nats / held_out.size)
    two, one = (ngram_perplexity(train, held_out, 6, order) for order in (2, 1))
    assert own * 0.99 < two < own * 1.02 < one


def test_unseen_tokens_have_finite_perplexity():
    train, held_out = np.zeros((20, 4), np.int64), np.full((2, 4), 3)
    for order in (1, 2):
        assert np.isfinite(ngram_perplexity(train, held_out, 5, order))
    with pytest.raises(ValueError, match="3-gram"):
        ngram_perplexity(train, held_out, 5, 3)  # type: ignore[arg-type]
