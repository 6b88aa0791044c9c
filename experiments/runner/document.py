"""docs/results.md and its figures, from result files alone.

Each experiment has a `report.py` with `report(results) -> str`, its part of the document. It may have
`figures(results) -> dict of matplotlib figures`, which are saved beside the document by name, and
`findings(results) -> rows` (claim, the paper's numbers, ours, verdict) for the table at the top.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.runner.spec import Plan

HEAD = """# Results

<!-- Written by `esolm reproduce` from experiments/*/results/*.json: change experiments/*/report.py, not this file. -->

"""


class Results(Mapping[str, Any]):
    """The results of one experiment and those it uses, by name, as far as they are there."""

    def __init__(self, plan: Plan, experiment: str) -> None:
        self.jobs = {job.name: job for job in plan.results([experiment, *plan.uses[experiment]])}
        paths = {name: job.result(plan.folder) for name, job in self.jobs.items()}
        self.found = {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.is_file()}

    def __getitem__(self, name: str) -> Any:
        return self.found[name]["result"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def missing(self) -> list[str]:
        """Names of the results that are not there."""
        return [name for name in self.jobs if name not in self.found]


def build(plan: Plan, docs: Path, figures: bool = True) -> Path:
    """Write the document; its path."""
    parts = [text for name in plan.experiments if (text := part(plan, name))]
    if figures:
        for name in plan.experiments:
            draw(plan, name, docs / "results")
    docs.mkdir(parents=True, exist_ok=True)
    path = docs / "results.md"
    partial = path.with_name(".results.md.partial")
    partial.write_text("\n\n".join([introduction(plan), *glance(plan), *parts]) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def introduction(plan: Plan) -> str:
    """What stands before the experiments: `experiments/introduction.md`, if there is one."""
    path = plan.folder / "introduction.md"
    return (HEAD + (path.read_text("utf-8") if path.is_file() else "")).strip()


def glance(plan: Plan) -> list[str]:
    """What all experiments found, as one table, and `experiments/conclusion.md`; nothing if nothing was found yet."""
    rows: list[Sequence[str]] = []
    for name in plan.experiments:
        results, module = Results(plan, name), _module(plan.folder / name / "report.py")
        if module is not None and results and hasattr(module, "findings"):
            rows += module.findings(results)
    columns = ("claim", "the paper", "here", "verdict")
    path = plan.folder / "conclusion.md"
    words = [path.read_text("utf-8").strip()] if path.is_file() else []
    return ["## At a glance", table(columns, rows, text=len(columns)), *words] if rows else []


def part(plan: Plan, experiment: str) -> str:
    """One experiment's part, with its commands; empty if it has no results or nothing to say."""
    results, module = Results(plan, experiment), _module(plan.folder / experiment / "report.py")
    if module is None or not results:
        return ""
    text = module.report(results).strip()
    if missing := results.missing():
        text += f"\n\n*Not measured yet: {len(missing)} of {len(results.jobs)} results ({', '.join(missing[:4])}"
        text += ", …).*" if len(missing) > 4 else ").*"
    return f"{text}\n\nResult files and commands: [experiments/{experiment}](../experiments/{experiment}/README.md)."


def draw(plan: Plan, experiment: str, folder: Path) -> None:
    """Save the figures of an experiment as SVG that depends on the results alone."""
    results, module = Results(plan, experiment), _module(plan.folder / experiment / "report.py")
    if module is None or not results or not hasattr(module, "figures"):
        return
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("the figures need matplotlib: pip install 'esolm[plot]'") from error
    matplotlib.use("Agg")
    style: Any = {"svg.hashsalt": "esolm", "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}
    with matplotlib.rc_context({**style, "axes.grid": True, "grid.alpha": 0.25, "figure.constrained_layout.use": True}):
        for name, figure in module.figures(results).items():
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _module(path: Path) -> ModuleType | None:
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"esolm_experiment_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """A table in Markdown; so many columns are text, the rest numbers."""
    rule = ["---"] * text + ["---:"] * (len(columns) - text)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def number(value: float | None, error: float | None = None, digits: int = 2) -> str:
    """A number with its error, or a dash where there is none yet."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
