"""Known and doubled words: how many words of samples occur in reference texts, and how many repeat the one before.

A model that has not learned to spell joins pieces into words that nobody uses. Names and rare words are unknown in real
texts too, so compare with the share of real texts that are not part of the reference. Tokens drawn in any order
double words ("it it"), which a judge hardly notices; real texts do it on purpose ("very very").
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from typing import Any

from .samples import read_corpus, read_texts

_DOUBLED = re.compile(r"\b(\w+)(?=\s+\1\b)", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")  # letters, with apostrophes inside


def words(file: str, reference: str, delimiter: str | None = None, num_texts: int | None = None) -> dict[str, Any]:
    """The share of words that occur in the reference, and of those that repeat the word before, with standard errors.

    Args:
        file: The JSON lines that `esolm sample --out` wrote, or a corpus as in `esolm prepare`.
        reference: A corpus as in `esolm prepare`.
        delimiter: The line that separates the documents of text files, as in `esolm prepare`.
        num_texts: Use only the first texts of `file`.

    Raises:
        ValueError: If a file cannot be read, or the texts have no word.
    """
    known = {word for text in read_corpus(reference, delimiter) for word in split(text)}
    whole = read_texts(file, delimiter, num_texts)
    texts = [split(text) for text in whole]
    total = sum(map(len, texts))
    if not total:
        raise ValueError(f"the texts of {file} have no word")
    sizes = [len(text) for text in texts]
    share, error = ratio([sum(word in known for word in text) for text in texts], sizes)
    doubled, doubled_error = ratio([len(_DOUBLED.findall(text)) for text in whole], sizes)
    unknown = Counter(word for text in texts for word in text if word not in known)
    return {
        "texts": len(texts),
        "words": total,
        "known": share,
        "known_stderr": error,
        "doubled": doubled,
        "doubled_stderr": doubled_error,
        "reference_words": len(known),
        "unknown": [word for word, _ in unknown.most_common(20)],
    }


def ratio(hits: list[int], sizes: list[int]) -> tuple[float, float | None]:
    """The sum of hits over that of sizes, with its standard error: words of one text are not independent."""
    share = sum(hits) / sum(sizes)
    apart = [hit - share * size for hit, size in zip(hits, sizes)]
    return share, statistics.stdev(apart) * math.sqrt(len(apart)) / sum(sizes) if len(apart) > 1 else None


def split(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]
