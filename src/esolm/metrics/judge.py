"""Sample quality by an outside judge: a causal language model that had no part in the training, and entropy beside it.

A judge alone is easily fooled: one sentence repeated scores very well. The entropy of a sample's own tokens shows it.
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

from ..likelihood.estimators import standard_error
from ..runtime.files import read_json_lines
from ..runtime.machine import keep_memory
from ..runtime.progress import track


def judge(file: str, judge: str, batch_size: int = 8, device: str = "cpu") -> dict[str, Any]:
    """Generative perplexity and entropy of the samples that `esolm sample --out` wrote.

    Args:
        file: JSON lines with `text` and `tokens`.
        judge: a causal language model for transformers: a folder, a .gguf file, or a name on the hub.
        batch_size: texts in one pass of the judge.
        device: where the judge runs.
    """
    samples = read(Path(file))
    keep_memory()
    model, tokenizer = load_judge(judge)
    texts = [sample["text"] for sample in samples]
    nats, counts = judged_nats(model.to(device).eval(), tokenizer, texts, batch_size)
    entropies = torch.tensor([entropy(sample["tokens"]) for sample in samples], dtype=torch.float64)
    mean, size = float(nats.sum() / counts.sum()), sum(len(text.encode()) for text in texts)
    error = standard_error(nats, counts)
    return {
        "samples": len(samples),
        "generative_perplexity": math.exp(mean),
        "nats": mean,
        "stderr": error if math.isfinite(error) else None,
        "bits_per_byte": float(nats.sum()) / math.log(2) / size if size else None,
        "entropy": float(entropies.mean()),
        "entropy_stderr": float(entropies.std()) / math.sqrt(len(samples)) if len(samples) > 1 else None,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The samples of a file, each with its text and its tokens."""
    if not path.is_file():
        raise ValueError(f"no file {path}: write samples with `esolm sample RUN --num_samples 64 --out {path}`")
    samples = [record for _, record in read_json_lines(path)]
    whole = (isinstance(s.get("text"), str) and "tokens" in s for s in samples)
    if not samples or not all(whole):
        raise ValueError(f"{path} has lines without `text` and `tokens`: write it with `esolm sample --out`")
    return samples


def entropy(tokens: Sequence[int]) -> float:
    """Of the sample's own token frequencies, in nats: low where few tokens are repeated."""
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    return -sum(share * math.log(share) for share in shares)


def load_judge(name: str) -> tuple[Any, Any]:
    """The model and tokenizer; nothing from the folder is run."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError("a judge needs transformers: pip install 'esolm[hf]'") from error
    path, options = Path(name), {}
    if path.suffix == ".gguf":
        name, options = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, dtype=torch.float32, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"no judge could be loaded from {name!r}: {str(error).splitlines()[0]}") from error
    model.config.use_cache = False  # every text is read once
    return model, tokenizer


@torch.inference_mode()
def judged_nats(model: Any, tokenizer: Any, texts: Sequence[str], batch_size: int) -> tuple[Tensor, Tensor]:
    """Nats and tokens of each text, float64 [n]. A text is read after the judge's beginning-of-text token, or if it has
    none after its first token, which is then not scored."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = [start + tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and max(map(len, rows)) > limit:
        raise ValueError(f"a text of {max(map(len, rows))} tokens; the judge takes {limit}: sample shorter ones")
    nats = torch.zeros(len(rows), dtype=torch.float64)
    for some in track(by_length(rows, batch_size), "judging"):
        x, real = padded([rows[i] for i in some], 0, next(model.parameters()).device)
        logits = model(input_ids=x, attention_mask=real.long()).logits
        # Text by text: a copy of all logits, as the whole batch would need, is hundreds of megabytes.
        each = [_nats(ours[: len(rows[i])], row[: len(rows[i])]) for i, ours, row in zip(some, logits, x)]
        nats[some] = torch.stack(each)
    return nats, torch.tensor([max(len(row) - 1, 0) for row in rows], dtype=torch.float64)


def _nats(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of all tokens but the first, float64 []."""
    return F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="none").cpu().double().sum()


def by_length(rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Indices of rows in batches of like length, the longest first: little padding, and memory fails at once."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows with padding behind them, int64 [B, L], and which tokens are real, bool [B, L]; L is at least 2."""
    longest = max(2, *map(len, rows))
    x = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device)
    return x, torch.arange(longest, device=device) < torch.tensor([[len(row)] for row in rows], device=device)
