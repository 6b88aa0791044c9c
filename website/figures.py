"""Draws the figures of docs/concepts.md: `python -m website.figures`. What they show is computed by the library.

Shapes: L length, K passes.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esolm import systems
from esolm.core import order
from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.core.visibility import block, by_order, causal, full, sorted_two_stream
from esolm.net.cache import KVCache
from esolm.net.config import DenoiserConfig
from esolm.net.denoiser import Denoiser
from esolm.sampling.options import SamplingOptions
from esolm.sampling.request import Request

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WORDS = ["Tom", "saw", "a", "big", "red", "dog"]
ORDER = [2, 5, 0, 4, 1, 3]
"""The order in which the figures denoise the six words."""
WIDTH = 8
"""Inches; a page shows them in about 700 pixels."""
SEEN, SELF = "#4a90d9", "#e8833a"
PHASES = {1: ("drawn by diffusion", "#4a90d9"), 2: ("drawn left to right", "#e8833a"), 3: ("given", "#8a929c")}
UNFED, CACHED, CLEAN, MASK = range(4)
STATES = {
    CACHED: ("read from the cache", "#b4bfca"),
    CLEAN: ("computed: a known token", "#4a90d9"),
    MASK: ("computed: a mask", "#e8833a"),
}


class Panel(NamedTuple):
    """A grid of small whole numbers, [rows, columns], and the names of its rows and columns."""

    title: str
    values: Tensor
    rows: list[str]
    columns: list[str]


def _pattern(title: str, seen: Tensor, rows: list[str]) -> Panel:
    """An attention mask, bool [N, N]; the diagonal is marked."""
    return Panel(title, seen.long() * (1 + torch.eye(len(seen), dtype=torch.long)), rows, rows)


def attention() -> list[Panel]:
    """Who sees whom: left to right, both ways, and in an order, whose words are then sorted by it."""
    sigma = torch.tensor([ORDER])
    step = order.inverse(sigma)
    ranked = by_order(step).dense()[0, 0]
    numbered = [f"{word} ({s + 1})" for word, s in zip(WORDS, step[0].tolist(), strict=True)]
    return [
        _pattern("AR: left to right", causal(len(WORDS)).dense()[0, 0], WORDS),
        _pattern("MDLM: both ways", full(len(WORDS)).dense()[0, 0], WORDS),
        _pattern("Eso-LM: in an order", ranked, numbered),
        _pattern("Eso-LM: sorted by it", ranked[sigma[0]][:, sigma[0]], [numbered[i] for i in ORDER]),
    ]


def two_streams() -> list[Panel]:
    """The masks over mask queries and clean tokens: Eso-LM's, sorted by the order, and BD3-LM's."""

    def slots(words: list[str]) -> list[str]:
        return [f"{word}?" for word in words] + words

    in_order = [WORDS[i] for i in ORDER]
    return [
        _pattern("Eso-LM, sorted by the order", sorted_two_stream(6, 6).dense()[0, 0], slots(in_order)),
        _pattern("BD3-LM, blocks of two", block(6, 2).dense()[0, 0], slots(WORDS)),
    ]


def schedule() -> list[Panel]:
    """Which position is drawn in which pass, for three values of alpha_0, after four given tokens."""
    length, steps = 24, 6
    given = torch.arange(length)[None] < 4
    panels = []
    for alpha_0 in (1.0, 0.5, 0.0):
        found = order.ancestral(given, torch.ones_like(given), Randomness(1), alpha_0, steps)
        nfe = int(found.nfe[0])
        values = torch.where(given, 3, torch.zeros(nfe, length, dtype=torch.long))
        for number, positions in enumerate(found.steps()):
            values[number, positions] = 1 if number < int(found.diffusion[0]) else 2
        rows = [str(n + 1) if n in (0, nfe - 1) else "" for n in range(nfe)]
        panels.append(Panel(f"alpha_0 = {alpha_0:g}: {nfe} passes", values, rows, [""] * length))
    return panels


class Recorder:
    """A network that notes, for each pass of one row, which positions it computes and which it reads from a cache."""

    def __init__(self, net: Denoiser, mask_id: int) -> None:
        self.net, self.mask_id, self.config, self.device, self.dtype = net, mask_id, net.config, net.device, net.dtype
        self.passes: list[Tensor] = []
        self.committed: list[int] = []

    def __call__(self, tokens: Tensor, position: Tensor, visibility: Any, *rest: Any, **named: Any) -> Tensor:
        """Run a pass."""
        state = torch.full((self.config.length,), UNFED)
        state[self.committed] = CACHED
        self.fed = position.expand_as(tokens)[0]
        state[self.fed] = torch.where(tokens[0] == self.mask_id, MASK, CLEAN)
        self.passes.append(state)
        return self.net(tokens, position, visibility, *rest, **named)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache that notes what is kept."""
        cache = self.net.new_cache(batch, capacity)
        commit = cache.commit

        def noted(count: int | Tensor, *rest: Any) -> None:
            self.committed += self.fed[: int(torch.as_tensor(count).max())].tolist()
            commit(count, *rest)

        cache.commit = noted  # type: ignore[method-assign]
        return cache


def recorded(system: str, plan: Schedule, request: Request) -> Tensor:
    """The state of every position in every pass of a sample that a system draws with this schedule, int [K, L]."""
    vocab_size, length = 8, request.x.shape[1]
    config = DenoiserConfig(vocab_size=vocab_size, length=length, layers=1, width=16, heads=2, cond_width=8)
    net = Recorder(Denoiser(config).eval(), vocab_size - 1)
    made = systems.find(system)(mask_id=net.mask_id)
    with torch.inference_mode():
        for _ in made.sample(net, request, plan, Randomness(0)):
            pass
    return torch.stack(net.passes)


def cache() -> list[Panel]:
    """What Eso-LM and MDLM compute in each pass of the same schedule."""
    length, given = 16, torch.arange(16)[None] < 3
    request = Request(torch.zeros(1, length, dtype=torch.long), given, torch.ones_like(given), SamplingOptions())
    plan = order.ancestral(given, request.valid, Randomness(3), 1.0, 7)
    panels = []
    for title, system in (("Eso-LM", "esolm"), ("MDLM", "mdlm")):
        values = recorded(system, plan, request)
        computed = int((values >= CLEAN).sum())
        rows = [f"pass {n + 1}" for n in range(len(values))]
        panels.append(Panel(f"{title}: {computed} tokens computed", values, rows, [""] * length))
    return panels


FIGURES: dict[str, Callable[[], list[Panel]]] = {
    "attention": attention,
    "two-streams": two_streams,
    "schedule": schedule,
    "cache": cache,
}
LEGENDS = {
    "attention": {1: ("the row's word sees the column's", SEEN), 2: ("itself", SELF)},
    "two-streams": {1: ("the row's slot sees the column's", SEEN), 2: ("itself", SELF)},
    "schedule": PHASES,
    "cache": STATES,
}
AXES = {"schedule": ("position in the text", "pass"), "cache": ("position in the text", "")}


def svg(name: str) -> str:
    """The figure as SVG; the same for the same version of matplotlib."""
    import matplotlib
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    panels, legend = FIGURES[name](), LEGENDS[name]
    style = {"svg.hashsalt": "esolm", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        most, width = max(len(panel.values) for panel in panels), WIDTH / len(panels)
        tall = min(0.9, most / panels[0].values.shape[1])
        figure, axes = pyplot.subplots(1, len(panels), figsize=(WIDTH, width * tall + 1), layout="constrained")
        for axis, panel in zip(axes, panels, strict=True):
            _draw(axis, panel, {key: colour for key, (_, colour) in legend.items()}, most)
            across, down = AXES.get(name, ("", ""))
            axis.set_xlabel(across)
            axis.set_ylabel(down if axis is axes[0] else "")
        patches = [Patch(color=colour, label=label) for label, colour in legend.values()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
    return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)


def _draw(axis: Any, panel: Panel, colours: dict[int, str], most: int) -> None:
    rows, columns = panel.values.shape
    axis.set_facecolor("#f0f2f5")
    for number, row in enumerate(panel.values.tolist()):
        for value, colour in colours.items():
            runs = [list(group) for each, group in itertools.groupby(range(columns), row.__getitem__) if each == value]
            if runs:
                axis.broken_barh([(run[0], len(run)) for run in runs], (number, 1), color=colour)
    axis.hlines(range(rows + 1), 0, columns, colors="white", linewidth=1)
    axis.vlines(range(columns + 1), 0, rows, colors="white", linewidth=1)
    axis.fill_between([0, columns], rows, most, color="white")
    axis.set_xlim(0, columns)
    axis.set_ylim(most, 0)
    axis.set_title(panel.title, fontsize=10)
    square = rows == columns
    if square:
        axis.set_aspect("equal")
    if rows == 2 * len(WORDS):  # two halves: mask queries, then clean tokens
        axis.axhline(len(WORDS), color="#333", linewidth=1)
        axis.axvline(len(WORDS), color="#333", linewidth=1)
    axis.set_yticks([r + 0.5 for r in range(rows)], panel.rows)
    axis.set_xticks([c + 0.5 for c in range(columns)], panel.columns, rotation=60 if square else 0)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def main(folder: Path = FOLDER) -> None:
    """Draw all figures."""
    for name in FIGURES:
        (folder / f"concepts-{name}.svg").write_text(svg(name), encoding="utf-8")
        print(folder / f"concepts-{name}.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
