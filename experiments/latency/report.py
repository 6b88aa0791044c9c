"""Seconds of a long sample in as many steps as tokens."""

from __future__ import annotations

from typing import Any

from esolm.reproduce.document import Results, number, table

PAPER = {
    "2048": {"esolm": 14.6, "ar": 13.3, "bd3lm, block 4": 24.3, "bd3lm, block 16": 21.3, "mdlm": 201.3},
    "8192": {"esolm": 82.1, "ar": 54.0, "bd3lm, block 4": 312.0, "bd3lm, block 16": 268.1, "mdlm": 5438.3},
}

NAMES = {
    "esolm": "Eso-LM", "ar": "AR", "bd3lm, block 4": "BD3-LM, L' = 4", "bd3lm, block 16": "BD3-LM, L' = 16", "mdlm": "MDLM",
}  # fmt: skip


def report(results: Results) -> str:
    """Ratios to Eso-LM, beside the paper's."""
    parts = ["## Latency at long context (Finding 4)", METHOD, FIGURE]
    for length, paper in PAPER.items():
        if (found := results.get(f"sample-{length}")) is None:
            continue
        systems = found["cases"][0]["systems"]
        rows = [
            [NAMES[name], number(s["seconds_per_sample"], None, 1), number(s["over_esolm"]), number(paper[name] / paper["esolm"], None, 1)]
            for name, s in systems.items()
        ]  # fmt: skip
        parts.append(table((f"L = {length}", "seconds", "× Eso-LM", "paper, × Eso-LM"), rows))
    return "\n\n".join([*parts, verdict(results)])


METHOD = """One sample with NFE = L by the paper's network (12 × 768, 50,258 entries, random weights) on two cores, each system
through the library's own sampler at its faster precision. Steps are timed at several places along the context and
integrated; the paper's seconds are of a GPU, so only ratios compare."""

FIGURE = "![Seconds of a sample by system and length](results/latency.svg)"


def verdict(results: Results) -> str:
    """Finding 4, part by part."""
    found = {length: results.get(f"sample-{length}") for length in PAPER}
    told = {length: f["cases"][0]["systems"] for length, f in found.items() if f is not None}
    if not told:
        return ""
    mdlm = " and ".join(f"{s['mdlm']['over_esolm']:.0f} times at L = {length}" for length, s in told.items())
    blocks = "; ".join(
        f"L' = 4 {s['bd3lm, block 4']['over_esolm']:.2f} and L' = 16 {s['bd3lm, block 16']['over_esolm']:.2f} at L = {length}"
        for length, s in told.items()
    )
    faster = {
        name: all(s[key]["over_esolm"] > 1.15 for s in told.values() for key in keys)
        for name, keys in {"MDLM": ["mdlm"], "BD3-LM": ["bd3lm, block 4", "bd3lm, block 16"]}.items()
    }
    words = ", ".join(f"{'confirmed' if held else 'not confirmed'} against {name}" for name, held in faster.items())
    text = f"**Finding 4, {words}.** MDLM takes {mdlm} as long as Eso-LM (paper: 14 and 65). "
    text += f"BD3-LM takes {blocks} of Eso-LM's time (paper: 1.7 and 1.5, then 3.8 and 3.3)."
    if not faster["BD3-LM"]:
        text += " " + BLOCKS
    return text


BLOCKS = """Our BD3-LM sampler keeps the keys and values of finished blocks in the same cache as Eso-LM's does and computes logits
only where a mask is; on a processor that waits for weights a step over 4 or 16 rows costs little more than over two. That
the sampler is right is tested against passes without any cache (tests/property/test_sampling_naive.py)."""


def findings(results: Results) -> list[list[str]]:
    """Finding 4, for MDLM and for BD3-LM."""
    told = {length: f["cases"][0]["systems"] for length in PAPER if (f := results.get(f"sample-{length}")) is not None}
    if len(told) < len(PAPER):
        return []
    rows = []
    for name, keys in {"MDLM": ["mdlm"], "BD3-LM (L' = 4, 16)": ["bd3lm, block 4", "bd3lm, block 16"]}.items():
        ours = [[s[key]["over_esolm"] for key in keys] for s in told.values()]
        theirs = [[paper[key] / paper["esolm"] for key in keys] for paper in PAPER.values()]
        here, there = ("; ".join(", ".join(f"{r:.1f}×" for r in ratios) for ratios in all) for all in (ours, theirs))
        held = [ratio > 1.15 for ratios in ours for ratio in ratios]
        verdict = "confirmed" if all(held) else "partly" if any(held) else "not confirmed"
        rows.append(
            [f"**4.** Long samples (L = {' and '.join(PAPER)}, NFE = L) are faster than {name}'s", there, here, verdict]
        )
    return rows


def figures(results: Results) -> dict[str, Any]:
    """Seconds of a sample, ours and the paper's, as multiples of Eso-LM's."""
    from matplotlib import pyplot as plt

    told = {length: f["cases"][0]["systems"] for length in PAPER if (f := results.get(f"sample-{length}")) is not None}
    figure, plots = plt.subplots(1, max(1, len(told)), figsize=(8, 3.2), sharey=True, squeeze=False)
    for axes, (length, systems) in zip(plots[0], told.items(), strict=False):
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
    plots[0][-1].legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.25))
    return {"latency": figure}
