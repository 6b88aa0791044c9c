"""Benchmarks that anyone can rerun: `esolm bench NAME`. Ratios first; times are of one machine in one hour."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Sequence

NAMES = {
    "train": "a training step of every system, beside what counting rows and pairs predicts",
    "latency": "one cached step in float32, bf16 and int8, beside the authors' way, AR, GPT-2 and the bandwidth",
    "sample": "a whole sample of as many steps as tokens, beside MDLM, BD3-LM and AR",
    "draw": "tokens from logits, beside softmax + multinomial and a sort",
    "precision": "KL to float32 and perplexity of a trained model in bf16 and int8",
    "likelihood": "all conditionals of an order in one pass, beside a plain forward pass and beside L passes",
    "start": "a new process from the shell to its first sample, and where the time goes",
    "gpt2": "our ar beside a transformers GPT-2 of equal size, data order and tokens",
    "speculative": "passes, acceptance and time of speculative sampling, beside one token at a time",
    "points": "passes and seconds of samples of trained models under several settings",
    "machine": "matrix products and memory reads: the limits that the others are held against",
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark with its options."""
    lines = "\n".join(f"  {name:11} {what}" for name, what in NAMES.items())
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: esolm bench NAME [--option VALUE ...]\n\n{lines}\n\nesolm bench NAME --help says more.")
        return 0 if argv else 2
    if argv[0] not in NAMES:
        raise ValueError(f"no benchmark {argv[0]!r}: choose one of {', '.join(NAMES)}")
    from jsonargparse import ArgumentParser

    from .report import save

    run = importlib.import_module(f"esolm.bench.{argv[0]}").run
    parser = ArgumentParser(prog=f"esolm bench {argv[0]}", description=run.__doc__, exit_on_error=False)
    parser.add_function_arguments(run)
    parser.add_argument("--json", type=str, default=None, help="file to write the results to, or - to print them")
    try:
        options = parser.parse_args(list(argv[1:])).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(f"{' '.join(str(error).split())}. See {parser.prog} --help") from error
    target = options.pop("json")
    with contextlib.redirect_stdout(sys.stderr) if target == "-" else contextlib.nullcontext():
        result = {"bench": argv[0], "options": options, **run(**options)}
    if target == "-":
        print(json.dumps(result))
    elif target:
        save(target, result)
    return 0
