"""Quality against time on stories: samplers, approximate caches and the exact one; tokens per second at equal quality."""

from __future__ import annotations

import math
from typing import Any

from experiments.runner.document import Results, number, table

LENGTH = 128
LOW = 0.3
"""Loss of entropy in nats, against a system's slowest setting, above which we call samples degenerate."""
MDLM, ESO, ANY = "runs/tiny-mdlm-0", "runs/tiny-esolm-1-0", "runs/tiny-any-1-0"
SURE = "sampler=confidence num_steps=32 block_length=32"
LATE = "sampler=confidence num_steps=128 block_length=32"
SETTINGS = {
    "ar": ("AR", "", "runs/tiny-ar-0"),
    **{f"mdlm-{n}": ("MDLM", f"ancestral, T = {n}", f"{MDLM} num_steps={n}") for n in (8, 32, 128)},
    "mdlm-confidence-32": ("MDLM", "confidence, T = 32", f"{MDLM} {SURE}"),
    "mdlm-confidence-128": ("MDLM", "confidence, T = 128", f"{MDLM} {LATE}"),
    "mdlm-threshold": ("MDLM", "threshold 0.9", f"{MDLM} sampler=threshold tau=0.9 block_length=32"),
    **{
        f"mdlm-{cache}-32": ("MDLM", f"confidence, T = 32, cache {cache}", f"{MDLM} {SURE} cache={cache}")
        for cache in ("prefix", "dual", "delayed", "frozen")
    },
    **{
        f"mdlm-{cache}-128": ("MDLM", f"confidence, T = 128, cache {cache}", f"{MDLM} {LATE} cache={cache}")
        for cache in ("prefix", "dual", "delayed", "frozen")
    },
    **{f"bd3lm-{n}": ("BD3-LM 4", f"T = {n}", f"runs/tiny-bd3lm-4-0 num_steps={n}") for n in (32, 64, 128)},
    **{f"esolm-{n}": ("Eso-LM 1", f"ancestral, T = {n}", f"{ESO} num_steps={n}") for n in (8, 32, 128)},
    **{f"esolm-block-{n}": ("Eso-LM 1", f"block of {n}", f"{ESO} sampler=block parallelism={n}") for n in (4, 16)},
    **{
        f"esolm-confidence-{n}": (
            "Eso-LM 1",
            f"confidence, T = {n}",
            f"{ESO} sampler=confidence num_steps={n} window=32",
        )
        for n in (32, 128)
    },
    "esolm-threshold": ("Eso-LM 1", "threshold 0.9", f"{ESO} sampler=threshold tau=0.9 window=32"),
    "esolm-one": ("Eso-LM 1", "one at a time", f"{ESO} sampler=first_hitting"),
    "esolm-speculative": ("Eso-LM 1", "speculative", f"{ESO} sampler=speculative"),
    "any-32": ("Eso-LM 1, any-order loss", "ancestral, T = 32", f"{ANY} num_steps=32"),
    "any-speculative": ("Eso-LM 1, any-order loss", "speculative", f"{ANY} sampler=speculative"),
    "quarter-32": ("Eso-LM 0.25", "ancestral, T = 32", "runs/tiny-esolm-0.25-0 num_steps=32"),
    "eighth-32": ("Eso-LM 0.125", "ancestral, T = 32", "runs/tiny-esolm-0.125-0 num_steps=32"),
}
"""By the name of the samples: system, sampler, and the point of `esolm bench points`."""
METHOD = """{samples} samples of 128 tokens for each setting, top-p 0.9, from the models of the table above. The judge is an independent model
(nats per token of its own tokens, ± the standard error); entropy is that of the tokens of a sample.{mauve}
Tokens per second at batch 1 and 16 are medians of one interleaved run over all settings on the fastest path that each
has on this CPU (the machine is in the result files)."""
FRONTIER = "![Judged nats against milliseconds per sample at batch 16, one line per system](results/frontier.svg)"
SPEED = "![Tokens per second at batch 1 at the quality of Eso-LM one token at a time](results/tokens-per-second.svg)"


def points(results: Results) -> list[dict[str, Any]]:
    """Return every judged setting with its passes and speeds."""
    timed = {
        batch: {p["point"]: p for p in (results[f"time-{batch}"]["points"] if f"time-{batch}" in results else [])}
        for batch in (1, 16)
    }
    found = []
    for name, (system, sampler, point) in SETTINGS.items():
        if (judged := results.get(f"judge-{name}")) is None:
            continue
        cost = {batch: timed[batch].get(point, {}).get("seconds_per_sample") for batch in timed}
        found.append(
            {"name": name, "system": system, "sampler": sampler, "alone": cost[1], "seconds": cost[16]}
            | {"passes": timed[16].get(point, {}).get("passes"), "mauve": results.get(f"mauve-{name}"), **judged}
        )
    return found


def per_second(seconds: float | None) -> str:
    """Format the tokens per second of samples that take so long."""
    return number(None if seconds is None else LENGTH / seconds, None, 0)


def report(results: Results) -> str:
    """Return the table of settings, the frontier and the comparison of speed."""
    found = points(results)
    columns = ["system", "sampler", "passes", "tokens/s, batch 1", "batch 16", "judge, nats", "entropy"]
    rows = [
        [p["system"], p["sampler"], number(p["passes"], None, 0), per_second(p["alone"]), per_second(p["seconds"]),
         number(p["nats"], p["stderr"]), number(p["entropy"])]
        for p in found
    ]  # fmt: skip
    compared = any(p["mauve"] for p in found)
    if compared:
        columns.append("MAUVE")
        for row, p in zip(rows, found, strict=True):
            row.append(number((p["mauve"] or {}).get("mauve"), (p["mauve"] or {}).get("mauve_stderr")))
    about = METHOD.format(
        samples=found[0]["samples"] if found else "",
        mauve=" MAUVE compares with held-out stories." if compared else " MAUVE is not measured yet.",
    )
    parts = ["## Second round: quality against time", about, table(columns, rows, text=2) if rows else ""]
    if absent := [" ".join(SETTINGS[name][:2]) for name in SETTINGS if f"judge-{name}" not in results]:
        parts.append(f"Not reached yet: {'; '.join(absent)}.")
    if any(p["seconds"] for p in found):
        parts += [FRONTIER, verdict(found)]
    if equal(found):
        parts += [SPEED, headline(found)]
    return "\n\n".join(part for part in parts if part)


def frontier(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that no other one beats in both time and quality, without degenerate ones."""
    fullest = {p["system"]: max(q["entropy"] for q in found if q["system"] == p["system"]) for p in found}
    sound = [p for p in found if p["seconds"] and p["entropy"] >= fullest[p["system"]] - LOW]
    kept: list[dict[str, Any]] = []
    for point in sorted(sound, key=lambda p: (p["seconds"], p["nats"])):
        if not kept or point["nats"] < kept[-1]["nats"]:
            kept.append(point)
    return kept


def title(p: dict[str, Any]) -> str:
    """Name a setting."""
    return f"{p['system']} ({p['sampler']})" if p["sampler"] else p["system"]


def verdict(found: list[dict[str, Any]]) -> str:
    """Name the settings on the frontier."""
    kept = frontier(found)
    diffusion = frontier([p for p in found if p["system"] != "AR"])
    return (
        f"The frontier of time at batch 16 and judged quality, from fast to slow: {'; '.join(map(title, kept))}. Without AR:"
        f" {'; '.join(map(title, diffusion))}. The rule: a setting is on it if none that is as fast is judged better; settings"
        f" with more than {LOW} nats less entropy than the fullest of their system are left out as degenerate."
    )


def findings(results: Results) -> list[list[str]]:
    """Return rows for Findings 2 and 3, and for decoding without loss."""
    found, rows = points(results), []
    if best := frontier([p for p in found if p["system"] != "AR"]):
        ours = [p for p in best if p["system"].startswith("Eso-LM")]
        held = "confirmed" if len(ours) == len(best) else "partly" if ours else "not confirmed"
        claim = "**2.** The best frontier of sampling time and quality, without AR"
        here = f"{len(ours)} of {len(best)} settings on the frontier of time and judge are Eso-LM's"
        rows.append([claim, "MAUVE and generative perplexity, OWT", here, held])
    chosen = equal(found)
    if {"esolm-one", "esolm-speculative"} <= chosen.keys():
        one, fast = chosen["esolm-one"], chosen["esolm-speculative"]
        error = math.hypot(one["stderr"], fast["stderr"])
        here = f"{one['alone'] / fast['alone']:.2f} times as fast, judge {fast['nats'] - one['nats']:+.2f} ± {error:.2f} nats"
        claim = "Not in the paper: any-order samples without loss in fewer passes (speculative against one token at a time, batch 1)"
        rows.append([claim, "–", here, "confirmed" if fast["alone"] < one["alone"] else "not confirmed"])
    return rows


def equal(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return AR, Eso-LM one at a time and speculative, and MDLM's and BD3-LM's fastest setting that is judged as good as the former.

    As good: within two standard errors of the difference, with at most LOW less entropy.
    """
    by_name = {p["name"]: p for p in found if p["alone"]}
    if (one := by_name.get("esolm-one")) is None:
        return {}
    chosen = {by: by_name[by] for by in ("ar", "esolm-one", "esolm-speculative") if by in by_name}
    for system in ("MDLM", "BD3-LM 4"):
        good = [
            p
            for p in by_name.values()
            if p["system"] == system
            and p["nats"] <= one["nats"] + 2 * math.hypot(p["stderr"], one["stderr"])
            and p["entropy"] >= one["entropy"] - LOW
        ]
        if good:
            best = min(good, key=lambda p: p["alone"])
            chosen[best["name"]] = best
    return chosen


def headline(found: list[dict[str, Any]]) -> str:
    """State the speeds at equal quality."""
    chosen = equal(found)
    one = chosen["esolm-one"]
    speeds = "; ".join(
        f"{title(p)} {per_second(p['alone'])} ({one['alone'] / p['alone']:.2f} times Eso-LM one at a time, judge {p['nats']:.2f})"
        for p in chosen.values()
    )
    absent = [system for system in ("MDLM", "BD3-LM 4") if all(p["system"] != system for p in chosen.values())]
    text = (
        f"**Tokens per second at batch 1.** {speeds}. For MDLM and BD3-LM it is the fastest setting that is judged no worse than Eso-LM"
        " one token at a time (two standard errors of the difference, the same rule for entropy)"
    )
    return text + (f"; no setting of {' or '.join(absent)} reaches that." if absent else ".")


def figures(results: Results) -> dict[str, Any]:
    """Plot quality against time, and tokens per second at equal quality."""
    from matplotlib import pyplot as plt

    found = points(results)
    made: dict[str, Any] = {}
    if timed := [p for p in found if p["seconds"]]:
        made["frontier"], axes = plt.subplots(figsize=(7, 4.2))
        styles = {
            "AR": ("#333333", "D"), "MDLM": ("#c1440e", "s"), "BD3-LM 4": ("#4a6fa5", "^"), "Eso-LM 1": ("#2a7f62", "o"),
            "Eso-LM 1, any-order loss": ("#59b394", "o"), "Eso-LM 0.25": ("#b08d2e", "v"), "Eso-LM 0.125": ("#8f6bb1", "v"),
        }  # fmt: skip
        for system, (colour, mark) in styles.items():
            if not (mine := [p for p in timed if p["system"] == system]):
                continue
            x, y = [1000 * p["seconds"] for p in mine], [p["nats"] for p in mine]
            axes.plot(x, y, mark, color=colour, alpha=0.35, ms=4)
            best = frontier(mine)
            axes.plot(
                [1000 * p["seconds"] for p in best],
                [p["nats"] for p in best],
                f"{mark}-",
                color=colour,
                label=system,
                ms=5,
            )
        axes.set(
            xscale="log", xlabel="milliseconds per sample, batch 16", ylabel="judge, nats per token (lower is better)"
        )
        axes.plot([], [], "o", color="#999999", alpha=0.35, ms=4, label="degenerate, or beaten by another setting")
        axes.legend(fontsize=8, frameon=False)
    if chosen := equal(found):
        made["tokens-per-second"], axes = plt.subplots(figsize=(7, 2.6))
        bars = list(chosen.values())[::-1]
        colours = ["#2a7f62" if p["system"].startswith("Eso") else "#999999" for p in bars]
        axes.barh([title(p) for p in bars], [LENGTH / p["alone"] for p in bars], color=colours)
        axes.set(xlabel="tokens per second, one sample at a time")
    return made
