"""SmolLM2-135M converted by esolm, beside transformers: WikiText-2 and LAMBADA, the same tokens and windows.

Shapes: n sequences, L length, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jsonargparse import CLI
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import esolm
from esolm.bench.report import save
from esolm.core.batch import Batch

Logits = Callable[[Tensor], Tensor]
"""From tokens [n, L] to the logits of each one given BOS and those to its left, [n, L, V]."""


def ours(folder: str) -> tuple[Logits, Any]:
    """Return the converted model and its tokenizer."""
    lm = esolm.load(folder)
    return lambda x: lm.system.logits(lm.net, Batch(x)), lm.tokenizer


def theirs(file: Path, bos: int) -> tuple[Logits, Any]:
    """Return the model as transformers opens it, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return lambda x: model(torch.cat([torch.full((len(x), 1), bos), x], 1)).logits[:, :-1], words


def nats(logits: Tensor, x: Tensor, size: int) -> Tensor:
    """Nats of each token, [n, L], over the `size` ids that both models have."""
    return -logits[..., :size].double().log_softmax(-1).gather(-1, x[..., None])[..., 0]


def wikitext(models: dict[str, Logits], encode: Callable[[str], list[int]], path: str, windows: int, length: int,
             size: int) -> dict[str, Any]:  # fmt: skip
    """Nats per token of the first windows of a text, each after BOS."""
    ids = encode(Path(path).read_text("utf-8")[: 8 * windows * length])
    rows = torch.tensor(ids[: windows * length]).view(windows, length)
    means = {name: [] for name in models}
    for row in rows.split(4):
        for name, model in models.items():
            means[name] += nats(model(row), row, size).mean(1).tolist()
    found = {name: torch.tensor(values).double() for name, values in means.items()}
    return {
        "windows": windows, "tokens": windows * length,
        **{f"{name}_nats": values.mean().item() for name, values in found.items()},
        "stderr": (found["esolm"].std() / windows**0.5).item(),
        "largest_difference": (found["esolm"] - found["transformers"]).abs().max().item(),
    }  # fmt: skip


def lambada(models: dict[str, Logits], encode: Callable[[str], list[int]], path: str, passages: int,
            size: int) -> dict[str, Any]:  # fmt: skip
    """Nats and greedy accuracy of the last word of each passage."""
    lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines() if line.strip()][:passages]
    found: dict[str, list[tuple[float, bool]]] = {name: [] for name in models}
    for line in lines:
        x, start = torch.tensor([encode(line)]), len(encode(line.rpartition(" ")[0]))
        for name, model in models.items():
            logits, target = model(x)[:, start:, :size], x[:, start:]
            hit = bool((logits.argmax(-1) == target).all())
            found[name].append((nats(logits, target, size).sum().item(), hit))
    values = {name: torch.tensor([v for v, _ in pairs]).double() for name, pairs in found.items()}
    return {
        "passages": len(lines),
        **{f"{name}_nats": v.mean().item() for name, v in values.items()},
        **{f"{name}_accuracy": sum(hit for _, hit in pairs) / len(lines) for name, pairs in found.items()},
        "stderr": (values["esolm"].std() / len(lines) ** 0.5).item(),
        "largest_difference": (values["esolm"] - values["transformers"]).abs().max().item(),
    }  # fmt: skip


def main(
    gguf: str, model: str, corpora: str, out: str, windows: int = 16, length: int = 256, passages: int = 40
) -> None:
    """Measure both models and write the result.

    Args:
        gguf: the GGUF file of SmolLM2-135M.
        model: what `esolm convert` made of it.
        corpora: folder with wikitext-2 and lambada.
        out: the result file.
        windows: windows of WikiText-2.
        length: tokens in a window.
        passages: passages of LAMBADA.
    """
    logits, words = ours(model)
    other, their_words = theirs(Path(gguf), words.bos_id)
    models, size = {"esolm": logits, "transformers": other}, len(their_words)
    wiki, passage = (f"{corpora}/{name}" for name in
                     ("wikitext-2/wiki.valid.tokens", "lambada/lambada_development_plain_text.txt"))  # fmt: skip
    sample = Path(wiki).read_text("utf-8")[:20000]
    assert words.encode(sample) == their_words(sample, add_special_tokens=False).input_ids
    with torch.inference_mode():
        result = {
            "wikitext": wikitext(models, words.encode, wiki, windows, length, size),
            "lambada": lambada(models, words.encode, passage, passages, size),
        }
    save(out, {"windows": windows, "length": length, "passages": passages, **result})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    CLI(main, as_positional=True)
