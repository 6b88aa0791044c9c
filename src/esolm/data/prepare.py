"""A corpus to a folder of shards, once: parallel, resumable, in constant memory, the same bytes every time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..runtime.progress import progress
from . import corpora, detokenize, shards
from . import packing as packings
from .corpora import Corpus, Document, Reading
from .manifest import FILE, FORMAT, Manifest, id_type
from .packing import Chunk, Packing
from .tokenizer import Tokenizer, trained
from .tokenizer import tokenizer as make_tokenizer

_CHUNK = 1 << 20  # characters that are encoded at a time
_BPE_TEXT = 1 << 30  # characters from the head of the train split that a BPE is trained on
_REQUEST = "request.json"

Stream = Callable[[], Iterator[tuple[str, Document]]]


def prepare(
    corpus: str,
    out: str | Path,
    tokenizer: str = "bpe:4096",
    length: int = 256,
    valid: str | None = None,
    valid_fraction: float = 0.05,
    holdout: int | None = None,
    packing: Literal["wrap", "cls", "pad", "single", "conditional"] | None = None,
    field: str = "text",
    prompt_field: str = "prompt",
    target_field: str = "target",
    target_length: int | None = None,
    separator: str = "\n",
    lines: bool = False,
    detokenizer: Literal["lm1b", "wikitext", "ptb", "lambada"] | None = None,
    workers: int | None = None,
    seed: int = 0,
    part: str | None = None,
) -> Manifest | None:
    """Turn a corpus into memory-mapped token shards with a manifest.

    Interrupted, the same call goes on where it stopped. A finished folder is reused by the same call and never
    overwritten by another.

    Args:
        corpus: pydocs, text:PATH[,PATH…], lm1b[:PATH], openwebtext[:PATH] or hf:NAME[,CONFIG].
        out: The folder to make.
        tokenizer: bytes, bpe:SIZE (trained on the train split), gpt2, bert-base-uncased, NAME:PATH or a path.
        length: Tokens in a sequence.
        valid: A corpus of its own for the valid split, as a spec like `corpus`.
        valid_fraction: The share of documents, chosen by their content, that is held out otherwise.
        holdout: Hold out the last so many documents instead (openwebtext: 100000).
        packing: wrap, cls, pad, single or conditional; by default what the corpus is used with: lm1b cls, others wrap.
        field: The field of a JSON record that holds the text.
        prompt_field: The field of the prompt, for the conditional packing.
        target_field: The field of the target, for the conditional packing.
        target_length: Tokens kept free for a target and its EOS, a quarter of the length by default.
        separator: Text that ends every prompt, for the conditional packing.
        lines: Whether each line of a text file is a document.
        detokenizer: The rules that undo a corpus's tokenised spacing (lm1b has its own by default).
        workers: Chunks encoded at a time, by default one for each core; the result does not depend on it.
        seed: Chooses another split by content.
        part: K/N encodes the K-th of N parts, for N processes at a time, on one machine or on several that share `out`;
            the same call without it then joins them, and gives what one process gives.

    Raises:
        ValueError: If an option or the corpus cannot be used, or `out` holds something else.
    """
    conditional = packing == "conditional"
    if not conditional and (prompt_field, target_field, target_length, separator) != ("prompt", "target", None, "\n"):
        raise ValueError(
            "prompt_field, target_field, target_length and separator are of the conditional packing: give --packing "
            "conditional, or leave them out"
        )
    reading = Reading(field, prompt_field if conditional else None, target_field, lines)
    held = None if valid is None else corpora.corpus(valid, reading)
    train = _with_options(corpora.corpus(corpus, reading), packing, detokenizer, holdout)
    _check_split(train, valid, holdout, by_content=(valid_fraction, seed) != (0.05, 0))
    ready = None if trained(tokenizer) else make_tokenizer(tokenizer)
    mine = _numbered(part)
    if part is not None and ready is None:
        raise ValueError(
            f"tokenizer {tokenizer} is trained on the whole corpus: parts need one that is there, as a path"
        )
    room = length // 4 if target_length is None else target_length
    request = {
        "format": FORMAT,
        **_described(train, held, tokenizer, ready),
        **{"valid_fraction": valid_fraction, "holdout": train.holdout, "seed": seed, "reading": vars(reading)},
        **{"detokenizer": train.detokenizer, "length": length, "packing": train.packing},
        "conditional": {"target_length": room, "separator": separator} if conditional else None,
    }
    out = Path(out)
    if (found := _finished(out, request)) is not None:
        return found
    with _working(out, request, shared=part is not None) as work:
        stream = corpora.split(train, held, valid_fraction, seed)
        sizes = [c.size for c in (train, held) if c is not None and c.size is not None]
        size = sum(sizes) if train.size is not None else None
        made = ready or _trained(work, tokenizer, stream, train.detokenizer, size)
        pack = packings.packing(train.packing, length, made.eos_id, made.bos_id, room)
        encode = partial(shards.encode, made, train.detokenizer, separator)
        chunks = _encoded(work, stream, encode, workers, size, mine)
        if part is not None:
            return None
        _write(work / "data", train, made, length, chunks, pack, request)
        os.rename(work / "data", out)
    return Manifest.load(out)


def _check_split(train: Corpus, valid: str | None, holdout: int | None, by_content: bool) -> None:
    """Raise ValueError for options of another valid split than the one that is made."""
    if holdout is not None and holdout < 1:
        raise ValueError(f"holdout is {holdout}; it must be at least 1")
    given = f"that of --valid {valid}" if valid is not None else f"{train.name}'s own" if train.valid else None
    if holdout is not None and given:
        raise ValueError(f"holdout is {holdout}, and the valid split is {given}: choose one")
    given = given or (f"the last {train.holdout} documents" if train.holdout else None)
    if by_content and given:
        raise ValueError(f"valid_fraction and seed choose the valid split, which is {given}: leave them out")


def _numbered(part: str | None) -> Callable[[int], bool]:
    """Whether a chunk, by its number, belongs to the part K/N."""
    if part is None:
        return lambda number: True
    k, _, n = part.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise ValueError(f"part is {part!r}: it must be K/N with 1 <= K <= N, as 3/8")
    return lambda number: number % int(n) == int(k) - 1


def _with_options(corpus: Corpus, packing: str | None, detokenizer: str | None, holdout: int | None) -> Corpus:
    return replace(
        corpus,
        packing=packing or corpus.packing,
        detokenizer=detokenize.known(detokenizer) or corpus.detokenizer,
        holdout=corpus.holdout if holdout is None else holdout,
    )


def _described(train: Corpus, held: Corpus | None, tokenizer: str, ready: Tokenizer | None) -> dict[str, Any]:
    """What is read, by name and hash: no path of this machine."""
    return {
        "corpus": {"name": train.name, "sources": train.sources},
        "valid": None if held is None else {"name": held.name, "sources": held.sources},
        "tokenizer": tokenizer if ready is None else {"name": ready.name, "sha256": ready.sha256},
    }


def _same(request: dict[str, Any], other: dict[str, Any]) -> bool:
    return json.dumps(request, sort_keys=True) == json.dumps(other, sort_keys=True)


def _finished(out: Path, request: dict[str, Any]) -> Manifest | None:
    """The manifest of a folder that this very request has made, None if there is nothing yet."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / FILE).is_file():
        raise ValueError(f"{out} exists and is not prepared data: choose another folder")
    manifest = Manifest.load(out)
    if not _same(manifest.request, request):
        asked = json.loads(json.dumps(request))
        other = [key for key in request if manifest.request.get(key) != asked[key]]
        raise ValueError(f"{out} was prepared with another {', '.join(other)}: choose another folder, or remove it")
    shutil.rmtree(_partial(out), ignore_errors=True)  # killed after the last rename, a run leaves it behind
    print(f"{out} is already prepared: reused", file=sys.stderr)
    return manifest


def _partial(out: Path) -> Path:
    return out.absolute().parent / f".{out.name}.partial"


@contextmanager
def _working(out: Path, request: dict[str, Any], shared: bool = False) -> Iterator[Path]:
    """The hidden folder beside `out`, with what an interrupted run of the same request has left in it.

    shared: with other parts of the same request, which the last one to come does not remove.
    """
    work = _partial(out)
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        _enter(lock, work, request, shared, out)
        yield work
        if not shared:
            shutil.rmtree(work)
    finally:
        os.close(lock)


def _enter(lock: int, work: Path, request: dict[str, Any], shared: bool, out: Path, seconds: float = 10.0) -> None:
    """Lock the folder, alone or with other parts; what another request has left in it goes."""
    note = work / _REQUEST

    def same() -> bool:
        return note.is_file() and _same(json.loads(note.read_text(encoding="utf-8")), request)

    deadline = time.monotonic() + (seconds if shared else 0)
    while True:
        try:
            if shared:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if same():
                    return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:  # another part may be beginning, which takes a moment
            fcntl.flock(lock, fcntl.LOCK_UN)
            if time.monotonic() >= deadline:
                raise ValueError(f"another process is preparing {out}: wait for it") from error
            time.sleep(0.02)
    if not same():
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (work / f"{_REQUEST}.part").write_text(json.dumps(request), encoding="utf-8")
        os.replace(work / f"{_REQUEST}.part", note)
    if shared:
        fcntl.flock(lock, fcntl.LOCK_SH)


def _trained(work: Path, spec: str, stream: Stream, detokenizer: str | None, size: int | None) -> Tokenizer:
    """A tokenizer trained on the train split, or the one that an interrupted run has trained."""
    if (work / "tokenizer_ids.json").is_file():
        return Tokenizer.load(work)

    def texts() -> Iterator[str]:
        read = 0
        sized = ((item, len(item[1].text)) for item in stream())
        for name, document in progress(sized, "training the tokenizer", size):
            for text in filter(None, reversed(document)) if name == "train" else ():
                yield detokenize.detokenize(text, detokenizer)
                read += len(text)
            if read >= _BPE_TEXT:
                return

    made = make_tokenizer(spec, texts())
    made.save(work)
    return made


def _chunks(stream: Stream) -> Iterator[tuple[str, list[Document]]]:
    """Documents of one split at a time, about _CHUNK characters of them."""
    held: dict[str, list[Document]] = {"train": [], "valid": []}
    sizes = dict.fromkeys(held, 0)
    for name, document in stream():
        held[name].append(document)
        sizes[name] += len(document.text) + len(document.prompt or "")
        if sizes[name] >= _CHUNK:
            yield name, held[name]
            held[name], sizes[name] = [], 0
    yield from ((name, documents) for name, documents in held.items() if documents)


def _encoded(
    work: Path,
    stream: Stream,
    encode: Callable[[list[Document]], Chunk],
    workers: int | None,
    size: int | None,
    mine: Callable[[int], bool],
) -> dict[str, list[Path]]:
    """Encode every chunk of this part that is not there yet, several at a time; the files of each split, in order.

    The tokenizers library runs outside the interpreter's lock, so that threads are enough to use every core.
    """
    files: dict[str, list[Path]] = {"train": [], "valid": []}
    workers = workers or os.cpu_count() or 1

    def sized() -> Iterator[tuple[None, int]]:
        running: deque[tuple[Future[None], int]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            for number, (name, documents) in enumerate(_chunks(stream)):
                path = work / f"{name}-{len(files[name]):06d}-{_content(documents)}.npz"
                files[name].append(path)
                if not mine(number):
                    continue
                running.append((pool.submit(_encode, path, documents, encode), sum(len(d.text) for d in documents)))
                while len(running) > 2 * workers or (running and running[0][0].done()):
                    future, read = running.popleft()
                    yield future.result(), read
            yield from ((future.result(), read) for future, read in running)

    deque(progress(sized(), "encoding", size), maxlen=0)
    return files


def _encode(path: Path, documents: list[Document], encode: Callable[[list[Document]], Chunk]) -> None:
    if not path.is_file():
        shards.save_chunk(path, encode(documents))


def _content(documents: list[Document]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(f"{document.prompt}\0{document.text}\0".encode())
    return digest.hexdigest()


def _write(
    folder: Path,
    corpus: Corpus,
    made: Tokenizer,
    length: int,
    chunks: dict[str, list[Path]],
    pack: Packing,
    request: dict[str, Any],
) -> None:
    """The finished folder, from the beginning: packing is quick beside encoding."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    dtype = id_type(made.vocab_size)
    splits = {
        name: shards.write_split(folder, name, shards.load_chunks(paths), pack, dtype) for name, paths in chunks.items()
    }
    for name, split in splits.items():
        if not split.sequences:
            raise ValueError(
                f"the {name} split of {corpus.name} has {split.documents} documents and no full sequence of {length}"
                " tokens: give more text, a shorter length, another valid_fraction, or a corpus as valid"
            )
    made.save(folder)
    Manifest(
        corpus=corpus.name,
        tokenizer=made.name,
        tokenizer_sha256=made.sha256,
        vocab_size=made.vocab_size,
        mask_id=made.mask_id,
        eos_id=made.eos_id,
        bos_id=made.bos_id,
        length=length,
        packing=corpus.packing,
        splits=splits,
        request=request,
    ).save(folder)
