"""Turn a corpus into a folder of shards: parallel, resumable, in constant memory, the same bytes every time."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..runtime.progress import progress
from . import corpora, detokenize, shards
from . import packing as packings
from .chat import ChatFormat
from .corpora import Corpus
from .documents import Document, SplitStream, TooLittleText, ends, report_ends
from .manifest import FORMAT, Manifest, id_type
from .options import PrepareOptions, takes
from .packing import Chunk, Packing
from .tokenizer import Tokenizer, trained
from .tokenizer import tokenizer as make_tokenizer
from .workspace import finished, working

_CHUNK = 1 << 20  # characters encoded at a time
_BPE_TEXT = 1 << 30  # a BPE is trained on the first characters of the train split, up to this many


@takes(PrepareOptions)
def prepare(options: PrepareOptions) -> Manifest | None:
    """Turn a corpus into memory-mapped token shards with a manifest.

    The arguments are the fields of `PrepareOptions`. If interrupted, the same call resumes. A finished folder is reused
    by the same call and never overwritten by another.

    Returns:
        The manifest, or None for one part (`part`) of the work.

    Raises:
        ValueError: If an option or the corpus is not usable, or `out` contains something else.
    """
    inputs = PrepareInputs.read(options)
    request = inputs.request()
    out = Path(options.out)
    if (found := finished(out, request)) is not None:
        return found
    with working(out, request, shared=options.part is not None) as work:
        train, fraction = inputs.train, options.valid_fraction
        stream = corpora.split(train, inputs.valid, fraction, options.seed)
        try:
            folder = _build(work, stream, inputs, request)
        except TooLittleText:
            if inputs.own_split is not None:
                raise
            tail = work / "tail"  # separate, so that a resumed run repeats both attempts
            tail.mkdir(exist_ok=True)
            cut = train.packing in packings.CONTINUOUS
            folder = _build(tail, corpora.split_tail(train, fraction, cut), inputs, request)
            print(
                f"{train.name} has too few documents for a validation split by content: held out the last "
                f"{100 * fraction:.3g}% of the text",
                file=sys.stderr,
            )
        if folder is None:
            return None
        os.rename(folder, out)
    return Manifest.load(out)


@dataclass(frozen=True)
class PrepareInputs:
    """The corpora and the tokenizer that the options of `prepare` name."""

    options: PrepareOptions
    train: Corpus
    valid: Corpus | None
    tokenizer: Tokenizer | None  # None until it is trained
    chat: ChatFormat | None = None

    @classmethod
    def read(cls, options: PrepareOptions) -> PrepareInputs:
        """Open what the options name; raise ValueError for options that contradict the corpus."""
        valid = None if options.valid is None else corpora.corpus(options.valid, options.reading)
        corpus = corpora.corpus(options.corpus, options.reading)
        train = replace(
            corpus,
            packing="conditional" if options.conditional else options.packing or corpus.packing,
            detokenizer=detokenize.known(options.detokenizer) or corpus.detokenizer,
            holdout=corpus.holdout if options.holdout is None else options.holdout,
        )
        tokenizer = None if trained(options.tokenizer) else make_tokenizer(options.tokenizer)
        inputs = cls(options, train, valid, tokenizer, tokenizer.chat if options.chat and tokenizer else None)
        if options.holdout is not None and (valid or train.valid):
            raise ValueError(f"holdout is {options.holdout}, but the valid split is {inputs.own_split}: choose one")
        if inputs.own_split and (options.valid_fraction, options.seed) != (0.05, 0):
            raise ValueError(
                f"valid_fraction and seed have no effect: the valid split is {inputs.own_split}; omit them"
            )
        return inputs

    @property
    def own_split(self) -> str | None:
        """The valid split, in words; None if it is made by content."""
        if self.valid is not None:
            return f"that of --valid {self.options.valid}"
        if self.train.valid is not None:
            return f"{self.train.name}'s own"
        return f"the last {self.train.holdout} documents" if self.train.holdout else None

    @property
    def size(self) -> int | None:
        """Bytes to read, for the progress bar."""
        return None if self.train.size is None else self.train.size + ((self.valid and self.valid.size) or 0)

    def request(self) -> dict[str, Any]:
        """Everything that determines the result, with inputs by name and hash, without paths of this machine."""
        options, train, valid, tokenizer = self.options, self.train, self.valid, self.tokenizer
        conditional: dict[str, Any] = {"target_length": options.reserved, "separator": options.separator}
        if options.num_eos is not None:
            conditional["num_eos"] = options.num_eos
        reading = {key: value for key, value in vars(options.reading).items() if key != "newlines"}  # only score has it
        if options.delimiter is None:  # the request of other data is what it was before there were delimiters and chats
            del reading["delimiter"]
        if self.chat is None:
            del reading["messages_field"], reading["turns"]
        else:
            template = self.chat.tokenizer.chat_template or ""
            conditional = {**conditional, "chat_template": hashlib.sha256(template.encode()).hexdigest()}
        return {
            "format": FORMAT,
            "corpus": {"name": train.name, "sources": train.sources},
            "valid": None if valid is None else {"name": valid.name, "sources": valid.sources},
            "tokenizer": options.tokenizer
            if tokenizer is None
            else {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "valid_fraction": options.valid_fraction,
            "holdout": train.holdout,
            "seed": options.seed,
            "reading": reading,
            "detokenizer": train.detokenizer,
            "length": options.length,
            "packing": train.packing,
            "conditional": conditional if options.conditional else None,
        }


def _build(work: Path, stream: SplitStream, inputs: PrepareInputs, request: dict[str, Any]) -> Path | None:
    """Encode, pack and write a stream; return the finished folder, or None after encoding one part.

    Raises TooLittleText if a split has no full sequence.
    """
    options, train = inputs.options, inputs.train
    tokenizer = inputs.tokenizer or _trained(work, options.tokenizer, stream, train.detokenizer, inputs.size)
    ids = tokenizer.eos_id, tokenizer.bos_id
    pack = packings.packing(train.packing, options.length, *ids, options.reserved, options.num_eos)
    encode = partial(shards.encode, tokenizer, train.detokenizer, options.separator)
    if inputs.chat is not None:
        encode = partial(shards.encode_chats, inputs.chat)
    chunks, found = _encoded(work, stream, encode, inputs)
    if options.part is not None:
        return None
    folder = work / "data"
    _write(folder, train, tokenizer, options.length, chunks, pack, request)
    report_ends(found, options.corpus, "prepare another folder with")
    return folder


def _trained(work: Path, spec: str, stream: SplitStream, detokenizer: str | None, size: int | None) -> Tokenizer:
    """Train a tokenizer on the train split, or load the one that an interrupted run has trained."""
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

    tokenizer = make_tokenizer(spec, texts())
    tokenizer.save(work)
    return tokenizer


def _chunks(stream: SplitStream) -> Iterator[tuple[str, list[Document]]]:
    """Group the documents of each split into chunks of about _CHUNK characters."""
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
    work: Path, stream: SplitStream, encode: Callable[[list[Document]], Chunk], inputs: PrepareInputs
) -> tuple[dict[str, list[Path]], Counter[str]]:
    """Encode the missing chunks of this part in parallel.

    Returns the chunk files of each split in order, and how often lines occur that look like a forgotten delimiter.

    Threads are enough to use every core, because the tokenizers library releases the interpreter lock.
    """
    files: dict[str, list[Path]] = {"train": [], "valid": []}
    workers = inputs.options.workers or os.cpu_count() or 1
    part, parts = inputs.options.part_of
    found: Counter[str] = Counter()

    def sized() -> Iterator[tuple[None, int]]:
        running: deque[tuple[Future[None], int]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            for number, (name, documents) in enumerate(_chunks(stream)):
                path = work / f"{name}-{len(files[name]):06d}-{_content(documents)}.npz"
                files[name].append(path)
                found.update(line for each in documents for line in ends(each.text))
                if number % parts != part:
                    continue
                running.append((pool.submit(_encode, path, documents, encode), sum(len(d.text) for d in documents)))
                while len(running) > 2 * workers or (running and running[0][0].done()):
                    future, read = running.popleft()
                    yield future.result(), read
            yield from ((future.result(), read) for future, read in running)

    deque(progress(sized(), "encoding", inputs.size), maxlen=0)
    return files, found if inputs.options.delimiter is None else Counter()


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
    tokenizer: Tokenizer,
    length: int,
    chunks: dict[str, list[Path]],
    pack: Packing,
    request: dict[str, Any],
) -> None:
    """Write the shards and the manifest, always from scratch: packing is fast compared with encoding."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    dtype = id_type(tokenizer.vocab_size)
    splits = {
        name: shards.write_split(folder, name, shards.load_chunks(paths), pack, dtype) for name, paths in chunks.items()
    }
    for name, split in splits.items():
        if not split.sequences:
            raise TooLittleText(
                f"the {name} split of {corpus.name} has {split.documents} documents and no full sequence of {length} "
                "tokens: give more text, a shorter --length, another --valid_fraction, or another corpus as --valid"
            )
    tokenizer.save(folder)
    Manifest(
        corpus=corpus.name,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        length=length,
        packing=corpus.packing,
        splits=splits,
        request=request,
    ).save(folder)
