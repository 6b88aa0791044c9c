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

from ..runtime.files import unreadable
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
    """Precision, recall and F1 of the greedy matching of contextual embeddings by cosine similarity, without idf.

    The numbers are those of the `bert_score` package: every token but the special ones is matched with the nearest
    token of the other text, which may be a special one.
    """

    def __init__(self, path: str, layer: int | None = None, baseline: str | None = None) -> None:
        """path: a folder with an encoder and its tokenizer. layer: the layer to compare, 0 for the embeddings, by
        default the last. baseline: a file of the package, LAYER,P,R,F in each line: the scores of unrelated texts,
        which become 0."""
        self.layer = -1 if layer is None else layer
        self.baseline = torch.zeros(3) if baseline is None else read_baseline(Path(baseline), self.layer)
        self.outside = load_encoder(path)
        layers = self.outside.model.config.num_hidden_layers
        if not -1 <= self.layer <= layers:
            raise ValueError(f"layer is {layer}; the encoder in {path} has layers 0 to {layers}")
        split = getattr(getattr(self.outside.tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
        # As in the package, byte-level tokenizers see a space before the first word, as before all others.
        self.prefix = " " if type(split).__name__ == "ByteLevel" else ""

    @torch.inference_mode()
    def embed(self, text: str) -> tuple[Tensor, Tensor]:
        """Unit vectors of the tokens of a text, [n, W], and which of them are not special, bool [n]."""
        model, tokenizer = self.outside
        limit = min(tokenizer.model_max_length, self.outside.positions)
        options = {"return_tensors": "pt", "truncation": True, "max_length": limit, "return_special_tokens_mask": True}
        found = tokenizer(f"{self.prefix}{text.strip()}" if text.strip() else "", **options)
        special = found.pop("special_tokens_mask")[0].bool()
        states = model(**found, output_hidden_states=True).hidden_states[self.layer][0]
        return torch.nn.functional.normalize(states, dim=-1), ~special

    def __call__(self, prediction: str, reference: str) -> Tensor:
        """Precision, recall and F1, float [3], rescaled by the baseline; 0 before that if a text is empty."""
        (a, ours), (b, theirs) = self.embed(prediction), self.embed(reference)
        found = torch.zeros(3)
        if ours.any() and theirs.any():
            near = a @ b.T
            precision, recall = near.amax(1)[ours].mean(), near.amax(0)[theirs].mean()
            found = torch.stack([precision, recall, 2 * precision * recall / (precision + recall)]).nan_to_num()
        return (found - self.baseline) / (1 - self.baseline)


def read_baseline(path: Path, layer: int) -> Tensor:
    """The mean precision, recall and F1 of unrelated texts at a layer, float [3]; -1 is the last."""
    try:
        lines = path.read_text(encoding="utf-8").split()
        rows = {
            int(number): [float(value) for value in rest] for number, *rest in (row.split(",") for row in lines[1:])
        }
        found = torch.tensor(rows[max(rows) if layer == -1 else layer])
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{path} has no baseline for layer {layer}: give a file of bert_score, with LAYER,P,R,F in each line"
        ) from error
    if found.shape != (3,) or not bool((found < 1).all()):
        raise ValueError(f"{path} must have three numbers below 1 for layer {layer}: precision, recall and F1")
    return found


def overlap(
    file: str,
    prediction: str = "prediction",
    reference: str = "target",
    bertscore: str | None = None,
    layer: int | None = None,
    baseline: str | None = None,
) -> dict[str, Any]:
    """Compare predictions with references, in a file such as `esolm sample --prompt_file … --out` writes.

    Args:
        file: JSON lines with predictions and references.
        prediction: The field that holds the prediction.
        reference: The field that holds the reference, a text or a list of texts.
        bertscore: A folder with a transformers encoder; adds BERTScore.
        layer: The layer that BERTScore compares, by default the last; 17 for roberta-large.
        baseline: Rescale BERTScore by this file of the bert_score package, for example its
            rescale_baseline/en/roberta-large.tsv.

    Raises:
        ValueError: If the file is missing, has no records, or a record lacks a field.
    """
    if bertscore is None and (layer is not None or baseline is not None):
        raise ValueError("layer and baseline are options of BERTScore: add --bertscore FOLDER, or leave them out")
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
        score = BertScore(bertscore, layer, baseline)
        best = [torch.stack([score(p, r) for r in those]).amax(0) for p, those in zip(made, wanted)]
        names = ("bertscore_precision", "bertscore_recall", "bertscore")
        found |= dict(zip(names, torch.stack(best).double().mean(0).tolist()))
    return found
