"""`esolm plan`: memory, speed and traffic of a training run on many GPUs."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    config, own = read(rest if found.preset is None else [found.preset, *rest], "plan", add_options)
    if own.pop(OWN):
        return show(config)
    as_json, vocab_size, memory = own.pop("json"), own.pop("vocab_size"), own.pop("gpu_memory")
    cluster = Cluster(gpu_memory=size(memory), **own)
    from ..training.plan import plan

    figures = plan(config, cluster, vocab_size)
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        from rich.console import Console

        Console(highlight=False).print(table(figures))
    return 0


def add_options(parser: Any) -> None:
    """The options of this command besides those of `esolm train`."""
    parser.add_class_arguments(Cluster, as_group=False, skip={"gpu_memory"})
    parser.add_argument("--gpu_memory", type=str, default="80GB", help="Memory of each GPU, as in 80GB.")
    about = "Ids of the vocabulary, the mask included (default: those of init or of the preset, otherwise 50258)."
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
    made.add_row("parameters", f"{figures['parameters'] / 1e6:,.0f} M")
    if figures["trained_parameters"] < figures["parameters"]:
        made.add_row("of these trained", f"{figures['trained_parameters'] / 1e6:,.1f} M")
    made.add_row(
        "assumed", f"{figures['gpus']} GPUs at {figures['efficiency']:.0%} of {figures['tflops']:g} TFLOP/s peak"
    )
    made.add_row("one step", f"{figures['tokens_per_step']:,} tokens in {figures['seconds_per_step']:.2f} s")
    made.add_row(f"all {figures['steps']:,} steps", f"{figures['hours']:,.1f} hours")
    made.add_row("per GPU and step", f"{figures['passes_per_step']} passes of {figures['examples_per_pass']} examples")
    made.add_row("tokens per second", f"{figures['tokens_per_second']:,} ({figures['flops_per_token']:.3g} FLOP each)")
    made.add_row("sent per GPU and step", _gigabytes(figures["bytes_sent_per_step"]))
    made.add_row("bandwidth needed to overlap it", f"{_gigabytes(figures['bytes_per_second_to_hide'])}/s")
    made.add_section()
    for name, value in figures["memory"].items():
        made.add_row(f"{name}, per GPU", _gigabytes(value))
    fits = "fits" if figures["fits"] else "does not fit: lower batch.micro, or see docs/scaling.md"
    made.add_row(f"in {_gigabytes(figures['gpu_memory'])}", fits)
    return made


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:,.2f} GB"
