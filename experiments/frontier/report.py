"""Quality against time on stories: samplers, approximate caches and the exact one; tokens per second."""

from __future__ import annotations

import math
from typing import Any

from experiments.frontier import plots
from experiments.runner.document import Results, number, table

LENGTH = 128
LOW = 0.3
"""Loss of entropy in nats, against the highest-entropy setting of the same system, above which we call samples degenerate."""
MDLM, ESO, ANY = "runs/tiny-mdlm-0", "runs/tiny-esolm-1-0", "runs/tiny-any-1-0"
SURE = "sampler=confidence num_steps=32 block_length=32"
LATE = "sampler=confidence num_steps=128 block_length=32"
NUCLEUS = " top_p=0.9"
"""The end of every timed point."""
SETTINGS = {
    "ar": ("AR", "", "runs/tiny-ar-0"),
    **{f"mdlm-{n}": ("MDLM", f"ancestral, T = {n}", f"{MDLM} num_steps={n}") for n in (8, 32, 128)},
    "mdlm-confidence-32": ("MDLM", "confidence, T = 32", f"{MDLM} {SURE}"),
    "mdlm-confidence-128": ("MDLM", "confidence, T = 128", f"{MDLM} {LATE}"),
    "mdlm-threshold": ("MDLM", "threshold 0.9", f"{MDLM} sampler=threshold tau=0.9 block_length=32"),
    "mdlm-threshold-0.5": ("MDLM", "threshold 0.5", f"{MDLM} sampler=threshold tau=0.5 block_length=32"),
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
    "esolm-threshold-0.5": ("Eso-LM 1", "threshold 0.5", f"{ESO} sampler=threshold tau=0.5 window=32"),
    "esolm-one": ("Eso-LM 1", "one at a time", f"{ESO} sampler=first_hitting"),
    "esolm-speculative": ("Eso-LM 1", "speculative", f"{ESO} sampler=speculative"),
    "any-32": ("Eso-LM 1, any-order loss", "ancestral, T = 32", f"{ANY} num_steps=32"),
    "any-speculative": ("Eso-LM 1, any-order loss", "speculative", f"{ANY} sampler=speculative"),
    "quarter-32": ("Eso-LM 0.25", "ancestral, T = 32", "runs/tiny-esolm-1-0 alpha_0=0.25 num_steps=32"),
    "eighth-32": ("Eso-LM 0.125", "ancestral, T = 32", "runs/tiny-esolm-1-0 alpha_0=0.125 num_steps=32"),
}
"""By the name of the samples: system, sampler, and the point of `esolm bench points`."""
METHOD = """{samples} samples of 128 tokens for each setting, with a nucleus of 0.9, from the models of seed 0 above. The *judge* is an independent
language model: nats per token that it gives to the samples, in its own tokens, ± the standard error; lower is better. It favours
bland text, so read it with the *entropy* of the tokens of a sample: † marks settings whose entropy is more than {low} nats below
the highest-entropy setting of the same system, which we call degenerate.{mauve}

*T* is the number of steps. *Passes* are calls of the network for one sample: ancestral sampling skips steps in which it draws
no token, so that T = 128 takes fewer than 128; confidence sampling draws at least one token in each step; threshold samplers draw every
token whose confidence exceeds the threshold. Tokens per second are medians (and quartiles) of one interleaved run over all
settings with the nucleus, in float32 on the inference path{engine}; the command is `esolm bench points`, the machine is in the result files."""
FRONTIER = "![Judge and milliseconds per sample at batch 16, one line per system, hollow marks where samples are degenerate](results/frontier.svg)"
SPEED = "![Tokens per second, one sample at a time, with the judge's nats](results/tokens-per-second.svg)"
Point = dict[str, Any]


def points(results: Results) -> list[Point]:
    """Return every judged setting with its passes and speeds."""
    timed = {
        batch: {p["point"]: p for p in (results[f"time-{batch}"]["points"] if f"time-{batch}" in results else [])}
        for batch in (1, 16)
    }
    found = []
    for name, (system, sampler, point) in SETTINGS.items():
        if (judged := results.get(f"judge-{name}")) is None:
            continue
        alone, batched = (timed[batch].get(point + NUCLEUS, {}) for batch in (1, 16))
        mauve = results.get(f"mauve-{name}") or {}
        found.append(
            {"name": name, "system": system, "sampler": sampler, "passes": alone.get("passes", batched.get("passes"))}
            | {"alone": alone.get("seconds_per_sample"), "alone_quartiles": alone.get("quartiles")}
            | {"seconds": batched.get("seconds_per_sample"), "quartiles": batched.get("quartiles")}
            | {"mauve": mauve.get("mauve"), "mauve_stderr": mauve.get("mauve_stderr") or 0.0, **judged}
        )
    highest = {p["system"]: max(q["entropy"] for q in found if q["system"] == p["system"]) for p in found}
    return [{**p, "degenerate": p["entropy"] < highest[p["system"]] - LOW} for p in found]


def per_second(seconds: float | None, quartiles: list[float] | None = None) -> str:
    """Format the tokens per second of samples that take so long."""
    median = number(None if seconds is None else LENGTH / seconds, None, 0)
    return median if quartiles is None else f"{median} ({LENGTH / quartiles[1]:.0f}–{LENGTH / quartiles[0]:.0f})"


def report(results: Results) -> str:
    """Return the table of settings, the frontier and the comparison of speed."""
    found = points(results)
    columns = ["system", "sampler", "passes, batch 1", "tokens/s, batch 1", "batch 16", "judge, nats", "entropy"]
    rows = [
        [p["system"], p["sampler"], number(p["passes"], None, 0), per_second(p["alone"], p["alone_quartiles"]),
         per_second(p["seconds"], p["quartiles"]), number(p["nats"], p["stderr"]),
         number(p["entropy"]) + (" †" if p["degenerate"] else "")]
        for p in found
    ]  # fmt: skip
    if compared := any(p["mauve"] is not None for p in found):
        columns.append("MAUVE")
        for row, p in zip(rows, found, strict=True):
            row.append(number(p["mauve"], p["mauve_stderr"] or None))
    about = METHOD.format(
        samples=found[0]["samples"] if found else "",
        low=LOW,
        engine=f" ({results['time-1']['engine']})" if "time-1" in results else "",
        mauve=" MAUVE compares with held-out stories; higher is better." if compared else "",
    )
    parts = [
        "## Second round: quality against time",
        about,
        table(columns, rows, text=2) if rows else "",
        unreached(found),
    ]
    if any(p["seconds"] for p in found):
        parts += [FRONTIER, verdict(found)]
    if equal(found):
        parts += [SPEED, headline(found)]
    return "\n\n".join(part for part in parts if part)


def unreached(found: list[Point]) -> str:
    """Name what is not measured."""
    judged = {p["name"] for p in found}
    missing = [
        f"samples of {system} ({sampler or 'left to right'})"
        for name, (system, sampler, _) in SETTINGS.items()
        if name not in judged
    ]
    untimed = [p for p in found if p["seconds"] is None or p["alone"] is None]
    if untimed:
        missing.append("times" if len(untimed) == len(found) else f"times of {', '.join(map(title, untimed))}")
    if all(p["mauve"] is None for p in found):
        missing.append("MAUVE")
    return f"Not measured yet: {'; '.join(missing)}." if missing else ""


def frontier(found: list[Point], judge: str = "nats") -> list[Point]:
    """Return the settings, without degenerate ones, that are better than every faster one by more than two standard errors.

    judge: nats, lower is better, or mauve, higher is better.
    """
    sign, error = (1, "stderr") if judge == "nats" else (-1, "mauve_stderr")
    sound = [p for p in found if p["seconds"] and p[judge] is not None and not p["degenerate"]]
    kept: list[Point] = []
    for p in sorted(sound, key=lambda p: (p["seconds"], sign * p[judge])):
        if not kept or sign * (kept[-1][judge] - p[judge]) > 2 * math.hypot(kept[-1][error], p[error]):
            kept.append(p)
    return kept


def title(p: Point) -> str:
    """Name a setting."""
    return f"{p['system']} ({p['sampler']})" if p["sampler"] else p["system"]


def without_ar(found: list[Point]) -> list[Point]:
    """The settings of the other systems."""
    return [p for p in found if p["system"] != "AR"]


def verdict(found: list[Point]) -> str:
    """Name the settings on the frontier."""
    lists = [
        f"The frontier of time at batch 16 and judge, from fast to slow: {'; '.join(map(title, frontier(found)))}."
    ]
    lists.append(f"Without AR: {'; '.join(map(title, frontier(without_ar(found))))}.")
    if closest := frontier(without_ar(found), "mauve"):
        lists.append(f"By MAUVE, without AR: {'; '.join(map(title, closest))}.")
    return " ".join(lists) + (
        " A setting is on the frontier if it is judged better than every setting of at most its time by more than two standard errors of"
        " the difference; degenerate settings (†) are left out."
    )


def findings(results: Results) -> list[list[str]]:
    """Return rows for Finding 2, and for decoding without loss."""
    found = points(results)
    return [row for row in (second(found), lossless(found)) if row]


def second(found: list[Point]) -> list[str]:
    """Return the row of Finding 2, which stays open until every system is timed and MAUVE is measured."""
    others = without_ar(found)
    fronts = {name: frontier(others, judge) for name, judge in {"judge": "nats", "MAUVE": "mauve"}.items()}
    if not others:
        return []
    ours = {name: [p for p in front if p["system"].startswith("Eso-LM")] for name, front in fronts.items()}
    here = [
        f"{len(ours[name])} of {len(front)} settings on the frontier of time and {name}"
        for name, front in fronts.items()
        if front
    ]
    systems, timed = ({p["system"] for p in others if p["seconds"] or every} for every in (True, False))
    lacking = [f"no times of {system}" for system in sorted(systems - timed)] if timed else ["no times"]
    lacking += [] if fronts["MAUVE"] else ["no MAUVE"]
    held = [len(ours[name]) == len(front) for name, front in fronts.items() if front]
    fate = "confirmed" if all(held) else "partly" if any(ours.values()) else "not confirmed"
    claim = "**2.** The best frontier of sampling time and quality, without AR: settings of Eso-LM"
    cells = [claim, "all, by MAUVE and generative perplexity, OWT", "; ".join(here) or "–"]
    return [*cells, f"open ({', '.join(lacking)})" if lacking else fate]


def lossless(found: list[Point]) -> list[str]:
    """Return the row of speculative sampling against one token at a time."""
    by_name = {p["name"]: p for p in found if p["alone"]}
    if not {"esolm-one", "esolm-speculative"} <= by_name.keys():
        return []
    one, fast = by_name["esolm-one"], by_name["esolm-speculative"]
    error = math.hypot(one["stderr"], fast["stderr"])
    here = (
        f"{one['alone'] / fast['alone']:.2f} times as fast, judge {fast['nats'] - one['nats']:+.2f} ± {error:.2f} nats"
    )
    claim = "Not in the paper: any-order samples without loss in fewer passes (speculative against one token at a time, batch 1)"
    faster = fast["alone_quartiles"][1] < one["alone_quartiles"][0]
    return [claim, "–", here, "confirmed" if faster else "not confirmed"]


def conclusions(results: Results) -> list[str]:
    """Return what we conclude about quality and time."""
    found = points(results)
    by_name = {p["name"]: p for p in found}
    made = []
    sound = [p for p in without_ar(found) if not p["degenerate"]]
    if sound and "ar" in by_name:
        ar, best = by_name["ar"], min(sound, key=lambda p: p["nats"])
        gap, error = best["nats"] - ar["nats"], math.hypot(best["stderr"], ar["stderr"])
        if gap > 2 * error:
            made.append(
                f"The judge prefers AR to every setting that is not degenerate, by {gap:.2f} ± {error:.2f} nats to the next, {title(best)}."
            )
    if surest := surer(found):
        made.append(surest)
    if lossless(found):
        one, fast, ar = (by_name.get(name) for name in ("esolm-one", "esolm-speculative", "ar"))
        against = f", and {ar['alone'] / fast['alone']:.2f} times as fast as AR" if ar and fast and ar["alone"] else ""
        if one and fast:
            made.append(
                f"Sampling Eso-LM without loss in parallel (speculative) is {one['alone'] / fast['alone']:.2f} times as fast as one token at a "
                f"time{against}, one sample at a time."
            )
    return made


def surer(found: list[Point]) -> str:
    """Compare choosing the surest tokens first with drawing all 128 tokens in random order, by system."""
    parts = []
    for system, key in {"MDLM": "mdlm", "Eso-LM": "esolm"}.items():
        by_name = {p["name"]: p for p in found}
        if {f"{key}-128", f"{key}-confidence-128"} <= by_name.keys():
            plain, sure = by_name[f"{key}-128"], by_name[f"{key}-confidence-128"]
            error = math.hypot(plain["stderr"], sure["stderr"])
            change = f"{sure['nats'] - plain['nats']:+.2f} ± {error:.2f} nats to the judge, {sure['entropy'] - plain['entropy']:+.2f} entropy"
            parts.append(f"{system} {change}{', degenerate by our rule' if sure['degenerate'] else ''}")
    return (
        f"Choosing the surest tokens first instead of at random trades diversity for the judge: {'; '.join(parts)}."
        if parts
        else ""
    )


def equal(found: list[Point]) -> dict[str, Point]:
    """Return AR, Eso-LM one at a time and speculative, and MDLM's and BD3-LM's fastest setting that is judged as good as the former.

    As good: within two standard errors of the difference, and not degenerate.
    """
    by_name = {p["name"]: p for p in found if p["alone"]}
    if (one := by_name.get("esolm-one")) is None:
        return {}
    chosen = {by: by_name[by] for by in ("ar", "esolm-one", "esolm-speculative") if by in by_name}
    for system in ("MDLM", "BD3-LM 4"):
        good = [p for p in by_name.values() if p["system"] == system and not p["degenerate"] and as_good(p, one)]
        if good:
            best = min(good, key=lambda p: p["alone"])
            chosen[best["name"]] = best
    return chosen


def as_good(p: Point, one: Point) -> bool:
    """Whether the judge finds p no worse, within two standard errors of the difference."""
    return p["nats"] <= one["nats"] + 2 * math.hypot(p["stderr"], one["stderr"])


def headline(found: list[Point]) -> str:
    """State the speeds of settings that are no worse than Eso-LM one token at a time."""
    chosen = equal(found)
    one = chosen["esolm-one"]
    speeds = "; ".join(
        f"{title(p)} {per_second(p['alone'])} ({one['alone'] / p['alone']:.2f} times Eso-LM one at a time, judge {p['nats']:.2f})"
        for p in chosen.values()
    )
    text = (
        f"**Tokens per second at batch 1.** {speeds}. For MDLM and BD3-LM it is the fastest setting that is judged no worse than Eso-LM one"
        " token at a time, within two standard errors of the difference, and is not degenerate."
    )
    for system in ("MDLM", "BD3-LM 4"):
        if any(p["system"] == system for p in found) and all(p["system"] != system for p in chosen.values()):
            better = any(p["system"] == system and p["degenerate"] and as_good(p, one) for p in found)
            text += f" No setting of {system} is" + (
                ": those that are judged as good are degenerate." if better else "."
            )
    return text


def figures(results: Results) -> dict[str, Any]:
    """Plot quality against time, and tokens per second."""
    found = points(results)
    made: dict[str, Any] = {}
    if timed := [p for p in found if p["seconds"]]:
        made["frontier"] = plots.against_time(timed, frontier)
    if chosen := equal(found):
        made["tokens-per-second"] = plots.speeds(list(chosen.values()), title, LENGTH)
    return made
