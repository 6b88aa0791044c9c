"""The bundled model: likelihood, judged samples, speculative passes, infills, and its card."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.runner import spec
from experiments.runner.document import Results, number, table

MODES = {
    "real": "real stories (validation)",
    "original": "stories15M, left to right",
    "left_to_right": "left to right",
    "hybrid": "a quarter in random order, then left to right (`--alpha_0 0.25`)",
    "confidence": "surest token of the next 16 first (`--sampler confidence --window 16`)",
    "diffusion": "random order, one token at a time (`--alpha_0 1`)",
    "narrow": "random order from a smaller nucleus (`--alpha_0 1 --top_p 0.5`)",
    "parallel": "random order, 64 steps (`--alpha_0 1 --num_steps 64`)",
}
FIRST_WORDS = 12
EPOCH = 16_774 * 256  # tokens of the training stories
SHOWN = {
    "confidence": "Surest token of the next 16 first (`--sampler confidence --window 16`)",
    "diffusion": "Random order (`--alpha_0 1`)",
    "narrow": "Random order from a smaller nucleus (`--alpha_0 1 --top_p 0.5`)",
    "hybrid": "A quarter in random order, then left to right (`--alpha_0 0.25`)",
    "left_to_right": "Left to right (`--sampler left_to_right`)",
}


def report(results: Results) -> str:
    """Return likelihood, judged samples, passes and infills."""
    parts = ["## The bundled model", METHOD.format(**trained(results)), *likelihood(results), *judged(results)]
    parts += speculative(results)
    parts += [*third(results), *infills(results)]
    parts.append("[All unselected samples](results/stories.md): sixteen of each mode.")
    return "\n\n".join(parts)


def trained(results: Results) -> dict[str, str]:
    """Return what the documents say of the two runs: tokens, steps, and the bound after some of the steps."""
    runs = [found for name in ("about-1", "about") if (found := results.get(name)) is not None]
    if not runs:
        return {"tokens": "some", "steps": "some", "curve": "not measured yet", "epochs": "some"}
    shown, before = [], 0
    for run in runs:
        curve = {int(step): value for step, value in run["validations"].items()}
        some = [step for step in curve if step in (100, 200) or step % 500 == 0 or step == max(curve)]
        shown += [f"{curve[step]:.2f} ({before + step:,})" for step in some if step]
        before += run["step"]
    tokens = sum(run["tokens"] for run in runs)
    return {
        "tokens": f"{tokens / 1e6:.1f} million",
        "steps": " and ".join(f"{run['step']:,}" for run in runs),
        "curve": ", ".join(shown),
        "epochs": f"{tokens / EPOCH:.1f}",
    }


def likelihood(results: Results) -> list[str]:
    """Return the table of nats at each alpha_0: per token of a sequence, and per token of the text."""
    rows, text = [], results.get("text-0")
    if (found := results.get("original")) is not None:
        known = results.get("text-original")
        own = "" if known is None else number(known[0]["nats"], known[0]["stderr"], 3)
        rows.append(["stories15M before adaptation", *_nats(found[0]), own])
    for alpha in ("0", "0.25", "1"):
        if (found := results.get(f"exact-{alpha}")) is not None:
            # A sequence is its text, the first EOS, and what fills it up, which costs as much as it tells of the length.
            times = None if text is None else found[0]["tokens"] / text[0]["tokens"]
            own = "" if times is None else number(found[0]["nats"] * times, found[0]["stderr"] * times, 3)
            rows.append([f"alpha_0 = {alpha}", *_nats(found[0]), own])
    if not rows:
        return []
    columns = ("orders", "estimator", "nats per token", "per token of the text")
    return [
        "Nats on held-out real stories. The end-of-text tokens that fill up a sequence count as tokens in the third column, and "
        "stories15M was never trained on a second one; the last column divides all nats of a sequence by the tokens of its text and "
        "the first end of text, for stories15M without what follows:",
        table(columns, rows, text=2),
        *forgotten(results),
    ]


def forgotten(results: Results) -> list[str]:
    """Say what of the left-to-right skill the adaptation lost, and what of it on stories it was trained on."""
    names = ("text-original", "text-0", "text-original-seen", "text-0-seen")
    if any(name not in results for name in names):
        return []
    before, after, before_seen, after_seen = (results[name][0]["nats"] for name in names)
    return [
        f"From left to right the adaptation lost {after - before:.2f} nats per token of the text on held-out stories, and "
        f"{after_seen - before_seen:.2f} on real stories that it was trained on: it has learned these by heart, but for stories15M both "
        "kinds are training text."
    ]


def third(results: Results) -> list[str]:
    """Return what a third run, on fresh stories, changes: likelihoods and the judge before and after."""
    run = results.get("about-3")
    rows = []
    for name, title in LIKELIHOODS.items():
        before, after = results.get(name), results.get(name.replace("-", "-3-", 1))
        if before is not None and after is not None:
            change = after[0]["nats"] - before[0]["nats"]
            rows.append(
                [title, number(before[0]["nats"], None, 3), number(after[0]["nats"], None, 3), f"{change:+.3f}"]
            )
    for mode, title in MODES.items():
        before, after = results.get(f"judge-{mode}"), results.get(f"judge-3-{mode}")
        if before is not None and after is not None:
            change, error = after["nats"] - before["nats"], (after["stderr"] ** 2 + before["stderr"] ** 2) ** 0.5
            shown = (number(each["nats"], each["stderr"]) for each in (before, after))
            rows.append([f"judge, {title}", *shown, f"{change:+.2f} ± {error:.2f}"])
    if run is None or not rows:
        return []
    return [
        THIRD.format(tokens=run["tokens"] / 1e6, steps=run["step"]),
        table(("nats per token", "bundled", "after the third run", "change"), rows),
    ]


def _nats(found: dict[str, Any]) -> list[str]:
    kind = found["kind"] if found["num_orders"] is None else f"{found['estimator']}, {found['num_orders']} orders"
    return [kind, number(found["nats"], found["stderr"], 3)]


def judged(results: Results) -> list[str]:
    """Return judge nats, entropy and known words of samples, real stories and the original model."""
    rows = []
    for mode, title in MODES.items():
        judge, words = results.get(f"judge-{mode}"), results.get(f"words-{mode}")
        if judge is not None and words is not None:
            share = number(100 * words["known"], 100 * words["known_stderr"], 1)
            doubled = number(100 * words["doubled"], 100 * words["doubled_stderr"], 1) if "doubled" in words else ""
            rows.append([title, number(judge["nats"], judge["stderr"]), number(judge["entropy"]), share, doubled])
    if not rows:
        return []
    return [
        "Samples with top-p 0.9 unless it says otherwise, judged by SmolLM2-135M-Instruct (lower nats are likelier text; "
        "entropy of the tokens of one sample shows repetition), the share of words that occur in 3,796 real stories, and "
        "of words that repeat the word before them, which the judge hardly notices:",
        table(("texts", "judge, nats", "entropy", "known words, %", "doubled, %"), rows),
        *alike(results),
    ]


def alike(results: Results) -> list[str]:
    """Return how many of the shown texts begin alike, which neither the judge nor the entropy of one text sees."""
    found = []
    for mode, title in SHOWN.items():
        if (made := results.get(f"texts-{mode}")) is not None:
            begins = Counter(" ".join(text.split()[:FIRST_WORDS]) for text in made["texts"])
            found.append(f"{title[0].lower() + title[1:]} {begins.most_common(1)[0][1]} of {len(made['texts'])}")
    if not found:
        return []
    return [
        f"Neither sees whether samples are alike. Texts that begin with the same {FIRST_WORDS} words: {'; '.join(found)}."
    ]


def speculative(results: Results) -> list[str]:
    """Return the passes per token of speculative sampling."""
    if (found := results.get("speculative")) is None:
        return []
    rows = [
        [
            f"{case['alpha_0']:g}",
            name,
            number(window["passes"], window["passes_error"], 1),
            number(window["passes"] / case["length"]),
        ]
        for case in found["cases"]
        for name, window in case["windows"].items()
        if name in ("one token", "adaptive")
    ]
    return [
        "Speculative sampling draws from the same distribution as one token at a time, in fewer passes, for sequences of 256 tokens "
        "with what fills them up:",
        table(("alpha_0", "window", "passes", "passes per token"), rows, text=2),
    ]


def infills(results: Results) -> list[str]:
    """Return the texts with blanks and what was written into them."""
    parts = []
    for name in sorted(name for name in results if name.startswith("infill-")):
        made = results[name]
        parts.append(f"`{made['request']['text']}`, filled in three times (seed 0):")
        parts += map(quote, made["texts"])
    return parts


def pages(results: Results) -> dict[str, str]:
    """Return the page of samples."""
    parts = ["# Samples of the bundled model", PAGE]
    for mode, title in SHOWN.items():
        if (made := results.get(f"texts-{mode}")) is not None:
            parts += [f"## {title}", *map(quote, made["texts"])]
    return {"stories": "\n\n".join(parts)} if len(parts) > 2 else {}


def card(results: Results) -> str:
    """Return what the model card has beyond the table of `esolm export`."""
    parts = [CARD.format(**trained(results)).strip(), "## Likelihood", *likelihood(results), "## Samples"]
    for kind, title in SEEDS.items():
        found = [quote(results[name]["texts"][0]) for name in sorted(results) if name.startswith(f"{kind}-")]
        parts += [title, *found] if found else []
    return "\n" + "\n\n".join(parts) + "\n"


def quote(text: str) -> str:
    """Format a text as one paragraph of quoted Markdown."""
    return "> " + " ".join(text.split()).replace("*", "\\*").replace("_", "\\_")


METHOD = """`esolm sample stories`, `esolm infill stories "…"` and `esolm.load("stories")` use the model that the package
contains: stories15M, a left-to-right model of children's stories, with its vocabulary cut to 5,297 pieces and adapted to
any order with shifted queries on {tokens} tokens (`experiments/stories/experiment.yaml` has every command). It is stored in
bfloat16. The any-order bound on held-out stories, in nats per token after so many steps of 4,096 tokens: {curve}. There were two
runs, of {steps} steps; in each, the learning rate is constant and falls to zero at the end."""

LIKELIHOODS = {
    "exact-0": "alpha_0 = 0",
    "exact-0.25": "alpha_0 = 0.25",
    "exact-1": "alpha_0 = 1",
    "text-0": "left to right, of the text, held out",
    "text-0-seen": "left to right, of the text, real stories of the training",
}
"""Results of the bundled model that the third run repeats."""

THIRD = """**Does it lack fresh text?** In random order its stories are not coherent. To see whether more text would help, stories15M
wrote 14,336 other stories (`esolm sample`, top-p 0.95), and a third run of {steps:,} steps ({tokens:.1f} million tokens) trained the
bundled model on these and the real ones. Likelihoods on the same held-out stories as above, in the same orders, so that changes are
more certain than values; ± of the judge is the standard error over 64 samples. Random order gains a little, left to right nothing,
and the judge sees no difference in random order, so fresh text is not what it lacks most. What remains to be tried is a larger network,
or far longer training. The bundled model was not replaced."""

PAGE = """Read what the bundled model writes; nothing is selected or edited. The first 16 samples of seed 0 in each mode, with
`--top_p 0.9` unless the title says otherwise. Generated from `experiments/stories/results`, which has the commands."""

SEEDS = {
    "sure": "One sample of each of the seeds 0 to 4, not selected. The surest token of the next 16 first "
    "(`esolm sample stories --sampler confidence --window 16 --top_p 0.9 --seed N --precision float32`):",
    "seed": "In random order (`esolm sample stories --top_p 0.9 --seed N --precision float32`):",
}
"""What stands above the samples in the card, by the beginning of the names of their results."""

CARD = """## Intended use

Trying `esolm` within seconds of installing it: `esolm sample stories --show`, `esolm infill stories "Tom ____ the dog."`. The
model writes short stories in the words of a small child, in any order, and fills in blanks given both sides. From left to
right its stories are mostly sound. When the surest of the next 16 tokens is drawn first (`--sampler confidence --window 16`), the plot
mostly holds, and words are doubled or dropped now and then. In random order sentences break and the plot is lost; a smaller
nucleus (`--top_p 0.5`) makes the sentences simpler and sounder. It knows nothing else. Do not use it for anything else.

## Training

It began as [stories15M](https://github.com/karpathy/llama2.c) of llama2.c (MIT licence), whose vocabulary was cut to the pieces
that occur at least five times in the training stories, and was adapted to any order by `esolm adapt`: shifted queries, the
any-order loss, a quarter of the examples from left to right, a quarter at alpha_0 = 0.25 and half at 1. It saw {tokens}
tokens, {epochs} epochs, in two runs of {steps} steps on one CPU core. The text
is 3,796 stories of [TinyStories](https://arxiv.org/abs/2305.07759) (CDLA-Sharing-1.0) and 15,247 stories that stories15M wrote;
those longer than 256 tokens were left out. 400 other real stories are held out; stories15M has probably seen them, the
adaptation has not. The weights are under the MIT licence of stories15M; the file LICENSE beside this card has its text.

## Reproduction

Run `make model` in a clone of the repository, with `ESOLM_CORPORA`, `ESOLM_MODELS` and `ESOLM_JUDGE` set as described in
`docs/results.md`, which also has judged samples and infills."""


if __name__ == "__main__":  # what `make model` appends to the card of the export
    sys.stdout.write(card(Results(spec.read(Path(__file__).parents[1]), "stories")))
