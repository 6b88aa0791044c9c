"""Bounds of the models trained on books, on other texts."""

from __future__ import annotations

import itertools

from experiments.runner.document import Results, number, table

CORPORA = {"wikitext": "WikiText-2", "lambada": "LAMBADA", "arxiv": "arXiv abstracts"}
RUNS = {
    "ar": "AR", "ar-adaln": "AR with AdaLN", "mdlm": "MDLM", "bd3lm-16": "BD3-LM, L' = 16", "bd3lm-8": "BD3-LM, L' = 8",
    "bd3lm-4": "BD3-LM, L' = 4", "esolm-1": "Eso-LM, alpha_0 = 1", "esolm-0.5": "Eso-LM, 0.5",
    "esolm-0.25": "Eso-LM, 0.25", "esolm-0.125": "Eso-LM, 0.125", "esolm-0": "Eso-LM, 0",
}  # fmt: skip


def report(results: Results) -> str:
    """Return a table with one row per system and one column per corpus."""
    rows = []
    for run, name in RUNS.items():
        found = [results.get(f"{corpus}-{run}") for corpus in CORPORA]
        if any(found):
            rows.append([name, *("–" if f is None else number(f[0]["nats"], f[0]["stderr"]) for f in found)])
    method = """The bound in nats per token. The tokenizer was trained on the books and splits other texts into more tokens, so compare
within a column only. None of these texts was used in training."""
    return "\n\n".join(
        ["## Zero-shot likelihood", method, table(("system", *CORPORA.values()), rows), verdict(results)]
    )


def verdict(results: Results) -> str:
    """Summarise whether the bound falls with alpha_0 on each corpus."""
    lines = []
    for corpus, name in CORPORA.items():
        runs = [f"{corpus}-esolm-{a}" for a in ("1", "0.5", "0.25", "0.125", "0")]
        if all(run in results for run in runs):
            nats = [results[run][0]["nats"] for run in runs]
            falls = all(a > b for a, b in itertools.pairwise(nats))
            lines.append(f"on {name} it {'falls' if falls else 'does not fall'} at every step")
    return f"Eso-LM's bound, from alpha_0 = 1 to 0: {'; '.join(lines)}." if lines else ""
