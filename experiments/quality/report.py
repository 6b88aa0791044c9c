"""Judged quality of samples against their cost, for every system, alpha_0 and number of steps."""

from __future__ import annotations

import math
from typing import Any

from experiments.runner.document import Results, number, table

ALPHAS = ("1", "0.5", "0.25", "0.125")
STEPS = ("8", "32", "128")
BLOCKS = (("4", "32"), ("4", "64"), ("4", "128"), ("16", "8"), ("16", "32"), ("16", "128"))
LOW = 0.3
"""Nats of entropy below the model's own samples one token at a time that make a sample degenerate."""


def points(results: Results) -> list[dict[str, Any]]:
    """Every judged setting with its passes and seconds, where they were timed."""
    asked = [(f"esolm-{a}-{e}-{n}", f"Eso-LM {a}", f"runs/esolm-1 alpha_0={e} num_steps={n}", e, n) for a in ALPHAS for e in ALPHAS for n in STEPS]  # fmt: skip
    asked += [(f"esolm-{a}-left_to_right", f"Eso-LM {a}", "runs/esolm-1 sampler=left_to_right", "0", "") for a in (*ALPHAS, "0")]  # fmt: skip
    asked += [(f"mdlm-{n}", "MDLM", f"runs/mdlm num_steps={n}", "", n) for n in STEPS]
    asked += [(f"bd3lm-{b}-{n}", f"BD3-LM {b}", f"runs/bd3lm-{b} num_steps={n}", "", n) for b, n in BLOCKS]
    asked += [("ar", "AR", "runs/ar", "", "")]
    timed, alone = (
        {p["point"]: p for p in (results[name]["points"] if name in results else [])} for name in ("time-16", "time-1")
    )
    found = []
    for name, system, point, share, steps in asked:
        if (judged := results.get(f"judge-{name}")) is not None:
            cost = timed.get(point, {})
            one = alone.get(point, {}).get("seconds_per_sample")
            found.append(
                {"system": system, "alpha_0": share, "T": steps, "passes": cost.get("passes")}
                | {"seconds": cost.get("seconds_per_sample"), "alone": one, **judged}
            )
    return found


def milliseconds(seconds: float | None) -> str:
    """A duration, if it was measured."""
    return number(None if seconds is None else 1000 * seconds, None, 0)


def report(results: Results) -> str:
    """The best settings of each system, then all."""
    found = points(results)
    columns = ("trained", "sampled at alpha_0", "T", "passes", "ms a sample", "ms alone", "judge, nats", "entropy")
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
    """The table of a dozen settings with more samples."""
    found = {title: results.get(f"mauve-{name}") for name, title in MAUVE.items()}
    rows = [
        [t, number(f["mauve"], f["mauve_stderr"], 3), number(f["ceiling"])] for t, f in found.items() if f is not None
    ]
    text = """MAUVE of 1000 samples against the valid split, by a sentence embedder (all-MiniLM-L6-v2), with a bootstrap error; the ceiling
is what one half of the real texts scores against the other. Near 0, as here, all samples are told from real texts: such small models
can be ranked by it, and no more."""
    return [text, table(("setting", "MAUVE", "ceiling"), rows)] if rows else []


METHOD = """256 samples of 128 tokens for every setting, nucleus 0.9 as in the paper, judged by SmolLM2-135M-Instruct, which had no
part in the training: nats per token of the judge's own tokens, with the standard error. Entropy is that of a sample's own
tokens. Passes and milliseconds a sample are of 16 samples together on two cores, all settings interleaved in one run; what a
sample costs does not depend on the weights. Alone, a sample of so small a network costs what its small operations do,
2 to 5 ms a pass, and the cache gains little: the frontier is that of 16 together (the paper's is of 512)."""
FIGURE = "![Judged nats against milliseconds a sample: one line for a system](results/quality.svg)"


def frontier(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings that no other one beats in both time and quality."""
    timed = sorted((p for p in found if p["seconds"] is not None), key=lambda p: (p["seconds"], p["nats"]))
    kept: list[dict[str, Any]] = []
    for point in timed:
        if not kept or point["nats"] < kept[-1]["nats"]:
            kept.append(point)
    return kept


def title(p: dict[str, Any]) -> str:
    """A setting in words."""
    share = f", sampled at {p['alpha_0']}" if p["alpha_0"] else ""
    return f"{p['system']}{share}{', T = ' + p['T'] if p['T'] else ''}"


def beaten(point: dict[str, Any], others: list[dict[str, Any]], errors: float) -> bool:
    """Whether another setting is as fast, no worse (by so many standard errors), and does not repeat itself."""

    def good(p: dict[str, Any]) -> bool:
        error = math.hypot(p["stderr"], point["stderr"])
        return p["nats"] <= point["nats"] + errors * error and p["entropy"] >= point["entropy"] - LOW

    return any(p["seconds"] <= point["seconds"] and good(p) for p in others)


def contest(found: list[dict[str, Any]], errors: float = 0) -> dict[str, tuple[int, int]]:
    """Of the settings of MDLM and of BD3-LM: how many some setting of Eso-LM beats, and how many there are. A model
    trained at alpha_0 = 0 is left to right, and does not count."""
    timed = [p for p in found if p["seconds"] is not None]
    ours = [p for p in timed if p["system"].startswith("Eso-LM") and p["system"] != "Eso-LM 0"]
    rivals = {name: [p for p in timed if p["system"].startswith(name)] for name in ("MDLM", "BD3-LM")}
    return {
        name: (sum(beaten(p, ours, errors) for p in mine), len(mine)) for name, mine in rivals.items() if mine and ours
    }


def drop(found: list[dict[str, Any]], system: str, share: str) -> dict[str, Any] | None:
    """The fastest setting of a system, and how much entropy it has lost against the slowest one."""
    mine = [p for p in found if p["system"] == system and p["alpha_0"] == share and p["T"]]
    if len(mine) < 2:
        return None
    fast, slow = min(mine, key=lambda p: int(p["T"])), max(mine, key=lambda p: int(p["T"]))
    return {"point": fast, "lost": slow["entropy"] - fast["entropy"], "worse": fast["nats"] - slow["nats"]}


def drops(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest settings of Eso-LM as a pure diffusion model and of BD3-LM."""
    asked = [("Eso-LM 1", "1"), ("BD3-LM 4", ""), ("BD3-LM 16", "")]
    return {system: lost for system, share in asked if (lost := drop(found, system, share)) is not None}


def verdict(found: list[dict[str, Any]]) -> str:
    """Whose settings are on the frontier, and which are degenerate."""
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
            " A setting of another system is beaten if one of Eso-LM takes no longer, is judged no worse and has no less entropy"
            f" (but for {LOW} nats), where Eso-LM trained at 0, which is left to right, does not count: {strict}. With two"
            f" standard errors allowed, which was decided after the first numbers were seen: {lenient}."
        )
    single = frontier([p for p in found if p["system"] == "Eso-LM 1"])
    if single:
        text += f"\n\n**One model for all (Remark 2).** The frontier of the model trained at alpha_0 = 1 alone: {'; '.join(map(title, single))}."
    text += "\n\n**Finding 3.** With the fewest steps, against the most steps of the same model: "
    text += "; ".join(
        f"{title(lost['point'])} is judged {lost['worse']:+.2f} nats and its entropy is {-lost['lost']:+.2f}"
        for lost in drops(found).values()
    )
    return text + "."


def findings(results: Results) -> list[list[str]]:
    """Findings 2 and 3."""
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
    """Quality against time: all settings, and the frontier of each family."""
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
    axes.set(
        xscale="log", xlabel="milliseconds a sample, 16 together", ylabel="judge, nats per token (lower is better)"
    )
    ticks = [5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=9, frameon=False, loc="lower left")
    return {"quality": figure}
