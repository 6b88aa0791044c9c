"""The local tasks on a converted left-to-right model, beside the harness's own model class on the original.

python -m experiments.harness.compare ORIGINAL CONVERTED PASSAGES OUT
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from esolm.interop.harness import HarnessModel

TASKS = Path(__file__).parent / "tasks"
BOS = {"pydocs_choice": True, "pydocs_rolling": False, "lambada_local": True}
"""Whether HFLM is asked to put BOS before a text: a rolling likelihood has one anyway, and would get two."""


def main() -> None:
    """Write the metrics of both, and the largest difference between their log-likelihoods, in nats."""
    parser = argparse.ArgumentParser()
    for name in ("original", "converted", "passages", "out"):
        parser.add_argument(name)
    parser.add_argument("--limit", type=int, default=100)
    words = parser.parse_args()
    manager = TaskManager(include_path=str(TASKS), metadata={"file": words.passages})
    ours = HarnessModel(words.converted, estimator="nelbo", batch_size=16, device="cpu")
    found: dict[str, Any] = {"limit": words.limit}
    for task, bos in BOS.items():
        theirs = HFLM(words.original, dtype="float32", device="cpu", batch_size=16, add_bos_token=bos)
        results, values = {}, {}
        for name, model in (("esolm", ours), ("transformers", theirs)):
            made = simple_evaluate(model, tasks=[task], task_manager=manager, limit=words.limit, bootstrap_iters=0)
            results[name] = metrics(made["results"][task])
            values[name] = [number for sample in made["samples"][task] for number in numbers(sample["resps"])]
        pairs = zip(values["esolm"], values["transformers"], strict=True)
        largest = max(abs(one - other) for one, other in pairs)
        found[task] = {**results, "likelihoods": len(values["esolm"]), "largest_difference": float(f"{largest:.1g}")}
    Path(words.out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def metrics(result: dict[str, Any]) -> dict[str, float]:
    """The values without their errors, by the name of the metric."""
    return {
        key.partition(",")[0]: value
        for key, value in result.items()
        if isinstance(value, float) and "_stderr" not in key
    }


def numbers(found: Any) -> Iterator[float]:
    """The log-likelihoods in the harness's nested lists, without whether they are greedy."""
    if isinstance(found, float):
        yield found
    elif isinstance(found, list | tuple):
        for part in found:
            yield from numbers(part)


if __name__ == "__main__":
    main()
