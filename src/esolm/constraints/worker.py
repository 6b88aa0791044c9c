"""Builds the automaton of a pattern over bytes in a process of its own, so that its time and memory have a limit.

Run as a script by `compile.py`: reads one JSON object from standard input and writes the answer to standard output,
either `{"error": TEXT}` or, on the first line, `{"states": S, "start": s}` and behind it the table, int32 [S, 256],
with S where there is no transition, and S bytes that say which states accept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

END = 0
"""A byte behind the text. The pattern ends with it, so that an automaton that prefers the first alternative, as that of
outlines-core does, keeps all of them until the text has ended."""

DEPTHS = (3, 12)
"""Levels of references from one definition of a schema to the next, the second where the first are too few."""


def limit(memory: int, seconds: int) -> None:
    """Let allocations beyond `memory` bytes fail, and end this process after its CPU time, where there are limits."""
    try:
        import resource
    except ImportError:  # Windows; the time limit of the parent remains
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def index_of(regex: str) -> Any:
    """The automaton of outlines-core over single bytes; raises ValueError."""
    from outlines_core import Index, Vocabulary

    return Index(f"(?:{regex})\\x00", Vocabulary(256, {bytes([b]): [b] for b in range(256)}))


def table_of(index: Any, most: int) -> tuple[Any, Any, int]:
    """Transitions int32 [S, 256], accepting states bool [S], and the start, of the states that can reach an end."""
    import numpy as np

    transitions, ends = index.get_transitions(), index.get_final_states()
    number = {state: i for i, state in enumerate(transitions)}
    states = len(number)
    if states > most:
        raise ValueError(f"its automaton has {states} states over bytes, and at most {most} are allowed")
    table, accepts = np.full((states + 1, 256), states, np.int32), np.zeros(states + 1, bool)
    for state, edges in transitions.items():
        for byte, target in edges.items():
            if byte == END:
                accepts[number[state]] |= target in ends
            elif byte < 256 and target in number:
                table[number[state], byte] = number[target]
    alive = accepts.copy()
    while True:
        more = alive | alive[table].any(1)
        if (more == alive).all():
            break
        alive = more
    order = np.where(alive, np.cumsum(alive) - 1, alive.sum())
    kept = order[table[alive]].astype(np.int32)
    start = number.get(index.get_initial_state())
    return kept, accepts[alive], int(alive.sum() if start is None else order[start])


def quotes(regex: str) -> bool:
    """Whether a text of this pattern may hold what a JSON string must escape: a quote, a backslash, a control."""
    table, _, _ = table_of(index_of(regex), 1 << 30)
    return bool((table[:, [*range(32), ord('"'), ord("\\")]] < len(table)).any())


def expanded(schema: str, build: Callable[..., str]) -> str:
    """The regular expression of a schema; raises ValueError. References are followed DEPTHS[0] levels deep, where a
    schema that refers to itself may end, and further only if it cannot end there."""
    for depth in DEPTHS:
        try:
            return build(schema, max_recursion_depth=depth)
        except TypeError as error:  # as for half of a surrogate pair, which no text has
            raise ValueError(str(error)) from error
        except ValueError as error:
            if depth == DEPTHS[-1] or "limit reached" not in str(error):
                raise
    raise AssertionError("DEPTHS is empty")


def answer(request: dict[str, Any]) -> bytes:
    """The automaton of a request; raises ValueError."""
    regex = request.get("regex")
    if regex is None:
        from outlines_core.json_schema import build_regex_from_schema

        for pattern in request["patterns"]:
            if quotes(pattern):
                raise ValueError(
                    f"pattern {pattern!r} allows a quote, a backslash or a control character, which a JSON string "
                    'holds only escaped: exclude them, as in [^"\\\\\\x00-\\x1f]'
                )
        regex = expanded(json.dumps(request["schema"]), build_regex_from_schema)
    table, accepts, start = table_of(index_of(request["lead"] + f"(?:{regex})"), request["states"])
    head = json.dumps({"states": len(table), "start": start})
    return head.encode() + b"\n" + table.tobytes() + accepts.tobytes()


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    try:
        import numpy  # noqa: F401  # before the limit: its libraries reserve more than they use

        limit(request["memory"], request["seconds"])
        found = answer(request)
    except (ValueError, RecursionError) as error:
        found = json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}).encode()
    sys.stdout.buffer.write(found)


if __name__ == "__main__":
    main()
