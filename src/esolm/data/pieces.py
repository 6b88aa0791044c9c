"""The text that each token of a tokenizer stands for, as bytes, for automata over tokens."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tokenizers import pre_tokenizers

from ..constraints.automaton import Vocabulary
from .tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The text of every id. Raises ValueError for tokenizers whose texts are not those of their tokens in a row."""
    described = json.loads(tokenizer.core.to_str())
    decoders = _steps(described.get("decoder"))
    kinds = [step["type"] for step in decoders]
    strips = False
    if kinds == ["ByteLevel"]:
        alphabet = _byte_alphabet()

        def piece(token: str) -> bytes | None:
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else None
    elif kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        fallback, strips = "ByteFallback" in kinds, _strips(decoders, tokenizer)

        def piece(token: str) -> bytes | None:
            if fallback and (found := _BYTE.fullmatch(token)):
                return bytes([int(found[1], 16)])
            return token.replace("\u2581", " ").encode()
    else:
        raise ValueError(
            f"tokenizer {tokenizer.name} decodes by {' and '.join(kinds) or 'no rule'}; regex and json_schema need a "
            "byte-level tokenizer (bytes, bpe, GPT-2's) or one of sentencepiece's kind (Llama's)"
        )
    added = {each["id"]: each for each in described["added_tokens"]}
    pieces: list[bytes | None] = [None] * tokenizer.vocab_size
    for token, i in tokenizer.core.get_vocab().items():
        if i not in added:
            pieces[i] = piece(token)
        elif not added[i]["special"] and i not in (tokenizer.mask_id, tokenizer.eos_id, tokenizer.bos_id):
            pieces[i] = token.encode()
    digest = hashlib.sha256(repr((pieces, tokenizer.eos_id, strips)).encode()).hexdigest()
    return Vocabulary(pieces, tokenizer.eos_id, strips, digest)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _strips(decoders: list[dict[str, Any]], tokenizer: Tokenizer) -> bool:
    """Whether a text loses the space that its first token begins with. Raises ValueError for other rules."""
    found = False
    for step in decoders:
        usual = {
            "Replace": step.get("pattern") == {"String": "\u2581"} and step.get("content") == " ",
            "Strip": (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0),
            "Metaspace": step.get("replacement") == "\u2581",
        }
        if not usual.get(step["type"], True):
            raise ValueError(f"tokenizer {tokenizer.name} decodes by {step}, which regex and json_schema do not know")
        found |= step["type"] == "Strip" or (
            step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        )
    return found


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet: printable ones are themselves, the others follow 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    found = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    assert found.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return found
