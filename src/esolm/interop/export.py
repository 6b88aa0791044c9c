"""A trained model as a folder for others: weights, configuration, tokenizer, and a card that says what it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch

from ..model import LanguageModel, load
from ..net.protocol import trainable
from ..storage import checkpoint, folder
from ..storage.models import find_folder, locate
from ..training import runs


def export(
    run: str,
    out: str | Path,
    weights: Literal["ema", "model"] = "ema",
    which: Literal["best", "last"] = "best",
    dtype: Literal["float32", "bfloat16"] = "float32",
    force: bool = False,
) -> Path:
    """Write a model as a folder that transformers and `esolm.load` open, with a model card.

    Args:
        run: A run, one checkpoint of it, a converted model, or the name of one that comes with the package.
        out: The folder to make.
        weights: The averaged weights, or the raw ones.
        which: The best or the last checkpoint of the run.
        dtype: What the weights are stored in; bfloat16 rounds them and halves the file.
        force: Replace `out` if it is a model of esolm.

    Raises:
        ValueError: If there is no model in `run`, or `out` holds something else.
    """
    lm, about = load(run, weights, which), describe(find_folder(run), weights, which)
    with folder.new(out := Path(out), force) as partial:
        folder.write(
            partial, trainable(lm.net), lm.system, lm.tokenizer, about, torch.bfloat16 if dtype == "bfloat16" else None
        )
        (partial / "README.md").write_text(card(lm, about, out.name), encoding="utf-8")
    return out


def describe(path: Path, weights: str, which: str) -> dict[str, Any]:
    """What is known of a model's making: steps, tokens, data, and its perplexity with the estimator it is by."""
    if folder.is_model(path):
        return dict(json.loads((path / "config.json").read_text(encoding="utf-8")).get("about", {}))
    found, home = locate(path, which)
    state = checkpoint.read(found)
    about: dict[str, Any] = {"weights": weights, "steps": state["step"], "training_tokens": state.get("tokens")}
    if (home / "manifest.json").is_file():
        manifest = json.loads((home / "manifest.json").read_text(encoding="utf-8"))
        about |= {key: manifest[key] for key in ("corpus", "tokenizer", "length", "packing")}
    if runs.is_run(home):
        config = runs.read_config(home)
        about |= {"batch_size": config["batch"]["size"], "seed": config["seed"]}
    if weights == "ema" and state.get("metric") is not None:  # validation is of the averaged weights
        about["validation"] = {"nats": state["metric"], "perplexity": math.exp(min(state["metric"], 700.0))}
    return about


def card(lm: LanguageModel, about: dict[str, Any], name: str) -> str:
    """The model card, as Markdown."""
    config, system = lm.net.config, folder.describe(lm.net.config, lm.system)["system"]
    number = sum(p.numel() for p in trainable(lm.net).parameters())
    kind = f"`{system.pop('name')}`" + (f", alpha_0 = {system['alpha_0']}" if "alpha_0" in system else "")
    rows = {
        "system": kind,
        "options": ", ".join(f"{key} = {value}" for key, value in system.items()),
        "parameters": f"{number:,} ({config.layers} layers, width {config.width}, {config.heads} heads)",
        "data": about.get("corpus", "not recorded"),
        "tokenizer": f"{lm.tokenizer.name}, {config.vocab_size:,} ids with the mask",
        "length": f"{config.length} tokens",
        "steps": f"{about['steps']:,}" if "steps" in about else "not recorded",
        "weights": {"ema": "averaged (EMA)"}.get(about.get("weights", ""), about.get("weights", "not recorded")),
        "perplexity": perplexity(lm, about),
    }
    if "source" in about:
        rows["converted from"] = f"`{about['source']}`"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    tags = "\n".join(f"- {tag}" for tag in dict.fromkeys(("esolm", lm.system.name, "masked-diffusion")))
    return CARD.format(name=name, table=table, tags=tags)


def perplexity(lm: LanguageModel, about: dict[str, Any]) -> str:
    """The perplexity that is known, what it is of, and the estimator it is by."""
    estimator = "exact likelihood" if lm.system.exact else "the system's own bound (nelbo), an upper bound"
    if "validation" in about:
        return f"{about['validation']['perplexity']:.2f} on the validation split, by {estimator}"
    if "perplexity" in about.get("check", {}):
        return f"{about['check']['perplexity']:.2f} over {about['check']['tokens']:,} tokens of a text, by {estimator}"
    return "not measured"


CARD = """---
library_name: transformers
tags:
{tags}
---

# {name}

| | |
|---|---|
{table}

No remote code: the folder opens where `esolm` is installed.

```python
import esolm

lm = esolm.load("{name}")
print(lm.sample(num_samples=1, seed=0).texts[0])
```

```python
import esolm.hf  # transformers then knows the model
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForMaskedLM.from_pretrained("{name}")
text = tokenizer.mask_token * 4
logits = model(**tokenizer(text, return_tensors="pt")).logits
```
"""
