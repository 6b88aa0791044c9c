"""Known words: how many words of samples occur in reference texts.

A model that has not learned to spell joins pieces into words that nobody uses. Names and rare words are unknown in real
texts too, so compare with the share of real texts that are not part of the reference.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from typing import Any

from .samples import read_corpus, read_texts

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")  # letters, with apostrophes inside


def words(file: str, reference: str, delimiter: str | None = None, num_texts: int | None = None) -> dict[str, Any]:
    """The share of words that occur in the reference, over all words of the texts, with its standard error.

    Args:
        file: The JSON lines that `esolm sample --out` wrote, or a corpus as in `esolm prepare`.
        reference: A corpus as in `esolm prepare`.
        delimiter: The line that separates the documents of text files, as in `esolm prepare`.
        num_texts: Use only the first texts of `file`.

    Raises:
        ValueError: If a file cannot be read, or the texts have no word.
    """
    known = {word for text in read_corpus(reference, delimiter) for word in split(text)}
    texts = [split(text) for text in read_texts(file, delimiter, num_texts)]
    total = sum(map(len, texts))
    if not total:
        raise ValueError(f"the texts of {file} have no word")
    hits = [sum(word in known for word in text) for text in texts]
    share = sum(hits) / total
    # Words of one text are not independent: the error is that of a ratio of sums over texts.
    apart = [hit - share * len(text) for hit, text in zip(hits, texts)]
    error = statistics.stdev(apart) * math.sqrt(len(apart)) / total if len(apart) > 1 else None
    unknown = Counter(word for text in texts for word in text if word not in known)
    return {
        "texts": len(texts),
        "words": total,
        "known": share,
        "known_stderr": error,
        "reference_words": len(known),
        "unknown": [word for word, _ in unknown.most_common(20)],
    }


def split(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]
