"""Match rates and time per token of constrained samples: python -m experiments.constraints.patterns OUT [SAMPLES]

For ten regular expressions and three JSON schemas, in each sampler of the bundled model: how many samples match, by
Python's `re` and by reading the JSON, and the CPU time per token beside that of the unconstrained sampler. OUT is a
file of JSON lines, one for each sampler and pattern; a second call measures what is missing.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

import esolm

REGEXES = {
    "date": "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": "([01][0-9]|2[0-3]):[0-5][0-9]",
    "identifier": "[a-z_][a-z0-9_]{2,11}",
    "number": r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,4})?",
    "phone number": r"\+[1-9][0-9]{0,2} [0-9]{3} [0-9]{3} [0-9]{4}",
    "e-mail address": r"[a-z]{2,12}\.?[a-z]{2,12}@[a-z]{2,12}\.(com|org|net)",
    "bounded sentence": "[A-Z][a-z]*( [a-z]+){3,12}[.!?]",
    "alternation": "(Tom|Lily|Ben) (saw|liked|found) a (red|big|little) (cat|dog|bird)",
    "quoted string": '"[A-Za-z ,.]{1,40}"',
    "hexadecimal": "0x[0-9a-f]{4,16}",
}
WORD = {"type": "string", "pattern": "[A-Za-z]{2,12}"}
SCHEMAS: dict[str, Any] = {
    "record": {
        "type": "object",
        "properties": {"name": WORD, "animal": {"enum": ["cat", "dog", "bird"]}, "place": WORD},
        "required": ["name", "animal", "place"],
    },
    "list of numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5},
    "nested": {
        "type": "object",
        "properties": {
            "who": {"type": "object", "properties": {"name": WORD, "age": {"type": "integer"}}, "required": ["name"]},
            "happy": {"type": "boolean"},
        },
        "required": ["who", "happy"],
    },
}
LENGTHS = {
    "date": 14, "time": 10, "identifier": 14, "number": 14, "phone number": 22, "e-mail address": 32,
    "bounded sentence": 24, "alternation": 16, "quoted string": 32, "hexadecimal": 24, "record": 36,
    "list of numbers": 24, "nested": 40,
}  # fmt: skip
"""Tokens of a sample, with the EOS tokens that fill it up."""
MODES: dict[str, dict[str, Any]] = {
    "random order": {"sampler": "first_hitting"},
    "hybrid, alpha_0 = 0.5": {"sampler": "first_hitting", "alpha_0": 0.5},
    "left to right": {"sampler": "left_to_right"},
    "10 steps": {"sampler": "ancestral", "num_steps": 10},
    "4 at a time": {"sampler": "block", "parallelism": 4},
    "speculative": {"sampler": "speculative"},
    "confidence, 10 steps": {"sampler": "confidence", "num_steps": 10},
    "threshold": {"sampler": "threshold", "tau": 0.5},
}


def matches(name: str, text: str) -> bool:
    """By means that share nothing with the sampler; of the schemas, the parts that can be told from the value."""
    if name in REGEXES:
        return re.fullmatch(REGEXES[name], text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if name == "record":
        return set(value) == {"name", "animal", "place"} and value["animal"] in ("cat", "dog", "bird")
    if name == "list of numbers":
        return isinstance(value, list) and 1 <= len(value) <= 5 and all(isinstance(n, int) for n in value)
    return isinstance(value["happy"], bool) and isinstance(value["who"]["name"], str)


def main(path: Path, samples: int) -> None:
    """Append one record for each mode and pattern that is missing."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(record["mode"], record["pattern"]) for record in known}
    lm = esolm.load("stories", precision="float32")
    with path.open("a") as file:
        for mode, options in MODES.items():
            missing = [name for name in LENGTHS if (mode, name) not in done]
            free = [measured(lm, 64, 24, options)[1] for _ in range(2 if missing else 0)][-1:]
            for name in missing:
                pattern = {"regex": REGEXES[name]} if name in REGEXES else {"json_schema": SCHEMAS[name]}
                lm.sample(num_samples=1, length=LENGTHS[name], **options, **pattern)  # compiles the pattern
                texts, cost = measured(lm, samples, LENGTHS[name], {**options, **pattern})
                match = sum(matches(name, text) for text in texts)
                record = {"mode": mode, "pattern": name, "samples": samples, "match": match, "first": texts[0]}
                record |= {"cpu_ms_per_token": cost, "free_cpu_ms_per_token": free[0]}
                file.write(json.dumps(record) + "\n")
                file.flush()


def measured(lm: Any, samples: int, length: int, options: dict[str, Any]) -> tuple[list[str], float]:
    """Texts, and milliseconds of CPU time per token, on one thread."""
    begin = time.process_time()
    made = lm.sample(num_samples=samples, length=length, seed=1, **options)
    return made.texts, round(1000 * (time.process_time() - begin) / samples / length, 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
