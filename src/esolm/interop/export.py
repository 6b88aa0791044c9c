"""Write a trained model as a folder to share: weights, configuration, tokenizer and a model card."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch

from ..model import LanguageModel, load
from ..net.protocol import trainable
from ..storage import adapters, checkpoint, folder
from ..storage.models import find_folder, locate
from ..training import runs


def export(
    run: str,
    out: str | Path,
    weights: Literal["ema", "model"] = "ema",
    which: Literal["best", "last"] = "best",
    dtype: Literal["float32", "bfloat16"] = "float32",
    adapter: str | None = None,
    only_adapter: bool = False,
    license: str | None = None,
    force: bool = False,
) -> Path:
    """Write a model as a folder that transformers and `esolm.load` open, with a model card.

    The adapters of a LoRA run are merged into its weights.

    Args:
        run: A run folder, one checkpoint of it, a model folder, or the name of a bundled model.
        out: The folder to write.
        weights: The averaged (EMA) weights, or the raw ones.
        which: The best or the last checkpoint of the run.
        dtype: The type of the stored weights; bfloat16 rounds them and halves the file.
        adapter: A folder with a LoRA adapter of peft for this model, to merge into it.
        only_adapter: Write only the adapter of a LoRA run, as a folder that peft, `--adapter` here and `esolm train
            --adapter` open.
        license: The licence in the metadata of the card, by the hub's name for it (mit, apache-2.0); by default that of
            the model folder it is exported from, if it states one.
        force: Replace `out` if it is a model or adapter folder.

    Raises:
        ValueError: If `run` holds no model, or `out` exists.
    """
    if only_adapter:
        if adapter is not None:
            raise ValueError("give adapter, which is merged into a model, or only_adapter, not both")
        if license is not None:
            raise ValueError(f"license is {license!r}, but only_adapter writes no model: leave it out")
        return export_adapter(find_folder(run), Path(out), weights, which, dtype, force)
    lm, about = load(run, weights, which), describe(find_folder(run), weights, which)
    if adapter is not None:
        adapters.apply(trainable(lm.net), Path(adapter))
        about.pop("validation", None)  # measured without the adapter
        about["adapter"] = adapter
    if license is not None:
        about["license"] = license
    with folder.new(out := Path(out), force) as partial:
        folder.write(
            partial, trainable(lm.net), lm.system, lm.tokenizer, about, torch.bfloat16 if dtype == "bfloat16" else None
        )
        (partial / "README.md").write_text(card(lm, about, out), encoding="utf-8")
    return out


def export_adapter(path: Path, out: Path, weights: str, which: str, dtype: str, force: bool) -> Path:
    """Write the adapter of a run of tuning.parts lora as a folder of peft."""
    found = None if folder.is_model(path) else locate(path, which)
    tuning = {} if found is None else checkpoint.read_state(found[0])["identity"].get("tuning", {})
    if found is None or tuning.get("parts") != "lora":
        raise ValueError(f"{path} has no adapter: give a run of --tuning.parts lora, or leave out only_adapter")
    saved, home = found
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in checkpoint.load(saved, weights).items()}
    base = runs.read_config(home)["init"] if runs.is_run(home) else None
    with folder.new(out, force) as partial:
        adapters.write(partial, state, tuning, base)
        text = ADAPTER.format(name=out.name, base=json.dumps(base or "MODEL"), path=json.dumps(out.as_posix()))
        (partial / "README.md").write_text(text, encoding="utf-8")
    return out


def describe(path: Path, weights: str, which: str) -> dict[str, Any]:
    """Where a model comes from: steps, tokens, data, and its validation perplexity."""
    if folder.is_model(path):
        return dict(json.loads((path / "config.json").read_text(encoding="utf-8")).get("about", {}))
    found, home = locate(path, which)
    state = checkpoint.read_state(found)
    about: dict[str, Any] = {"weights": weights, "steps": state["step"], "training_tokens": state.get("tokens")}
    if (home / "manifest.json").is_file():
        manifest = json.loads((home / "manifest.json").read_text(encoding="utf-8"))
        about |= {key: manifest[key] for key in ("corpus", "tokenizer", "length", "packing")}
    if runs.is_run(home):
        config = runs.read_config(home)
        about |= {"batch_size": config["batch"]["size"], "seed": config["seed"]}
        if config.get("init") is not None:
            about["init"] = origin(Path(config["init"]))
    if weights == "ema" and state.get("metric") is not None:  # validation uses the averaged weights
        about["validation"] = {"nats": state["metric"], "perplexity": math.exp(min(state["metric"], 700.0))}
    return about


def origin(path: Path) -> str:
    """The name of the model that training began with, and of the checkpoint that it was converted from."""
    source = describe(path, "ema", "best").get("source") if folder.is_model(path) else None
    return f"{path.name} (converted from {source})" if source else path.name


def card(lm: LanguageModel, about: dict[str, Any], out: Path) -> str:
    """The model card of the folder `out`, as Markdown."""
    config, system = lm.net.config, folder.describe(lm.net.config, lm.system)["system"]
    number = sum(p.numel() for p in trainable(lm.net).parameters())
    label = f"`{system.pop('name')}`" + (f", alpha_0 = {system['alpha_0']}" if "alpha_0" in system else "")
    kind = "masked-diffusion" if lm.system.masks else "discrete-diffusion"
    kind = kind if lm.system.latent_width is None else "embedding-diffusion"
    rows = {
        "system": label,
        "options": ", ".join(f"{key} = {value}" for key, value in system.items()),
        "parameters": f"{number:,} ({config.layers} layers, width {config.width}, {config.heads} heads)",
        "data": about.get("corpus", "not recorded"),
        "tokenizer": f"{lm.tokenizer.name}, {config.vocab_size:,} ids with the mask",
        "length": f"{config.length} tokens",
        "steps": f"{about['steps']:,}" if "steps" in about else "not recorded",
        "weights": {"ema": "averaged (EMA)"}.get(about.get("weights", ""), about.get("weights", "not recorded")),
        "perplexity": perplexity(lm, about),
    }
    if "init" in about:
        rows["trained from"] = about["init"]
    if "source" in about:
        rows["converted from"] = f"`{about['source']}`"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    tags = "\n".join(f"- {tag}" for tag in dict.fromkeys(("esolm", lm.system.name, kind)))
    license = f"license: {json.dumps(about['license'])}\n" if "license" in about else ""
    return CARD.format(name=out.name, table=table, tags=tags, license=license, **snippets(lm, out))


def snippets(lm: LanguageModel, out: Path) -> dict[str, Any]:
    """The parts of the card's code that depend on the model and its folder."""
    bundled = out.resolve().parent == folder.PACKAGED.resolve()  # opened by name, wherever the package is installed
    path = json.dumps(out.name if bundled else out.as_posix())
    module = lm.system.name.rpartition(".")[0]
    block = lm.system.block_size
    return {
        "path": path,
        "comment": "a bundled model" if bundled else "the path of this folder",
        "system": f"import {module}  # defines the system\n" if module else "",
        "find": "from esolm.storage.models import find_folder\n" if bundled else "",
        "folder": f"find_folder({path})" if bundled else path,
        "use": FILL.format(masks=block * -(-4 // block)) if lm.system.masks else BOUND,
    }


def perplexity(lm: LanguageModel, about: dict[str, Any]) -> str:
    """The recorded perplexity, its text and its estimator."""
    estimator = "exact" if lm.system.exact else "an upper bound, estimator nelbo"
    if "validation" in about:
        return f"{about['validation']['perplexity']:.2f} on the validation split ({estimator})"
    if "perplexity" in about.get("check", {}):
        return f"{about['check']['perplexity']:.2f} on {about['check']['tokens']:,} tokens of text ({estimator})"
    return "not measured"


ADAPTER = """---
library_name: peft
tags:
- esolm
- lora
---

# {name}

A LoRA adapter. It needs the model that it was trained on and the `esolm` package; merge it with
`esolm export MODEL OUT --adapter FOLDER`, or open it with peft:

```python
import esolm.interop.hf  # registers esolm models with transformers
from peft import PeftModel
from transformers import AutoModelForMaskedLM

base = {base}  # the model that was tuned, as written by esolm export or esolm convert
model = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base), {path})
```
"""

CARD = """---
library_name: transformers
{license}tags:
{tags}
---

# {name}

| | |
|---|---|
{table}

The model needs the `esolm` package and no remote code.

```python
import esolm
{system}
lm = esolm.load({path})  # {comment}
print(lm.sample(num_samples=1, seed=0).texts[0])
```

```python
import esolm.interop.hf  # registers esolm models with transformers
{system}{find}from transformers import AutoModelForMaskedLM, AutoTokenizer

folder = {folder}
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForMaskedLM.from_pretrained(folder)
{use}
```
"""

FILL = """text = tokenizer.mask_token * {masks}
logits = model(**tokenizer(text, return_tensors="pt")).logits"""

BOUND = """ids = tokenizer("Some text", return_tensors="pt")["input_ids"]
nats = model(ids, labels=ids).loss  # the bound, per token: there are no masks to fill in"""
