"""Uses of patterns with the bundled model: python uses.py > uses.json

A JSON record filled in from a story, and dates in a text.
"""

from __future__ import annotations

import json
import re

import esolm

STORY = (
    "Once upon a time, there was a girl named Lily. Lily had a little dog. One day, Lily and the dog went to the park. "
    "They played with a ball all day and they were very happy."
)
RECORD = "The girl was named ____. She had a ____. They went to the ____."
WORDS = ["[A-Z][a-z]{1,8}", "(cat|dog|bird|fish|horse)", "(park|zoo|beach|farm|house|school)"]


def main() -> dict[str, object]:
    """The values that fill a record, as often as they were drawn, and the texts of dates."""
    lm = esolm.load("stories")
    text = f"{STORY} {RECORD}"
    made = lm.infill(text, tokens_per_blank="1-3", regex=WORDS, num_samples=32, seed=0)
    pattern = re.compile(re.escape(RECORD).replace(re.escape("____"), "(.*?)"))
    rows = [pattern.search(found).groups() for found in made.texts]  # type: ignore[union-attr]
    names = ("name", "animal", "place")
    records = [dict(zip(names, row, strict=True)) for row in rows]
    right = {"name": "Lily", "animal": "dog", "place": "park"}
    date = "(January|May|June) [1-9]"
    dates = lm.infill("It was ____ and the sun was out.", tokens_per_blank="1-8", regex=date, num_samples=4).texts
    return {
        "right": {name: sum(record[name] == right[name] for record in records) / len(records) for name in names},
        "all_right": sum(record == right for record in records) / len(records),
        "first": json.dumps(records[0]),
        "dates": dates,
    }


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
