"""Metrics without a network: perplexities of n-grams, and known words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from esolm import cli
from esolm.metrics.ngrams import ngram_perplexity
from esolm.metrics.words import split, words


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


def test_known_words_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real.txt").write_text("The cat's hat.\n<end>\nA cat sat!")
    samples = [{"text": "A CAT sat-sat, blorp 7", "tokens": [1]}, {"text": "the cat’s", "tokens": [1]}]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    file, real = str(tmp_path / "samples.jsonl"), str(tmp_path / "real.txt")
    found = words(file, real, delimiter="<end>")
    assert (found["texts"], found["words"], found["known"], found["unknown"]) == (2, 7, 6 / 7, ["blorp"])
    assert found["known_stderr"] == pytest.approx((2 / 7) * 2**0.5 * 2**0.5 / 7)
    assert words(real, real, delimiter="<end>")["known"] == 1
    assert words(file, real, delimiter="<end>", num_texts=1)["words"] == 5
    assert cli.main(["words", file, real, "--delimiter", "<end>"]) == 0
    assert "blorp" in capsys.readouterr().out
    assert found["doubled"] == 0  # sat-sat is no slip
    (tmp_path / "twice.txt").write_text("The the dog dog\ndog, dog doge")
    assert words(str(tmp_path / "twice.txt"), real)["doubled"] == 3 / 7
    (tmp_path / "real.txt").write_text("The cat's hat.\n</s>\nA cat sat!")
    words(file, real)
    assert f'"</s>" of {real} (1)' in capsys.readouterr().err
    (tmp_path / "none.txt").write_text("123 !")
    with pytest.raises(ValueError, match="no word"):
        words(str(tmp_path / "none.txt"), real)


def test_words_have_letters_and_inner_apostrophes() -> None:
    assert split("Don’t 'quote' 3 time_s x2 été") == ["don't", "quote", "time", "s", "x", "été"]
