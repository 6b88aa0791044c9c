"""Overlap of predictions with reference texts: ROUGE, and BERTScore with a model on disk.

ROUGE is that of the `rouge_score` package without stemming: words are runs of a-z and 0-9 in the lower-cased text. With
several references, the best score counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .outside_models import load_encoder
from .samples import read_records

KINDS = ("rouge1", "rouge2", "rougeL")


def words(text: str) -> list[str]:
    """The words that ROUGE compares."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """F1 of common words, of common word pairs, and of the longest common subsequence."""
    a, b = words(prediction), words(reference)
    found = {}
    for n, kind in enumerate(KINDS[:2], 1):
        ours, theirs = (Counter(zip(*(text[i:] for i in range(n)))) for text in (a, b))
        found[kind] = f1((ours & theirs).total(), ours.total(), theirs.total())
    return {**found, "rougeL": f1(common(a, b), len(a), len(b))}


def f1(hits: float, ours: float, theirs: float) -> float:
    """The harmonic mean of hits / ours and hits / theirs; 0 without hits."""
    return 2 * hits / (ours + theirs) if hits else 0.0


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        last = row
        row = [0]
        for j, y in enumerate(b):
            row.append(last[j] + 1 if x == y else max(row[j], last[j + 1]))
    return row[-1]


def best_rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The mean of each ROUGE over predictions, each with its best reference."""
    sums = dict.fromkeys(KINDS, 0.0)
    for prediction, those in zip(predictions, references, strict=True):
        scores = [rouge(prediction, reference) for reference in those]
        for kind in KINDS:
            sums[kind] += max(score[kind] for score in scores)
    return {kind: value / max(len(predictions), 1) for kind, value in sums.items()}


class BertScore:
    """F1 of the greedy matching of contextual embeddings by cosine similarity, without idf and without rescaling."""

    def __init__(self, path: str, layer: int | None = None) -> None:
        """path: a folder with an encoder and its tokenizer. layer: the layer to compare, by default the last."""
        self.outside = load_encoder(path)
        self.layer = -1 if layer is None else layer

    @torch.inference_mode()
    def embed(self, text: str) -> Tensor:
        """Unit vectors of the tokens of a text, without the special ones: [n, W]."""
        model, tokenizer = self.outside
        limit = min(tokenizer.model_max_length, self.outside.positions)
        found = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit, return_special_tokens_mask=True)
        special = found.pop("special_tokens_mask")[0].bool()
        states = model(**found, output_hidden_states=True).hidden_states[self.layer][0]
        return torch.nn.functional.normalize(states[~special], dim=-1)

    def __call__(self, prediction: str, reference: str) -> float:
        a, b = self.embed(prediction), self.embed(reference)
        if not len(a) or not len(b):
            return 0.0
        near = a @ b.T
        precision, recall = near.amax(1).mean().item(), near.amax(0).mean().item()
        return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def overlap(
    file: str,
    prediction: str = "prediction",
    reference: str = "target",
    bertscore: str | None = None,
    layer: int | None = None,
) -> dict[str, Any]:
    """Compare predictions with references, in a file such as `esolm sample --prompt_file … --out` writes.

    Args:
        file: JSON lines with predictions and references.
        prediction: The field that holds the prediction.
        reference: The field that holds the reference, a text or a list of texts.
        bertscore: A folder with a transformers encoder; adds BERTScore.
        layer: The layer that BERTScore compares, by default the last.

    Raises:
        ValueError: If the file is missing, has no records, or a record lacks a field.
    """
    if layer is not None and bertscore is None:
        raise ValueError(f"layer is {layer}, but it is an option of BERTScore: add --bertscore FOLDER or leave it out")
    advice = f"give JSON lines with {prediction!r}, a text, and {reference!r}, a text or a list of texts"
    made: list[str] = []
    wanted: list[list[str]] = []
    for number, record in read_records(Path(file), advice).items():
        text, those = record.get(prediction), record.get(reference)
        those = [those] if isinstance(those, str) else those
        if not isinstance(text, str) or not isinstance(those, list) or not those:
            raise ValueError(f"line {number} of {file} lacks {prediction!r} or {reference!r}: {advice}")
        made.append(text)
        wanted.append(those)
    found: dict[str, Any] = {"predictions": len(made), **best_rouge(made, wanted)}
    if bertscore is not None:
        score = BertScore(bertscore, layer)
        found["bertscore"] = sum(max(score(p, r) for r in those) for p, those in zip(made, wanted)) / len(made)
    return found
