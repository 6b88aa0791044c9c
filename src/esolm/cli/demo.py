"""`esolm demo`: prepare a small corpus, train a small Eso-LM on it, and show what it learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ..data import Loader, Manifest, prepare
from ..metrics.ngrams import ngram_perplexity
from ..model import load
from ..training import runs
from ..training.config import read_config, show_config
from ..training.launch import launch

MODES = {"diffusion": 1.0, "hybrid": 0.25, "left to right": 0.0}  # alpha_0


def run(argv: Sequence[str]) -> int:
    """Run the demo; options after `demo` are those of `esolm train demo`."""
    config, printing = read_config(["demo", *argv])
    if printing:
        return show_config(config)
    if (name := config["system"]["name"]) != "esolm":
        raise ValueError(f"the demo shows the modes of esolm: for {name} use `esolm train demo --system.name {name}`")
    data, run = Path(config["data"]), Path(config["run"])
    console = Console(highlight=False)
    if not (data / "manifest.json").is_file():
        console.print(f"preparing {config['corpus']['source']} into {data}")
    manifest = prepare(
        config["corpus"]["source"],
        data,
        tokenizer=config["corpus"]["tokenizer"],
        length=config["corpus"]["length"],
    )
    assert manifest is not None
    code = launch(config)
    if code == 0:
        show_perplexity(console, run, manifest)
        show_samples(console, run)
    return code


def show_perplexity(console: Console, folder: Path, manifest: Manifest) -> None:
    """The last validation perplexity beside those of n-gram models of the same split."""
    train, held_out = (read_split(manifest, split) for split in ("train", "valid"))
    found = [record["validation"] for record in runs.read_metrics(folder) if "validation" in record]
    table = Table("model", "validation perplexity", title="what it learned")
    for name, order in (("unigram", 1), ("bigram", 2)):
        table.add_row(name, f"{ngram_perplexity(train, held_out, manifest.vocab_size, order):.1f}")  # type: ignore[arg-type]
    table.add_row("Eso-LM (an upper bound)", f"{found[-1]['perplexity']:.1f}")
    console.print(table)


def read_split(manifest: Manifest, split: str) -> np.ndarray:
    """All sequences of a split, [n, L]."""
    loader = Loader(manifest.folder, split, batch_size=256, shuffle=False)
    return np.concatenate([loader.batch(step).x.numpy() for step in range(len(loader))])


def show_samples(console: Console, folder: Path) -> None:
    """One text of the same model in each mode."""
    model = load(folder)
    for name, alpha_0 in MODES.items():
        text = model.sample(num_samples=1, alpha_0=alpha_0, num_steps=model.net.config.length, seed=0).texts[0]
        console.print(f"\n[bold]{name}[/bold] (alpha_0 = {alpha_0})")
        console.print(text, markup=False)
    console.print(f"\nthe run is in {folder}; `esolm info {folder}` describes it")
