"""`esolm demo`: show the bundled model, then train a small Eso-LM on a small corpus and show what it learned."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parsing import parse
from .train import OWN, read, run_parser, show

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ..data import Manifest

MODES = {"diffusion": 1.0, "hybrid": 0.25, "left to right": 0.0}  # alpha_0


BUNDLED = "stories"
FIRST = ("--sampler", "confidence", "--window", "16", "--top_p", "0.9", "--seed", "0", "--show")
SENTENCE = (
    "Tom was afraid of the big dog. ____ Then the dog licked his hand, and Tom was happy.",
    "--tokens_per_blank", "12", "--sampler", "left_to_right", "--top_p", "0.8", "--seed", "0", "--show",
)  # fmt: skip


def make_parser() -> Any:
    """The parser, with the defaults of the preset demo."""
    made, _, _, defaults = run_parser("demo", "demo", usage="demo")
    made.set_defaults(defaults)
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command; it takes the options of `esolm train demo`."""
    if {"-h", "--help"} & set(argv):
        parse(make_parser(), ["--help"])
    config, own = read(["demo", *argv], "demo")
    if own[OWN]:
        return show(config)
    if (name := config.system["name"]) != "esolm":
        raise ValueError(f"the demo needs the system esolm: for {name} use `esolm train demo --system.name {name}`")
    from rich.console import Console

    from ..data import prepare
    from ..training.trainer import Trainer

    data, corpus = Path(config.data), config.corpus
    console = Console(highlight=False)
    show_bundled(console)
    if not (data / "manifest.json").is_file():
        console.print(f"preparing {corpus.source} into {data}")
    manifest = prepare(corpus.source, data, tokenizer=corpus.tokenizer, length=corpus.length)
    assert manifest is not None
    outcome = Trainer(config).fit()
    if outcome.signal is not None:
        return 128 + outcome.signal
    assert outcome.validation is not None
    show_perplexity(console, outcome.validation["perplexity"], manifest)
    show_samples(console, Path(str(config.run)))
    return 0


def show_bundled(console: Console) -> None:
    """Sample a text, the surest tokens first, and fill in blanks with the bundled model."""
    from . import infill, sample

    console.print(f"[bold]1. The model in the package ({BUNDLED}) writes a story, the surest words first[/bold]")
    sample.run([BUNDLED, *FIRST])
    console.print("\n[bold]2. It fills in a gap, given both sides[/bold]")
    infill.run([BUNDLED, *SENTENCE])
    console.print(
        "\n[bold]3. A small model is trained on this machine[/bold]: about two minutes on two free cores. "
        "Ctrl-C stops it, and the same command resumes"
    )


def show_perplexity(console: Console, perplexity: float, manifest: Manifest) -> None:
    """Print the validation perplexity beside those of n-gram models on the same split."""
    from rich.table import Table

    from ..metrics.ngrams import ngram_perplexity

    train, held_out = (read_split(manifest, split) for split in ("train", "valid"))
    table = Table("model", "validation perplexity", title="what it learned (lower is better)")
    for name, order in (("unigram", 1), ("bigram", 2)):
        table.add_row(name, f"{ngram_perplexity(train, held_out, manifest.vocab_size, order):.1f}")  # type: ignore[arg-type]
    table.add_row("Eso-LM (an upper bound)", f"{perplexity:.1f}")
    console.print(table)


def read_split(manifest: Manifest, split: str) -> np.ndarray:
    """All sequences of a split, [n, L]."""
    import numpy as np

    from ..data import Loader

    loader = Loader(manifest.folder, split, batch_size=256, shuffle=False)
    return np.concatenate([loader.batch(step).x.numpy() for step in range(len(loader))])


def show_samples(console: Console, folder: Path) -> None:
    """Print one sample of the same model in each mode."""
    from ..model import load

    model = load(folder)
    console.print("\nAfter some minutes it has the look of its texts, and not yet their sense:")
    for name, alpha_0 in MODES.items():
        text = model.sample(num_samples=1, alpha_0=alpha_0, num_steps=model.net.config.length, seed=0).texts[0]
        console.print(f"\n[bold]{name}[/bold] (alpha_0 = {alpha_0})")
        console.print(text, markup=False)
    console.print(f"\nthe run is in {folder}: see `{sys.argv[0]} info {folder}`", markup=False)
