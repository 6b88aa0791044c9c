"""Undo the spacing of tokenised corpora, by the rules of Lou et al. (2024) and Sahoo et al. (2024).

Results on LM1B, WikiText, PTB and LAMBADA are comparable only under the same rules, including their oddities. Each
detokenizer is an ordered list of replacements of a string or a pattern.
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
    """Apply the rules called `name`; None leaves the text unchanged."""
    if name is None:
        return text
    for old, new in RULES[name]:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def known(name: str | None) -> str | None:
    """Return the name of a detokenizer or None; raise ValueError for an unknown one."""
    if name is not None and name not in RULES:
        raise ValueError(f"no detokenizer {name!r}: choose one of {', '.join(RULES)}, or none")
    return name
