"""Match rates and time per token of constrained samples: python patterns.py [SAMPLES] > patterns.json

For ten regular expressions and three JSON schemas, in each sampler of the bundled model: how many samples match, by
Python's `re` and by reading the JSON, and the CPU time per token beside the unconstrained sampler with the same length.
"""

from __future__ import annotations

import json
import re
import sys
import time
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
LENGTH = 40
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


def main(samples: int) -> list[dict[str, Any]]:
    """One record for each mode and pattern."""
    lm, found = esolm.load("stories", precision="float32"), []
    for mode, options in MODES.items():
        free = [measured(lm, min(samples, 64), options) for _ in range(2)][1]
        for name in [*REGEXES, *SCHEMAS]:
            pattern = {"regex": REGEXES[name]} if name in REGEXES else {"json_schema": SCHEMAS[name]}
            lm.sample(num_samples=1, length=LENGTH, **options, **pattern)  # compiles the pattern
            texts, seconds = measured(lm, samples, {**options, **pattern})
            record = {
                "mode": mode,
                "pattern": name,
                "samples": samples,
                "match": sum(matches(name, text) for text in texts),
                "cpu_ms_per_token": round(1000 * seconds / samples / LENGTH, 3),
                "free_cpu_ms_per_token": round(1000 * free[1] / min(samples, 64) / LENGTH, 3),
            }
            found.append(record)
            print(record, texts[0], file=sys.stderr, flush=True)
    return found


def measured(lm: Any, samples: int, options: dict[str, Any]) -> tuple[list[str], float]:
    """Texts and seconds of CPU time, on one thread."""
    begin = time.process_time()
    made = lm.sample(num_samples=samples, length=LENGTH, seed=1, **options)
    return made.texts, time.process_time() - begin


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000), indent=1))
