"""`esolm plan`: memory, speed and traffic of a training run on many GPUs."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..training.config import read_preset
from ..training.options import Cluster
from .layout import group
from .parsing import add_json
from .train import OWN, read, run_parser, show

if TYPE_CHECKING:
    from rich.table import Table

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def make_parser() -> Any:
    """The parser, with the options of the system esolm."""
    return run_parser("plan", add=add_options).made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset")
    found, rest = first.parse_known_args(list(argv))
    words = rest if found.preset is None else [found.preset, *rest]
    config, own = read(words, "plan", add_options)
    if own.pop(OWN):
        return show(config)
    as_json, vocab_size, memory = own.pop("json"), own.pop("vocab_size"), own.pop("gpu_memory")
    cluster = Cluster(gpu_memory=size(memory), **own)
    from ..training.plan import plan

    figures = plan(config, cluster, vocab_size)
    if config.init is None and (start := read_preset(words[0]).get("starts_from")):
        net = figures["network"]
        figures["notes"].append(
            f"planned for {net['layers']} layers of width {net['width']}: the preset starts from {start}, and --init "
            "MODEL takes its sizes"
        )
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(table(figures), *figures["notes"], sep="\n")
    return 0


def add_options(parser: Any) -> None:
    """The options of this command besides those of `esolm train`."""
    parser.add_class_arguments(Cluster, as_group=False, skip={"gpu_memory"})
    parser.add_argument("--gpu_memory", type=str, default="80GB", help="Memory of each GPU, as in 80GB.")
    about = "Ids of the vocabulary, the mask included (default: of init, the data or the preset; else 50258)."
    parser.add_argument("--vocab_size", type=int, help=about)
    add_json(parser)
    group(parser, "GPUs", ("gpus", "gpu_memory", "tflops", "efficiency", "vocab_size"))


def size(text: str) -> float:
    """Bytes of a size such as 80GB, 80G or 80e9."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"gpu_memory is {text!r}; it must be a size, as in 80GB")
    return float(match[1]) * UNITS[match[2].upper()]


def table(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    from rich.table import Table

    made = Table(show_header=False)
    made.add_row("parameters", _number(figures["parameters"]))
    if figures["trained_parameters"] < figures["parameters"]:
        made.add_row("of these trained", _number(figures["trained_parameters"]))
    made.add_row(
        "assumed", f"{figures['gpus']} GPUs at {figures['efficiency']:.0%} of {figures['tflops']:g} TFLOP/s peak"
    )
    made.add_row("one step", f"{figures['tokens_per_step']:,} tokens in {_seconds(figures['seconds_per_step'])}")
    made.add_row(f"all {figures['steps']:,} steps", f"{figures['hours']:,.1f} hours")
    made.add_row("per GPU and step", f"{figures['passes_per_step']} passes of {figures['examples_per_pass']} examples")
    made.add_row("tokens per second", f"{figures['tokens_per_second']:,} ({figures['flops_per_token']:.3g} FLOP each)")
    made.add_row("sent per GPU and step", _bytes(figures["bytes_sent_per_step"]))
    made.add_row("bandwidth needed to overlap it", f"{_bytes(figures['bytes_per_second_to_hide'])}/s")
    made.add_section()
    for name, value in figures["memory"].items():
        made.add_row(f"{name}, per GPU", _bytes(value))
    fits = "fits" if figures["fits"] else "does not fit: lower batch.micro, or see docs/scaling.md"
    made.add_row(f"in {_bytes(figures['gpu_memory'])}", fits)
    return made


def _bytes(value: float) -> str:
    return f"{value / 1e9:,.2f} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"


def _number(value: float) -> str:
    return f"{value / 1e6:,.{1 if value < 1e8 else 0}f} M" if value >= 1e6 else f"{value / 1e3:,.0f} k"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value:.2g} s"
