"""Time of a long sample with NFE = L."""

from __future__ import annotations

from typing import Any

from experiments.runner.document import Results, number, table

PAPER = {
    "2048": {"esolm": 14.6, "ar": 13.3, "bd3lm, block 4": 24.3, "bd3lm, block 16": 21.3, "mdlm": 201.3},
    "8192": {"esolm": 82.1, "ar": 54.0, "bd3lm, block 4": 312.0, "bd3lm, block 16": 268.1, "mdlm": 5438.3},
}

NAMES = {
    "esolm": "Eso-LM", "ar": "AR", "bd3lm, block 4": "BD3-LM, L' = 4", "bd3lm, block 16": "BD3-LM, L' = 16", "mdlm": "MDLM",
}  # fmt: skip


def report(results: Results) -> str:
    """Return the ratios to Eso-LM, with the paper's."""
    parts = ["## Latency at long context (Finding 4)", METHOD, FIGURE]
    for length, paper in PAPER.items():
        if (found := results.get(f"sample-{length}")) is None:
            continue
        systems = found["cases"][0]["systems"]
        rows = [
            [NAMES[name], number(s["seconds_per_sample"], None, 1), number(s["over_esolm"]), number(paper[name] / paper["esolm"], None, 1)]
            for name, s in systems.items()
            if name in paper
        ]  # fmt: skip
        parts.append(table((f"L = {length}", "seconds", "× Eso-LM", "paper, × Eso-LM"), rows))
    return "\n\n".join([*parts, verdict(results)])


METHOD = """One sample with NFE = L from the paper's network (12 × 768, vocabulary 50,258, random weights) on two cores. Each system
uses the library's own sampler at its faster precision. Steps are timed at several context lengths and integrated. The
paper measured on a GPU, so only ratios can be compared."""

FIGURE = "![Time of a sample by system and length, relative to Eso-LM](results/latency.svg)"


OTHERS = {"MDLM": ("mdlm",), "BD3-LM (L' = 4, 16)": ("bd3lm, block 4", "bd3lm, block 16")}
FASTER = 1.15
"""Smallest ratio that we do not attribute to noise."""


def measured(results: Results) -> dict[str, Any]:
    """Return the systems of each measured length."""
    return {length: f["cases"][0]["systems"] for length in PAPER if (f := results.get(f"sample-{length}")) is not None}


def held(systems: dict[str, Any], keys: tuple[str, ...]) -> str:
    """Return whether the finding holds for the given systems at all lengths."""
    faster = [s[key]["over_esolm"] > FASTER for s in systems.values() for key in keys]
    return "confirmed" if all(faster) else "partly" if any(faster) else "not confirmed"


def verdict(results: Results) -> str:
    """Summarise Finding 4."""
    if not (systems := measured(results)):
        return ""
    mdlm = " and ".join(f"{s['mdlm']['over_esolm']:.0f} times as long at L = {length}" for length, s in systems.items())
    blocks = "; ".join(
        f"{s['bd3lm, block 4']['over_esolm']:.2f} (L' = 4) and {s['bd3lm, block 16']['over_esolm']:.2f} (L' = 16) times as long at L = {length}"
        for length, s in systems.items()
    )
    words = "; ".join(f"against {name}: {held(systems, keys)}" for name, keys in OTHERS.items())
    text = f"**Finding 4, {words}.** Relative to Eso-LM, MDLM takes {mdlm}, and BD3-LM {blocks}."
    return text if held(systems, OTHERS["BD3-LM (L' = 4, 16)"]) == "confirmed" else f"{text} {BLOCKS}"


BLOCKS = """Our BD3-LM sampler caches keys and values of finished blocks as Eso-LM's sampler does, and computes logits only at masks.
A CPU step is limited by reading weights, so a step over 4 or 16 rows costs little more than one over two. The sampler is
tested against passes without a cache (tests/property/test_sampling_naive.py)."""


def findings(results: Results) -> list[list[str]]:
    """Return rows for Finding 4, against MDLM and against BD3-LM."""
    systems, rows = measured(results), []
    if len(systems) < len(PAPER):
        return []
    for name, keys in OTHERS.items():
        ours = [[s[key]["over_esolm"] for key in keys] for s in systems.values()]
        theirs = [[paper[key] / paper["esolm"] for key in keys] for paper in PAPER.values()]
        here, there = ("; ".join(", ".join(f"{r:.1f}×" for r in ratios) for ratios in all) for all in (ours, theirs))
        claim = f"**4.** Long samples (L = {' and '.join(PAPER)}, NFE = L) are faster than {name}'s"
        rows.append([claim, there, here, held(systems, keys)])
    return rows


def figures(results: Results) -> dict[str, Any]:
    """Plot the time of a sample relative to Eso-LM, ours and the paper's."""
    from matplotlib import pyplot as plt

    found = measured(results)
    figure, plots = plt.subplots(1, max(1, len(found)), figsize=(8, 3.2), sharey=True, squeeze=False)
    for axes, (length, systems) in zip(plots[0], found.items(), strict=False):
        names = list(PAPER[length])
        for i, (label, ratios) in enumerate(
            {
                "here, two cores": [systems[name]["over_esolm"] for name in names],
                "the paper, one GPU": [PAPER[length][name] / PAPER[length]["esolm"] for name in names],
            }.items()
        ):
            places = [j + 0.38 * i for j in range(len(names))]
            bars = axes.barh(places, ratios, height=0.36, color=("#2a7f62", "#c9c9c9")[i], label=label)
            axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axes.set_yticks([j + 0.19 for j in range(len(names))], [NAMES[name] for name in names])
        axes.set(xscale="log", title=f"L = {length}", xlabel="time of a sample, × Eso-LM", xlim=(0.5, 600))
        axes.grid(visible=False, axis="y")
    plots[0][0].invert_yaxis()
    if found:
        plots[0][-1].legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.25))
    return {"latency": figure}
