"""From a pattern and a vocabulary to an automaton over tokens, kept in memory and on disk.

The work over bytes is done by a process with a limit of time and memory (`worker.py`). The files lie in the folder
`constraints` of $ESOLM_CACHE, or else of esolm in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .automaton import Automaton, ByteAutomaton, TooLarge, Vocabulary, lift
from .schema import Checked
from .walk import Steps

SECONDS, MEMORY, MOST_STATES, MOST_CHARACTERS = 20, 2 << 30, 20_000, 1 << 14
"""Limits of one pattern: seconds of CPU time and bytes of the process, states over bytes, and characters."""
PATIENCE = 6
"""Wall-clock time over CPU time after which the process is stopped, on a machine that does other work."""
_ONE_PROCESS = threading.Lock()  # several would multiply the memory
FORMAT = 2
"""Raise it when the files or what they mean change."""
REMEDY = "use smaller repeats, or few characters, as in [A-Za-z0-9_] in place of \\w"
REASONS = {
    "error building NFA": "it cannot be parsed, or has look-around or back-references, which are not supported",
    "incompatible with the regex": "no text matches it; of anchors it can have ^ at its beginning and $ at its end",
    "limit reached": "its $ref lead back to where they began, or through more than 12 definitions",
    "valid JSON string": "it holds a text that JSON cannot",
    "universal start state": "of anchors it can have ^ at its beginning and $ at its end",
}
"""Errors of outlines-core in our words."""


@dataclass(frozen=True)
class Pattern:
    """A regular expression, or a JSON schema as text, that a text must match from its beginning to its end."""

    kind: str  # regex or json_schema
    source: str
    lead: str = ""  # a text that comes before it

    @classmethod
    def of(cls, regex: str | None, schema: Any) -> Pattern:
        """The pattern of options, of which one is not None. Raises ValueError."""
        if regex is not None:
            if not isinstance(regex, str):
                raise ValueError(f"regex is {regex!r}; it must be a text")
            return cls("regex", regex)
        return cls("json_schema", schema if isinstance(schema, str) else _dumped(schema))

    def __str__(self) -> str:
        shown = self.source if len(self.source) <= 60 else f"{self.source[:57]}…"
        return f"{self.kind} {shown}"


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema cannot be written as JSON: {' '.join(str(error).split())}") from error


def compiled(pattern: Pattern, vocabulary: Vocabulary) -> Steps:
    """The automaton of a pattern over the tokens of a vocabulary. Raises ValueError, in bounded time."""
    return _compiled(pattern, _Kept(vocabulary))


@dataclass(frozen=True, eq=False)
class _Kept:
    """A vocabulary that equals those with the same hash."""

    vocabulary: Vocabulary

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and other.vocabulary.sha256 == self.vocabulary.sha256

    def __hash__(self) -> int:
        return hash(self.vocabulary.sha256)


@functools.lru_cache(maxsize=64)
def _compiled(pattern: Pattern, kept: _Kept) -> Steps:
    path = folder() / f"{_key(pattern, kept.vocabulary)}.npz"
    found = _read(path)
    if found is None:
        try:
            found = lift(byte_automaton(pattern), kept.vocabulary)
        except TooLarge as error:
            raise ValueError(f"{pattern} is too large: {error}; {REMEDY}") from error
        _write(path, found)
    return Steps(found)


@functools.lru_cache(maxsize=16)
def byte_automaton(pattern: Pattern) -> ByteAutomaton:
    """The automaton over bytes, made by a process of its own. Raises ValueError."""
    request = {"lead": _escaped(pattern.lead), "states": MOST_STATES, "memory": MEMORY, "seconds": SECONDS}
    if pattern.kind == "regex":
        request["regex"] = _checked(pattern.source, "regex")
    else:
        schema = Checked(pattern.source)
        request |= {"schema": schema.schema, "patterns": [_checked(p, "pattern") for p in schema.patterns]}
    head, rest = _ask(pattern, request)
    states = head["states"]
    table = np.frombuffer(rest[: states * 1024], np.int32).reshape(states, 256)
    accepts = np.frombuffer(rest[states * 1024 :], bool)
    if head["start"] == states:
        raise ValueError(f"{pattern} cannot be used: {REASONS['incompatible with the regex']}")
    return ByteAutomaton(table, accepts, head["start"])


def _ask(pattern: Pattern, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The answer of the process. Raises ValueError."""
    if importlib.util.find_spec("outlines_core") is None:
        raise ValueError(f"{pattern.kind} needs outlines-core: pip install 'esolm[constraints]'")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    too_large = f"{pattern} is too large for {SECONDS} seconds and {MEMORY >> 20} MB of memory: {REMEDY}"
    try:
        with _ONE_PROCESS:
            done = subprocess.run(
                command,
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=PATIENCE * SECONDS,
                env=environment,
            )
    except subprocess.TimeoutExpired:
        raise ValueError(too_large) from None
    if done.returncode < 0 or b"MemoryError" in done.stderr or b"memory allocation" in done.stderr:
        raise ValueError(too_large)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"the process that compiles {pattern} failed: {' '.join(last)}")
    first, _, rest = done.stdout.partition(b"\n")
    head = json.loads(first)
    if error := head.get("error"):
        error = next((reason for words, reason in REASONS.items() if words in error), error)
        raise ValueError(f"{pattern} cannot be used: {error[:300]}")
    return head, rest


def _checked(regex: str, name: str) -> str:
    """The expression without ^ at its beginning and $ at its end, which change nothing here. Raises ValueError."""
    if len(regex) > MOST_CHARACTERS:
        raise ValueError(f"{name} has {len(regex)} characters; at most {MOST_CHARACTERS} are allowed")
    if "\0" in regex or "\\x00" in regex:
        raise ValueError(f"{name} holds the character NUL, which no text has: leave it out")
    regex = regex.removeprefix("^")
    body = regex.removesuffix("$")
    if body != regex and (len(body) - len(body.rstrip("\\"))) % 2 == 0:
        regex = body
    if not _balanced(regex):
        raise ValueError(f"{name} {regex[:60]!r} closes a parenthesis that it did not open: escape it with a backslash")
    return regex


def _balanced(regex: str) -> bool:
    """Whether no parenthesis is closed that was not opened; others are found by the compiler."""
    depth = inside = at = 0  # inside: levels of [ ], which may be nested
    while at < len(regex):
        c = regex[at]
        if c == "\\":
            at += 1
        elif c == "[":
            inside += 1
            at += regex[at + 1 : at + 2] == "^"
            at += regex[at + 1 : at + 2] == "]"  # a ] that comes first stands for itself
        elif c == "]" and inside:
            inside -= 1
        elif c in "()" and not inside:
            depth += 1 if c == "(" else -1
            if depth < 0:
                return False
        at += 1
    return True


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)


def folder() -> Path:
    """Where automata are kept."""
    home = os.environ.get("ESOLM_CACHE")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "esolm"
    return base / "constraints"


def _key(pattern: Pattern, vocabulary: Vocabulary) -> str:
    try:
        version = importlib.metadata.version("outlines-core")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    parts = [FORMAT, version, vocabulary.sha256, vocabulary.eos_id, pattern.kind, pattern.source, pattern.lead]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(path: Path) -> Automaton | None:
    """The automaton in a file, or None if there is none that can be used."""
    try:
        with np.load(path, allow_pickle=False) as data:
            start, text_start = (int(n) for n in data["starts"])
            found = Automaton(data["table"], data["accepts"], start, text_start, data["class_of"])
        found.check()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return found


def _write(path: Path, automaton: Automaton) -> None:
    """Write the file whole, under a name of its own first; where that fails, the next process compiles again."""
    content = io.BytesIO()
    np.savez_compressed(
        content,
        starts=np.array([automaton.start, automaton.text_start]),
        table=automaton.table,
        accepts=automaton.accepts,
        class_of=automaton.class_of,
    )
    partial = None
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            file.write(content.getvalue())
        os.replace(partial, path)
        partial = None
    if partial is not None:
        partial.unlink(missing_ok=True)
