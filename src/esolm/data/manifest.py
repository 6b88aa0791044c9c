"""The manifest of a folder of prepared data, which contains `manifest.json`, the tokenizer and the shards.

A shard `train-00000.bin` is flat little-endian uint16 (uint32 above 65,536 ids), row after row. For the packings `pad`
and `conditional`, `train-00000.count` contains one uint32 per row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime import files
from .tokenizer import Tokenizer

FORMAT = 1
FILE = "manifest.json"
COUNTS = "token_counts.json"
_AGAIN = "prepare the corpus again into a new folder"


@dataclass(frozen=True)
class Shard:
    """One file of rows."""

    file: str
    sequences: int
    sha256: str
    count_sha256: str | None = None  # of the count file, if there is one

    @property
    def count_file(self) -> str:
        """The name of the count file."""
        return Path(self.file).with_suffix(".count").name


@dataclass(frozen=True)
class Split:
    """The totals and the shards of one split."""

    documents: int
    skipped: int  # documents that could not be packed
    sequences: int
    tokens: int  # scored tokens: valid and not given
    dropped: int  # tokens that the packing cut off
    bytes: int  # UTF-8 bytes of the scored text, for bits per byte
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a folder of prepared data."""

    corpus: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    mask_id: int
    eos_id: int | None
    bos_id: int | None
    length: int
    packing: str
    splits: dict[str, Split]
    request: dict[str, Any]  # inputs and options; the same request gives the same folder
    format: int = FORMAT
    folder: Path = field(default=Path(), compare=False)

    @property
    def dtype(self) -> np.dtype:
        """The NumPy type of the ids in the shards."""
        return id_type(self.vocab_size)

    @property
    def fingerprint(self) -> str:
        """A hash of the manifest, which includes the hashes of the shards."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        del content["folder"]
        return content

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the data."""
        return Tokenizer.load(self.folder)

    @property
    def token_counts(self) -> str:
        """How often each id occurs among the scored tokens of the training split, separated by spaces.

        Counted once and kept in the folder, if that can be written to.
        """
        path = self.folder / COUNTS
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["fingerprint"] == self.fingerprint:
                return kept["counts"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not counted yet, of other data, or damaged
        counts = " ".join(str(count) for count in self._count())
        with contextlib.suppress(OSError):
            files.write_json(path, {"fingerprint": self.fingerprint, "counts": counts})
        return counts

    def _count(self, rows: int = 1 << 14) -> list[int]:
        """The counts of `token_counts`, from some rows of the shards at a time."""
        total = np.zeros(self.vocab_size, np.int64)
        for shard in self.splits["train"].shards:
            tokens = np.memmap(self.folder / shard.file, self.dtype, "r", shape=(shard.sequences, self.length))
            heads = None if shard.count_sha256 is None else np.memmap(self.folder / shard.count_file, "<u4", "r")
            for first in range(0, shard.sequences, rows):
                part = tokens[first : first + rows]
                if heads is not None:  # the number of valid tokens, or of given ones
                    inside = np.arange(self.length) < heads[first : first + rows, None]
                    part = part[~inside if self.packing == "conditional" else inside]
                total += np.bincount(part.reshape(-1), minlength=self.vocab_size)
        return total.tolist()

    def save(self, folder: Path) -> None:
        """Write `manifest.json`."""
        content = {**self._content(), "fingerprint": self.fingerprint}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, verify: bool = False) -> Manifest:
        """Load the manifest of a folder and check the sizes of its files, and their hashes if `verify`."""
        folder = Path(folder)
        path = folder / FILE
        if not path.is_file():
            raise ValueError(
                f"no prepared data in {folder}: {FILE} is missing; create it with `esolm prepare CORPUS {folder}`"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            fingerprint, version = content.pop("fingerprint"), content["format"]
            if version != FORMAT:
                raise ValueError(f"{path} has format {version}, this version of esolm reads format {FORMAT}: {_AGAIN}")
            files.check_keys(path, content, cls)
            manifest = cls(**{**content, "splits": _splits(content["splits"])}, folder=folder)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged or not a manifest ({error!r}): {_AGAIN}") from error
        if manifest.fingerprint != fingerprint:
            raise ValueError(f"{path} was changed: its fingerprint does not match; {_AGAIN}")
        manifest._check(verify)
        return manifest

    def _check(self, verify: bool) -> None:
        for shard in (shard for split in self.splits.values() for shard in split.shards):
            row = self.dtype.itemsize * self.length
            _check_file(self.folder / shard.file, shard.sequences * row, shard.sha256 if verify else None)
            if shard.count_sha256 is not None:
                sha256 = shard.count_sha256 if verify else None
                _check_file(self.folder / shard.count_file, shard.sequences * 4, sha256)
        if self.load_tokenizer().sha256 != self.tokenizer_sha256:
            raise ValueError(f"{self.folder / 'tokenizer.json'} is not the tokenizer of this data: {_AGAIN}")


def id_type(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian type for the ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _splits(content: dict[str, Any]) -> dict[str, Split]:
    return {
        name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
        for name, split in content.items()
    }


def _check_file(path: Path, size: int, sha256: str | None) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing: {_AGAIN}")
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {size}: {_AGAIN}")
    if sha256 is not None and files.sha256(path) != sha256:
        raise ValueError(f"{path} is damaged: its sha256 does not match the manifest; {_AGAIN}")
