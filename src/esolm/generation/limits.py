"""The spans of a row that must match the regular expressions or JSON schemas of the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..constraints.compile import Pattern, compiled
from ..constraints.guide import PatternSpan
from ..data import Tokenizer
from ..sampling.options import SamplingOptions
from .rows import runs

Pads = Literal["last", "all", "none"]
"""Which spans may end before their last token, with end-of-sequence tokens behind the text: those at the end of the
row, all, or none."""


def patterns_of(options: SamplingOptions, blanks: int) -> list[Pattern | None]:
    """The pattern of each blank, None where anything may stand. Raises ValueError."""
    regex, schema = options.regex, options.json_schema
    if regex is not None and schema is not None:
        raise ValueError("give either regex or json_schema")
    name = "json_schema" if regex is None else "regex"
    given: Any = schema if regex is None else regex
    several = isinstance(given, Sequence) and not isinstance(given, str | Mapping)
    each = list(given) if several else [given] * blanks
    if several and options.match == "text" and len(each) != 1:
        raise ValueError(f"match text needs one {name}, and there are {len(each)}")
    if options.match != "text" and len(each) != blanks:
        raise ValueError(f"{len(each)} patterns in {name} for {blanks} blanks: give one for all, or one for each")
    if regex is not None:
        return [None if p is None or (several and p == "") else Pattern.of(p, None) for p in each]
    return [None if p is None or p == "" else Pattern.of(None, p) for p in each]


def spans_of(
    tokenizer: Tokenizer,
    row: Sequence[int | None],
    options: SamplingOptions,
    pads: Pads = "last",
    blanks: Sequence[tuple[int, int]] | None = None,
    leads: Sequence[str] | None = None,
) -> list[PatternSpan]:
    """The spans of one row; none without patterns. Raises ValueError for a pattern that cannot be compiled.

    blanks: where they start and stop, by default the runs of None. leads: a text that each must begin with.
    """
    if options.regex is None and options.json_schema is None:
        if options.match is not None:
            raise ValueError("match belongs to regex or json_schema: leave it out")
        return []
    blanks = runs(row) if blanks is None else blanks
    patterns = patterns_of(options, len(blanks))
    leads = [""] * len(blanks) if leads is None else leads
    if options.match == "text":
        patterns, blanks, leads = patterns[:1], [(0, len(row))], [""]
    found = []
    for pattern, (start, stop), lead in zip(patterns, blanks, leads, strict=True):
        if pattern is not None:
            pad = pads == "all" or (pads == "last" and stop == len(row))
            pattern = dataclasses.replace(pattern, lead=lead)
            found.append(PatternSpan(start, stop, pattern, compiled(pattern, tokenizer.vocabulary), pad))
    return found
