"""Tokenizers with a mask token, which is added if the original has none.

The spelling of a special token inside a document is encoded as ordinary text: EOS comes only from the packing, the mask
only from the noise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from .documents import TooLittleText

if TYPE_CHECKING:
    from ..constraints.automaton import Vocabulary
    from .chat import ChatFormat

EOS, MASK = "<|endoftext|>", "<|mask|>"
CHAT = "chat_template.jinja"
"""The file of the chat template, as transformers names it."""
_MASKS = (MASK, "[MASK]", "<mask>")
_ENDS = (EOS, "</s>", "[SEP]", "<eos>", "[EOS]", "<|end_of_text|>")
_BEGINNINGS = ("[CLS]", "<s>", "<bos>", "[BOS]", "<|begin_of_text|>")
_RESERVED = re.compile(r"<\|?(reserved|unused)[\w-]*\|?>|\[control_\d+\]|\[PAD\d+\]")
"""Tokens that Llama 3, Gemma, Mistral and GGUF files of Qwen keep for later use."""
_HUB = {"gpt2": "openai-community/gpt2", "bert-base-uncased": "google-bert/bert-base-uncased"}
SPECS = "bytes, bpe:SIZE, gpt2, bert-base-uncased, NAME:PATH, the path of a folder or file, or a bundled model"
PACKAGED = Path(__file__).parents[1] / "models"
"""Where the bundled models are."""


class Tokenizer:
    """A `tokenizers.Tokenizer`, the ids of its mask, EOS and BOS tokens, and its chat template if it has one."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        name: str,
        mask_id: int,
        eos_id: int | None = None,
        bos_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        core.encode_special_tokens = True
        core.no_padding()
        core.no_truncation()
        self.core, self.name = core, name
        self.mask_id, self.eos_id, self.bos_id = mask_id, eos_id, bos_id
        self.chat_template = chat_template  # jinja, rendered by `chat`
        # Includes the mask. From the largest id, because a vocabulary may have gaps.
        self.vocab_size = max(core.get_vocab().values()) + 1

    @property
    def sha256(self) -> str:
        """A hash of everything that determines the ids of a text."""
        return hashlib.sha256(self.core.to_str().encode()).hexdigest()

    @functools.cached_property
    def spaced(self) -> bool:
        """Whether tokens include the space before a word, as in GPT-2's vocabulary."""
        return any(len(piece) > 1 and piece[0] in "\u0120\u2581" for piece in self.core.get_vocab())

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The text of every token, for automata; raises ValueError for tokenizers that have no such thing."""
        from .pieces import vocabulary

        return vocabulary(self)

    @functools.cached_property
    def chat(self) -> ChatFormat:
        """Encodes conversations by the chat template; raises ValueError if there is none."""
        from .chat import ChatFormat

        return ChatFormat(self)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens."""
        return self.core.encode(text, add_special_tokens=False).ids

    def encode_after(self, text: str) -> list[int]:
        """Encode a text that follows another, without the space that some tokenizers (Llama's) put before a text."""
        line, both = self.encode("\n"), self.encode("\n" + text)
        return both[len(line) :] if both[: len(line)] == line else self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts on all cores (on one if TOKENIZERS_PARALLELISM=false)."""
        return [e.ids for e in self.core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], mask: str = "_") -> str:
        """Decode ids, with `mask` for each mask token; bytes that are not UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        text = self.core.decode(ids, skip_special_tokens=False)
        token = self.core.id_to_token(self.mask_id)
        return text.replace(token, mask) if self.mask_id in ids and token else text

    def decode_after(self, ids: Sequence[int], before: int) -> str:
        """Decode ids that follow the token `before`, with the space that some tokenizers (Llama's) drop at a start."""
        return self.decode([before, *ids])[len(self.decode([before])) :]

    def widened(self, size: int) -> Tokenizer:
        """The same tokenizer with unused ids up to `size`, for a network with more rows than the tokenizer has ids."""
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        unused = (f"<|unused_{i}|>" for i in range(self.vocab_size, size))
        core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in unused])
        found = Tokenizer(core, self.name, self.mask_id, self.eos_id, self.bos_id, self.chat_template)
        if found.vocab_size != size:
            raise ValueError(f"tokenizer {self.name} cannot be widened from {self.vocab_size} to {size} ids")
        return found

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json`, `tokenizer_ids.json` and, if there is a template, `chat_template.jinja`."""
        folder = Path(folder)
        ids = {"name": self.name, "mask_id": self.mask_id, "eos_id": self.eos_id, "bos_id": self.bos_id}
        (folder / "tokenizer.json").write_text(self.core.to_str(), encoding="utf-8")
        (folder / "tokenizer_ids.json").write_text(json.dumps(ids, indent=1) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (folder / CHAT).write_bytes(self.chat_template.encode())  # bytes: its line ends are part of it

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Load a tokenizer that `save` wrote."""
        folder = Path(folder)
        try:
            ids = json.loads((folder / "tokenizer_ids.json").read_text(encoding="utf-8"))
            return cls(_read(folder / "tokenizer.json"), **ids, chat_template=_chat_template(folder))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"no saved tokenizer in {folder}: {error}; `esolm prepare` writes tokenizer.json and tokenizer_ids.json"
            ) from error


def tokenizer(spec: str, texts: Iterable[str] | None = None) -> Tokenizer:
    """Return the tokenizer that a spec names; `bpe:SIZE` is trained on `texts`, which are read once."""
    kind, _, rest = spec.partition(":")
    if spec == "bytes":
        return _with_ids(_bytes(), spec)
    if kind == "bpe":
        if texts is None:
            raise ValueError(f"tokenizer {spec!r} is trained on text: give `texts`, or the folder of a saved tokenizer")
        return _with_ids(_train_bpe(_bpe_size(spec), texts), spec)
    if Path(spec).exists():
        return _from_path(Path(spec), Path(spec).resolve().name)
    if rest:
        if not Path(rest).exists():
            raise ValueError(f"tokenizer {spec!r}: no such file or folder {rest!r}; choose {SPECS}")
        return _from_path(Path(rest), kind)
    if spec in _HUB:
        return _with_ids(_from_hub(spec), spec)
    if (bundled := PACKAGED / spec).is_dir():
        return _from_path(bundled, spec)
    raise ValueError(f"no tokenizer {spec!r}: choose {SPECS}")


def from_json(text: str, name: str, declared: dict[str, str] | None = None) -> Tokenizer:
    """Build a tokenizer from the content of a tokenizer.json; `declared` maps `mask_token` and others to their text."""
    try:
        return _with_ids(tokenizers.Tokenizer.from_str(text), name, declared)
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"tokenizer {name!r} is not JSON of the tokenizers library: {error}") from error


def trained(spec: str) -> bool:
    """Whether the tokenizer of a spec is trained on the corpus."""
    return spec.startswith("bpe:")


def _with_ids(core: tokenizers.Tokenizer, name: str, declared: dict[str, str] | None = None) -> Tokenizer:
    """Look up the special ids by their usual spellings, and append a mask token if there is none."""
    declared = declared or {}

    def find(role: str, spellings: Sequence[str]) -> int | None:
        ids = (core.token_to_id(token) for token in (declared.get(role, ""), *spellings) if token)
        return next((i for i in ids if i is not None), None)

    mask_id = find("mask_token", _MASKS)
    if mask_id is None:
        reserved = [i for token, i in core.get_vocab().items() if _RESERVED.fullmatch(token)]
        mask_id = max(reserved, default=None)  # the last, as later models use up the first
    if mask_id is None:
        core.add_special_tokens([AddedToken(MASK, special=True, normalized=False)])
        mask_id = core.token_to_id(MASK)
        assert mask_id is not None
    eos_id, bos_id = find("eos_token", _ENDS), find("bos_token", _BEGINNINGS)
    return Tokenizer(core, name, mask_id, eos_id, eos_id if bos_id is None else bos_id)


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def _bytes() -> tokenizers.Tokenizer:
    """Byte b is id b: a byte-level BPE without merges, whose alphabet maps unprintable bytes to U+0100 and above."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    vocabulary = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    core = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
    core.add_special_tokens([EOS])
    return core


def _bpe_size(spec: str) -> int:
    size = spec.partition(":")[2]
    if not size.isdecimal() or int(size) < 257:
        raise ValueError(f"tokenizer {spec!r}: the size must be a whole number of at least 257 (256 bytes and EOS)")
    return int(size)


def _train_bpe(size: int, texts: Iterable[str]) -> tokenizers.Tokenizer:
    core = _byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() < size:
        most = core.get_vocab_size()
        raise TooLittleText(f"tokenizer 'bpe:{size}': the text gives only {most} entries; use bpe:{most} or smaller")
    return core


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        if not path.is_file():
            raise ValueError(f"{path} is missing: write the folder again") from error
        raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error


def _from_path(path: Path, name: str) -> Tokenizer:
    """Load a tokenizer, and the chat template beside it, from a folder or a file."""
    found = _from_files(path, name)
    found.chat_template = _chat_template(path if path.is_dir() else path.parent)
    return found


def _from_files(path: Path, name: str) -> Tokenizer:
    """Load tokenizer.json, vocab.json with merges.txt, or vocab.txt, from a folder or as the file itself."""
    folder = path if path.is_dir() else path.parent
    found = {p.name for p in folder.iterdir()} if path.is_dir() else {path.name}
    if "tokenizer_ids.json" in found:
        return Tokenizer.load(folder)
    if path.is_file() and path.suffix == ".json" and path.name != "vocab.json":
        return _with_ids(_read(path), name, _declared(folder))
    if "tokenizer.json" in found:
        return _with_ids(_read(folder / "tokenizer.json"), name, _declared(folder))
    if {"vocab.json", "merges.txt"} <= found:
        core = _byte_level(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
        ends = [t for t in _ENDS if core.token_to_id(t) is not None]
        core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ends])
        return _with_ids(core, name, _declared(folder))
    if "vocab.txt" in found:
        return _with_ids(_word_piece(folder / "vocab.txt"), name)
    raise ValueError(f"no tokenizer in {path}: it needs tokenizer.json, vocab.json with merges.txt, or vocab.txt")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _chat_template(folder: Path) -> str | None:
    """Return the template in chat_template.jinja, or in tokenizer_config.json, or None."""
    if (folder / CHAT).is_file():
        return (folder / CHAT).read_bytes().decode()
    found = _config(folder).get("chat_template")
    if isinstance(found, list):  # several with names
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _declared(folder: Path) -> dict[str, str]:
    """Return the special tokens named by a tokenizer_config.json in the folder."""
    config = _config(folder)
    tokens = {role: config.get(role) for role in ("mask_token", "eos_token", "bos_token")}
    return {r: t["content"] if isinstance(t, dict) else t for r, t in tokens.items() if t}


def _word_piece(vocab: Path) -> tokenizers.Tokenizer:
    """BERT's lower-casing WordPiece tokenizer."""
    core = tokenizers.Tokenizer(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##")
    special = [t for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if core.token_to_id(t) is not None]
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return core


def _from_hub(name: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_pretrained(_HUB[name])
    except Exception as error:  # no network, no such repository: the library raises a bare Exception
        raise ValueError(
            f"tokenizer {name!r} could not be downloaded from the hub ({error}); give a local folder as {name}:PATH"
        ) from error
