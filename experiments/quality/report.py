"""Judged quality of samples against time, for every system, alpha_0 and number of steps."""

from __future__ import annotations

import math
from typing import Any

from experiments.runner.document import Results, number, table

ALPHAS = ("1", "0.5", "0.25", "0.125")
STEPS = ("8", "32", "128")
BLOCKS = (("4", "32"), ("4", "64"), ("4", "128"), ("16", "8"), ("16", "32"), ("16", "128"))
LOW = 0.3
"""Loss of entropy in nats above which we call samples degenerate."""


def points(results: Results) -> list[dict[str, Any]]:
    """Return every judged setting with its passes and seconds, if timed."""
    settings = [(f"esolm-{a}-{e}-{n}", f"Eso-LM {a}", f"runs/esolm-1 alpha_0={e} num_steps={n}", e, n) for a in ALPHAS for e in ALPHAS for n in STEPS]  # fmt: skip
    settings += [(f"esolm-{a}-left_to_right", f"Eso-LM {a}", "runs/esolm-1 sampler=left_to_right", "0", "") for a in (*ALPHAS, "0")]  # fmt: skip
    settings += [(f"mdlm-{n}", "MDLM", f"runs/mdlm num_steps={n}", "", n) for n in STEPS]
    settings += [(f"bd3lm-{b}-{n}", f"BD3-LM {b}", f"runs/bd3lm-{b} num_steps={n}", "", n) for b, n in BLOCKS]
    settings += [("ar", "AR", "runs/ar", "", "")]
    timed, alone = (
        {p["point"]: p for p in (results[name]["points"] if name in results else [])} for name in ("time-16", "time-1")
    )
    found = []
    for name, system, point, share, steps in settings:
        if (judged := results.get(f"judge-{name}")) is not None:
            cost = timed.get(point, {})
            one = alone.get(point, {}).get("seconds_per_sample")
            found.append(
                {"system": system, "alpha_0": share, "T": steps, "passes": cost.get("passes")}
                | {"seconds": cost.get("seconds_per_sample"), "alone": one, **judged}
            )
    return found


def milliseconds(seconds: float | None) -> str:
    """Format a duration; None gives a dash."""
    return number(None if seconds is None else 1000 * seconds, None, 0)


def report(results: Results) -> str:
    """Return the table of all settings, the findings and MAUVE."""
    found = points(results)
    columns = ("trained", "sampled at alpha_0", "T", "passes", "ms per sample", "ms, batch 1", "judge, nats", "entropy")
    rows = [
        [p["system"], p["alpha_0"], p["T"], number(p["passes"], None, 0), milliseconds(p["seconds"]), milliseconds(p["alone"]),
         number(p["nats"], p["stderr"]), number(p["entropy"])]
        for p in found
    ]  # fmt: skip
    return "\n\n".join(
        [
            "## Sample quality against time (Findings 2 and 3)",
            METHOD,
            FIGURE,
            table(columns, rows),
            verdict(found),
            *mauve(results),
        ]
    )


MAUVE = {
    "ar": "AR", "bd3lm-4-64": "BD3-LM 4, T = 64", "bd3lm-16-32": "BD3-LM 16, T = 32", "mdlm-32": "MDLM, T = 32",
    "mdlm-128": "MDLM, T = 128", "esolm-1-8": "Eso-LM 1, T = 8", "esolm-1-32": "Eso-LM 1, T = 32",
    "esolm-1-128": "Eso-LM 1, T = 128", "esolm-1-speculative": "Eso-LM 1, speculative", "esolm-0.25-32": "Eso-LM 0.25, T = 32",
    "esolm-0.125-32": "Eso-LM 0.125, T = 32", "esolm-0-left_to_right": "Eso-LM 0, left to right",
}  # fmt: skip


def mauve(results: Results) -> list[str]:
    """Return the MAUVE table, for settings with more samples."""
    found = {title: results.get(f"mauve-{name}") for name, title in MAUVE.items()}
    rows = [
        [t, number(f["mauve"], f["mauve_stderr"], 3), number(f["ceiling"])] for t, f in found.items() if f is not None
    ]
    text = """MAUVE of 1000 samples against the validation split, with a sentence embedder (all-MiniLM-L6-v2) and a bootstrap error. The
ceiling is the score of one half of the real texts against the other. All values are near 0: every model's samples are easily
distinguished from real text, and MAUVE can only rank such small models."""
    return [text, table(("setting", "MAUVE", "ceiling"), rows)] if rows else []


METHOD = """256 samples of 128 tokens per setting, top-p 0.9 as in the paper, judged by SmolLM2-135M-Instruct, an independent model:
nats per token of the judge's own tokens, with the standard error. Entropy is that of the tokens of a sample. Passes and
milliseconds per sample are measured in batches of 16 on two cores, with all settings timed in turn in one run; the time
does not depend on the weights. At batch 1 the small operations of so small a network dominate (2 to 5 ms per pass) and
the cache gains little, so the frontier is that of batch 16 (512 in the paper)."""
FIGURE = "![Judged nats against milliseconds per sample, one line per system](results/quality.svg)"


def frontier(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that no other setting beats in both time and quality."""
    timed = sorted((p for p in found if p["seconds"] is not None), key=lambda p: (p["seconds"], p["nats"]))
    kept: list[dict[str, Any]] = []
    for point in timed:
        if not kept or point["nats"] < kept[-1]["nats"]:
            kept.append(point)
    return kept


def title(p: dict[str, Any]) -> str:
    """Describe a setting."""
    share = f", sampled at {p['alpha_0']}" if p["alpha_0"] else ""
    return f"{p['system']}{share}{', T = ' + p['T'] if p['T'] else ''}"


def beaten(point: dict[str, Any], others: list[dict[str, Any]], errors: float) -> bool:
    """Whether another setting is as fast, no worse within `errors` standard errors, and not degenerate."""

    def good(p: dict[str, Any]) -> bool:
        error = math.hypot(p["stderr"], point["stderr"])
        return p["nats"] <= point["nats"] + errors * error and p["entropy"] >= point["entropy"] - LOW

    return any(p["seconds"] <= point["seconds"] and good(p) for p in others)


def contest(found: list[dict[str, Any]], errors: float = 0) -> dict[str, tuple[int, int]]:
    """For MDLM and BD3-LM, return how many settings some setting of Eso-LM beats, and how many there are.

    A model trained at alpha_0 = 0 is a left-to-right model and is excluded.
    """
    timed = [p for p in found if p["seconds"] is not None]
    ours = [p for p in timed if p["system"].startswith("Eso-LM") and p["system"] != "Eso-LM 0"]
    rivals = {name: [p for p in timed if p["system"].startswith(name)] for name in ("MDLM", "BD3-LM")}
    return {
        name: (sum(beaten(p, ours, errors) for p in mine), len(mine)) for name, mine in rivals.items() if mine and ours
    }


def drop(found: list[dict[str, Any]], system: str, share: str) -> dict[str, Any] | None:
    """Return the fastest setting of a system, and its loss of entropy and quality against the slowest."""
    mine = [p for p in found if p["system"] == system and p["alpha_0"] == share and p["T"]]
    if len(mine) < 2:
        return None
    fast, slow = min(mine, key=lambda p: int(p["T"])), max(mine, key=lambda p: int(p["T"]))
    return {"point": fast, "lost": slow["entropy"] - fast["entropy"], "worse": fast["nats"] - slow["nats"]}


def drops(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the losses of the fastest settings of Eso-LM as pure diffusion and of BD3-LM."""
    chosen = [("Eso-LM 1", "1"), ("BD3-LM 4", ""), ("BD3-LM 16", "")]
    return {system: lost for system, share in chosen if (lost := drop(found, system, share)) is not None}


def verdict(found: list[dict[str, Any]]) -> str:
    """Summarise Findings 2 and 3."""
    kept = frontier(found)
    if not kept:
        return ""
    text = f"**Finding 2.** The frontier of time and judged quality, from fast to slow: {'; '.join(map(title, kept))}."
    if games := contest(found):
        strict, lenient = (
            ", ".join(f"{won} of {all} of {name}" for name, (won, all) in game.items())
            for game in (games, contest(found, 2))
        )
        text += (
            " A setting of another system counts as beaten if some setting of Eso-LM takes no longer, is judged no worse, and has"
            f" at most {LOW} nats less entropy; Eso-LM trained at 0, a left-to-right model, is excluded. Beaten: {strict}. With a"
            f" tolerance of two standard errors, which we added after seeing the first numbers: {lenient}."
        )
    single = frontier([p for p in found if p["system"] == "Eso-LM 1"])
    if single:
        text += f"\n\n**One model for all (Remark 2).** The frontier of the single model trained at alpha_0 = 1: {'; '.join(map(title, single))}."
    text += "\n\n**Finding 3.** Fewest steps against most steps of the same model: "
    text += "; ".join(
        f"{title(lost['point'])} changes by {lost['worse']:+.2f} nats to the judge and by {-lost['lost']:+.2f} in entropy"
        for lost in drops(found).values()
    )
    return text + "."


def findings(results: Results) -> list[list[str]]:
    """Return rows for Findings 2 and 3."""
    found = points(results)
    rows = []
    if games := contest(found):
        won, all = (sum(game[i] for game in games.values()) for i in (0, 1))
        here = "; ".join(f"beats {lost} of {n} settings of {name}" for name, (lost, n) in games.items())
        held = "confirmed" if won == all else "partly" if won else "not confirmed"
        rows.append(
            [
                "**2.** The best frontier of sampling time and quality",
                "MAUVE and generative perplexity, OWT",
                here,
                held,
            ]
        )
    lost = drops(found)
    if len(lost) == 3:
        degenerate = {name: one["lost"] > LOW for name, one in lost.items()}
        here = "; ".join(
            f"{name}: judge {one['worse']:+.2f}, entropy {-one['lost']:+.2f}" for name, one in lost.items()
        )
        ours, theirs = not degenerate["Eso-LM 1"], degenerate["BD3-LM 4"] or degenerate["BD3-LM 16"]
        held = "confirmed" if ours and theirs else "partly" if ours else "not confirmed"
        claim = "**3.** No degenerate samples at few steps, unlike BD3-LM (fewest steps against most, nats)"
        rows.append([claim, "BD3-LM loses quality and entropy", here, held])
    return rows


def figures(results: Results) -> dict[str, Any]:
    """Plot quality against time: all settings, and the frontier of each family."""
    from matplotlib import pyplot as plt

    found = [p for p in points(results) if p["seconds"] is not None]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    families = {
        "Eso-LM": ("Eso-LM, all alpha_0", "#2a7f62", "o-"), "Eso-LM 1": ("Eso-LM trained at 1", "#2a7f62", "o:"),
        "MDLM": ("MDLM", "#c1440e", "s-"), "BD3-LM": ("BD3-LM, L' = 4, 16", "#4a6fa5", "^-"), "AR": ("AR", "#333333", "D"),
    }  # fmt: skip
    for start, (label, colour, style) in families.items():
        mine = [p for p in found if f"{p['system']} ".startswith(f"{start} ")]
        axes.plot(
            [1000 * p["seconds"] for p in mine], [p["nats"] for p in mine], style[0], color=colour, alpha=0.2, ms=4
        )
        best = frontier(mine)
        axes.plot(
            [1000 * p["seconds"] for p in best], [p["nats"] for p in best], style, color=colour, label=label, ms=5
        )
    axes.set(xscale="log", xlabel="milliseconds per sample, batch 16", ylabel="judge, nats per token (lower is better)")
    ticks = [5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=9, frameon=False, loc="lower left")
    return {"quality": figure}
