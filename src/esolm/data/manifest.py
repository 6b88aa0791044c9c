"""What a folder of prepared data holds: `manifest.json`, the tokenizer, and shards of rows of ids.

A shard `train-00000.bin` is flat little-endian uint16 (uint32 from 65,537 ids on), row after row. Beside it, for the
packings `pad` and `conditional`, `train-00000.count` has one uint32 for each row.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .tokenizer import Tokenizer

FORMAT = 1
FILE = "manifest.json"
_AGAIN = "prepare the corpus again into a new folder"


@dataclass(frozen=True)
class Shard:
    """One file of rows."""

    file: str
    sequences: int
    sha256: str
    count_sha256: str | None = None  # of the file of counts, where there is one

    @property
    def count_file(self) -> str:
        """The name of the file of counts."""
        return Path(self.file).with_suffix(".count").name


@dataclass(frozen=True)
class Split:
    """One split: what went in and what is in its rows."""

    documents: int
    skipped: int  # documents that could not be packed
    sequences: int
    tokens: int  # to be scored: valid and not given
    dropped: int  # tokens cut off by the packing
    bytes: int  # UTF-8 bytes of the scored text, for bits per byte
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """A folder of prepared data, described."""

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
    request: dict[str, Any]  # what was asked for; the same request gives the same folder
    format: int = FORMAT
    folder: Path = field(default=Path(), compare=False)

    @property
    def dtype(self) -> np.dtype:
        """The type of the ids in the shards."""
        return id_type(self.vocab_size)

    @property
    def fingerprint(self) -> str:
        """A hash of all of it, the hashes of the shards included."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        content = asdict(self)
        del content["folder"]
        return content

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return Tokenizer.load(self.folder)

    def save(self, folder: Path) -> None:
        """Write `manifest.json`."""
        content = {**self._content(), "fingerprint": self.fingerprint}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, verify: bool = False) -> Manifest:
        """Read and check a folder: the sizes of its files always, their hashes if `verify`."""
        folder = Path(folder)
        path = folder / FILE
        if not path.is_file():
            raise ValueError(
                f"no prepared data in {folder}: {FILE} is missing; `esolm prepare CORPUS {folder}` makes it"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            fingerprint, version = content.pop("fingerprint"), content["format"]
            if version != FORMAT:
                raise ValueError(f"{path} has format {version}, this version reads {FORMAT}: {_AGAIN}")
            manifest = cls(**{**content, "splits": _splits(content["splits"])}, folder=folder)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged or foreign ({error!r}): {_AGAIN}") from error
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
    """The smallest type that holds every id, little-endian."""
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
        raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {size}, it is damaged: {_AGAIN}")
    if sha256 is not None:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != sha256:
            raise ValueError(f"{path} is damaged: its sha256 does not match the manifest; {_AGAIN}")
