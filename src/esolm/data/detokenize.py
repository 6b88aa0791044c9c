"""Undo the spacing of tokenised corpora, by the rules of Lou et al. (2024) and Sahoo et al. (2024).

Numbers on LM1B, WikiText, PTB and LAMBADA compare only if these rules are the same, oddities included: each
detokenizer is an ordered list of replacements, of plain text or of a pattern.
"""

from __future__ import annotations

from re import Pattern
from re import compile as pattern

_Rules = list[tuple[str | Pattern[str], str]]

_LM1B: _Rules = [
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (pattern(r" '(\w+)"), r"'\1"),
    (pattern(r" (\w+) \. "), r" \1. "),
    (pattern(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (pattern(r" \?$"), "?"),
    (" ! ", "! "),
    (pattern(r" !$"), "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    (pattern(r'" ([^"]+) "'), r'"\1"'),
    (pattern(r"' ([^']+) '"), r"'\1'"),
    (pattern(r"\( ([^()]+) \)"), r"(\1)"),
    (pattern(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
]
_WIKITEXT: _Rules = [
    ("s '", "s'"),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (pattern(r"\(\s*([^)]*?)\s*\)"), r"(\1)"),
    (pattern(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (pattern(r"\{\s*([^}]*?)\s*\}"), r"{\1}"),
    (pattern(r'"\s*([^"]*?)\s*"'), r'"\1"'),
    (pattern(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]
_PTB: _Rules = [
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    *[(" N ", " 1 ")] * 2,  # " N N " needs a second pass
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
]
_LAMBADA: _Rules = [("“", '"'), ("”", '"'), (pattern(r"\s+\Z"), ""), (pattern(r"\A\s*"), "\n")]
RULES = {"lm1b": _LM1B, "wikitext": _WIKITEXT, "ptb": _PTB, "lambada": _LAMBADA}


def detokenize(text: str, name: str | None) -> str:
    """The text as it was written, by the rules called `name`; unchanged for None."""
    if name is None:
        return text
    for old, new in RULES[name]:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def known(name: str | None) -> str | None:
    """The name, if there are rules of that name."""
    if name is not None and name not in RULES:
        raise ValueError(f"no detokenizer {name!r}: choose one of {', '.join(RULES)}, or none")
    return name
