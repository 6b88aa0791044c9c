"""Passes and seconds of samples of trained models under several settings, timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model import LanguageModel, load
from ..net.native.library import status
from .report import table
from .timing import interleaved, summary

OPTIONS: dict[str, Callable[[str], Any]] = {
    "alpha_0": float, "num_steps": int, "sampler": str, "parallelism": int, "window": int, "length": int, "tau": float,
    "confidence": str, "block_length": int, "cache": str, "refresh": int, "freeze": str, "temperature": float,
    "top_p": float,
}  # fmt: skip


def parse(point: str) -> tuple[str, dict[str, Any]]:
    """Split `RUN key=value …` into the run and its options.

    Raises ValueError for an option not in OPTIONS.
    """
    run, *words = point.split()
    options = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or key not in OPTIONS:
            raise ValueError(
                f"{word!r} in the point {point!r}: write RUN key=value, where key is one of {', '.join(OPTIONS)}"
            )
        options[key] = OPTIONS[key](value)
    return run, options


def run(
    points: list[str], batch: int = 1, rounds: int = 5, which: str = "best", precision: str | None = None
) -> dict[str, Any]:
    """Measure passes and seconds of a sample under several settings, each setting once per round.

    Args:
        points: the settings, each as "RUN alpha_0=0.5 num_steps=32"; also length and the other sampling options.
        batch: samples per batch.
        rounds: timed batches of each setting.
        which: checkpoint of each run, best or last.
        precision: float32, bf16, int8, int4 or auto convert each model for inference, in the native engine where it is
            available; by default a model stays as it was trained, on the slower path of PyTorch.
    """
    parsed = {point: parse(point) for point in points}
    names = dict.fromkeys(name for name, _ in parsed.values())
    models = {name: load(name, which=which, precision=precision) for name in names}
    passes: dict[str, list[int]] = {point: [] for point in points}

    def case(point: str, lm: LanguageModel, options: dict[str, Any]) -> Callable[[int], None]:
        def draw(i: int) -> None:
            passes[point].append(lm.sample(num_samples=batch, seed=i, batch_size=batch, **options).passes)

        return draw

    cases = {point: case(point, models[name], options) for point, (name, options) in parsed.items()}
    seconds = interleaved(cases, rounds)
    found = []
    for point in points:
        median, *quartiles = summary([second / batch for second in seconds[point]])
        mean = sum(passes[point]) / len(passes[point])
        found.append({"point": point, "passes": mean, "seconds_per_sample": median, "quartiles": quartiles})
    columns = {"setting": "point", "passes": "passes", "s/sample": "seconds_per_sample", "quartiles": "quartiles"}
    table(f"samples in batches of {batch}", columns, found)
    engine = "torch: the models are as they were trained" if precision is None else status()
    return {"batch": batch, "engine": engine, "points": found}
