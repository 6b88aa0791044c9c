"""How close predictions are to what people wrote: ROUGE, and BERTScore by a model on the disk.

ROUGE is that of the `rouge_score` package without stemming: words are runs of a-z and 0-9 of the lower-cased text. Of
several references the nearest counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

KINDS = ("rouge1", "rouge2", "rougeL")


def words(text: str) -> list[str]:
    """The words that ROUGE counts."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """F1 of common words, common pairs of neighbours, and the longest common subsequence."""
    a, b = words(prediction), words(reference)
    found = {}
    for n, kind in enumerate(KINDS[:2], 1):
        ours, theirs = (Counter(zip(*(text[i:] for i in range(n)))) for text in (a, b))
        found[kind] = f1((ours & theirs).total(), ours.total(), theirs.total())
    return {**found, "rougeL": f1(common(a, b), len(a), len(b))}


def f1(hits: float, ours: float, theirs: float) -> float:
    """The harmonic mean of hits / ours and hits / theirs; 0 where nothing is common."""
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
    """The mean of each kind, every prediction by its nearest reference."""
    sums = dict.fromkeys(KINDS, 0.0)
    for prediction, those in zip(predictions, references, strict=True):
        scores = [rouge(prediction, reference) for reference in those]
        for kind in KINDS:
            sums[kind] += max(score[kind] for score in scores)
    return {kind: value / max(len(predictions), 1) for kind, value in sums.items()}


class BertScore:
    """F1 of the greedy matching of contextual embeddings by their cosine, without idf and without rescaling."""

    def __init__(self, path: str, layer: int | None = None) -> None:
        """path: a folder of an encoder with its tokenizer. layer: whose output is compared, by default the last's."""
        if not Path(path).is_dir():
            raise ValueError(f"no folder {path}: BERTScore needs a model of transformers on the disk")
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise ValueError("BERTScore needs transformers: pip install 'esolm[hf]'") from error
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self.model = AutoModel.from_pretrained(path, local_files_only=True).eval()
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no model of transformers with its tokenizer: {error!s:.200}") from error
        self.layer = -1 if layer is None else layer

    def embed(self, text: str) -> Tensor:
        """Unit vectors of the tokens of a text, without the special ones: [n, W]."""
        import torch

        limit = min(self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", 1 << 30))
        found = self.tokenizer(
            text, return_tensors="pt", truncation=True, max_length=limit, return_special_tokens_mask=True
        )
        special = found.pop("special_tokens_mask")[0].bool()
        with torch.no_grad():
            states = self.model(**found, output_hidden_states=True).hidden_states[self.layer][0]
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
    """Score the predictions of a file of JSON lines, as `esolm sample --prompt_file … --out` writes it.

    Args:
        file: JSON lines with predictions and references.
        prediction: The field of the prediction.
        reference: The field of the reference, a text or a list of texts.
        bertscore: A folder of a transformers encoder; adds BERTScore.
        layer: The layer whose output BERTScore compares, by default the last.

    Raises:
        ValueError: If the file is missing, has no records, or a record lacks a field.
    """
    if layer is not None and bertscore is None:
        raise ValueError(f"layer is {layer}; it is of BERTScore: give --bertscore FOLDER, or leave it out")
    if not Path(file).is_file():
        raise ValueError(f"no file {file}: give JSON lines with {prediction!r} and {reference!r}")
    made, wanted = [], []
    with Path(file).open(encoding="utf-8") as opened:
        lines = list(opened)  # splitlines() would also split at a U+2028 inside a text
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            those = record[reference]
            made.append(record[prediction])
            wanted.append([those] if isinstance(those, str) else list(those))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {file} has no {prediction!r} and {reference!r}: {error!r}") from error
        if not isinstance(made[-1], str) or not wanted[-1]:
            raise ValueError(f"line {number} of {file}: {prediction!r} must be a text and {reference!r} one or more")
    if not made:
        raise ValueError(f"{file} has no records: nothing to score")
    found: dict[str, Any] = {"predictions": len(made), **best_rouge(made, wanted)}
    if bertscore is not None:
        score = BertScore(bertscore, layer)
        found["bertscore"] = sum(max(score(p, r) for r in those) for p, those in zip(made, wanted)) / len(made)
    return found
