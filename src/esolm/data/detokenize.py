"""Undo the spacing of tokenised corpora, by the rules of Lou et al. (2024) and Sahoo et al. (2024).

Results on LM1B, WikiText, PTB, LAMBADA and Scientific Papers are comparable only under the same rules, including their
oddities. Each detokenizer is an ordered list of replacements of a string or a pattern; several can be chained.
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
    (pattern(r"/' [0-9]/"), "/'[0-9]/"),  # meant to be a pattern of sed
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
RULES = {
    "lm1b": _LM1B,
    "wikitext": _WIKITEXT,
    "ptb": _PTB,
    "lambada": _LAMBADA,
    "scientific_papers": [*_WIKITEXT, *_LM1B],
}


def detokenize(text: str, names: str | None) -> str:
    """Apply the rules called NAME[,NAME…], one after another; None leaves the text unchanged."""
    for name in names.split(",") if names else ():
        for old, new in RULES[name]:
            text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def known(names: str | None) -> str | None:
    """Return NAME[,NAME…] or None; raise ValueError if one is not a detokenizer."""
    for name in names.split(",") if names is not None else ():
        if name not in RULES:
            raise ValueError(f"no detokenizer {name!r}: choose from {', '.join(RULES)}, or none; a comma chains them")
    return names
