"""Cut a vocabulary to the entries that some texts use, which keep their tokens; embedding and head shrink."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import tokenizers
import torch

from ..data import Tokenizer
from ..net.denoiser import Denoiser

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
ROWS = {"embed.weight", "head.weight", "head.bias"}
"""Parameters with a row for each id."""
CHUNK = 1000
"""Texts encoded at a time."""


def cut(
    net: Denoiser, words: Tokenizer, texts: Iterable[str], least: int = 1, new_mask: bool = False
) -> tuple[Denoiser, Tokenizer]:
    """The network and the tokenizer with only the entries that the texts use at least `least` times.

    With 1 the texts have the same tokens as before. Every kept token has the same embedding and logit. Other texts are
    spelled by smaller pieces, or bytes where the tokenizer has them. Raises ValueError unless the tokenizer is a BPE.

    new_mask: The mask has no trained row, and gets the mean of the tokens that the texts use. Bytes and special tokens
    that are only kept to spell other texts may be untrained, so they do not count.
    """
    if least < 1:
        raise ValueError(f"the least count is {least}; it must be at least 1")
    used = _used(words, texts, least) - {words.mask_id}
    kept = _needed(words, used)
    smaller = _with_ids(words, kept)
    index = torch.tensor(kept)
    small = Denoiser(dataclasses.replace(net.config, vocab_size=len(kept)))
    state = {name: tensor[index] if name in ROWS else tensor for name, tensor in net.state_dict().items()}
    for name in ROWS & state.keys() if new_mask and used else ():
        state[name][smaller.mask_id] = net.state_dict()[name][sorted(used)].float().mean(0)
    small.load_state_dict(state)
    return small.eval(), smaller


def needed(words: Tokenizer, texts: Iterable[str], least: int = 1) -> list[int]:
    """The ids that the texts use at least `least` times, and what these are merged from.

    Bytes, or letters where the tokenizer has no bytes, and special tokens are always among them.
    """
    return _needed(words, _used(words, texts, least))


def _needed(words: Tokenizer, used: set[int]) -> list[int]:
    stored = json.loads(words.core.to_str())
    model: dict[str, Any] = stored["model"]
    if model["type"] != "BPE":
        raise ValueError(f"tokenizer {words.name} is a {model['type']}; only the vocabulary of a BPE can be cut")
    vocabulary: dict[str, int] = model["vocab"]
    pieces = {number: piece for piece, number in vocabulary.items()}
    rank = {pair: i for i, pair in enumerate(map(_pair, model["merges"]))}
    kept = {part for number in used if number in pieces for part in parts(pieces[number], rank)}
    # What other texts are spelled by: bytes, or the whole alphabet where the tokenizer has no bytes.
    made = {one + two for one, two in rank}
    spelling = (piece for piece in vocabulary if piece not in made)
    kept |= {piece for piece in spelling if BYTE.fullmatch(piece) or not model.get("byte_fallback")}
    added = {token["id"] for token in stored["added_tokens"]}
    return sorted({vocabulary[piece] for piece in kept if piece in vocabulary} | added | {words.mask_id})


def parts(piece: str, rank: dict[tuple[str, str], int]) -> set[str]:
    """All pieces that occur while a piece is merged from its letters, always by the first pair in the list of merges.

    A token is merged in the same way inside any text, because no merge crosses its ends.
    """
    now, found = list(piece), {piece, *piece}
    while len(now) > 1:
        pairs = [(rank.get(pair, len(rank)), i) for i, pair in enumerate(itertools.pairwise(now))]
        best, i = min(pairs)
        if best == len(rank):
            break
        now[i : i + 2] = [now[i] + now[i + 1]]
        found.add(now[i])
    return found


def _used(words: Tokenizer, texts: Iterable[str], least: int) -> set[int]:
    used: Counter[int] = Counter()
    waiting: list[str] = []
    for text in texts:
        waiting.append(text)
        if len(waiting) == CHUNK:
            used.update(itertools.chain(*words.encode_batch(waiting)))
            waiting = []
    used.update(itertools.chain(*words.encode_batch(waiting)))
    return {number for number, count in used.items() if count >= least}


def _pair(merge: str | list[str]) -> tuple[str, str]:
    one, two = merge.split(" ") if isinstance(merge, str) else merge
    return one, two


def _with_ids(words: Tokenizer, kept: list[int]) -> Tokenizer:
    """The tokenizer with the kept ids only, numbered anew."""
    new = {old: number for number, old in enumerate(kept)}
    stored = json.loads(words.core.to_str())
    model = stored["model"]
    model["vocab"] = {piece: new[old] for piece, old in model["vocab"].items() if old in new}
    there = model["vocab"].keys()
    pairs = [(merge, _pair(merge)) for merge in model["merges"]]
    model["merges"] = [merge for merge, (one, two) in pairs if {one, two, one + two} <= there]
    for token in stored["added_tokens"]:
        token["id"] = new[token["id"]]
    for token in ((stored.get("post_processor") or {}).get("special_tokens") or {}).values():
        token["ids"] = [new[old] for old in token["ids"]]
    core = tokenizers.Tokenizer.from_str(json.dumps(stored))
    ids = {name: None if (old := getattr(words, name)) is None else new[old] for name in ("eos_id", "bos_id")}
    return Tokenizer(core, words.name, new[words.mask_id], **ids, chat_template=words.chat_template)
