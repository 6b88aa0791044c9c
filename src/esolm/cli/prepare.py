"""`esolm prepare`: turn a corpus into token shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..runtime.signatures import signature
from .layout import group
from .parsing import add_json, parse, parser


def make_parser() -> Any:
    """The parser."""
    about = (
        "Turn text files or another corpus into memory-mapped token shards with a manifest. Run the same command again "
        "to resume."
    )
    made = parser("prepare CORPUS FOLDER", about)
    made.add_function_arguments(signature("esolm.data.options", "PrepareOptions"), as_group=False, as_positional=True)
    add_json(made)
    group(made, "how files are read", ("field", "lines", "delimiter", "detokenizer"))
    group(made, "sequences", ("tokenizer", "length", "packing"))
    group(made, "validation split", ("valid", "valid_fraction", "holdout", "seed"))
    group(made, "prompts and targets", ("prompt_field", "target_field", "target_length", "separator", "num_eos"))
    group(made, "conversations", ("chat", "messages_field", "turns"))
    group(made, "processes", ("workers", "part"))
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse(make_parser(), argv)
    as_json = options.pop("json")
    from ..data import prepare

    manifest = prepare(**options)
    if manifest is None:
        print(
            json.dumps({"part": options["part"]})
            if as_json
            else f"part {options['part']} is encoded; when all parts are, run the same command without --part to join "
            "them"
        )
        return 0
    if as_json:
        counts = {name: {"sequences": s.sequences, "tokens": s.tokens} for name, s in manifest.splits.items()}
        about = {name: getattr(manifest, name) for name in ("length", "vocab_size", "fingerprint")}
        print(json.dumps({"folder": str(manifest.folder), **about, "splits": counts}))
        return 0
    for name, split in manifest.splits.items():
        print(f"{name}: {split.sequences:,} sequences of {manifest.length}, {split.tokens:,} tokens")
    print(f"{manifest.folder}: {manifest.vocab_size:,} ids, fingerprint {manifest.fingerprint[:12]}")
    return 0
