"""`esolm prepare`: turn a corpus into token shards."""

from __future__ import annotations

from collections.abc import Sequence

from .. import data
from .parsing import parse, parser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    about = (
        "Turn text files or another corpus into memory-mapped token shards with a manifest. Run the same command again "
        "to resume."
    )
    made = parser("prepare CORPUS FOLDER", about)
    made.add_class_arguments(data.PrepareOptions, as_positional=True)
    options = parse(made, argv)
    manifest = data.prepare(**options)
    if manifest is None:
        print(
            f"part {options['part']} is encoded; when all parts are, run the same command without --part to join them"
        )
        return 0
    for name, split in manifest.splits.items():
        print(f"{name}: {split.sequences:,} sequences of {manifest.length}, {split.tokens:,} tokens")
    print(f"{manifest.folder}: {manifest.vocab_size:,} ids, fingerprint {manifest.fingerprint[:12]}")
    return 0
