"""One-sentence summaries of abstracts: likelihood given the abstract, and ROUGE of samples by number of steps.

    python experiments/scitldr/run.py text SCITLDR/train.jsonl text.jsonl --abstracts ARXIV.jsonl
    python experiments/scitldr/run.py lines SCITLDR/train.jsonl train.jsonl             # prompts and targets
    python experiments/scitldr/run.py score runs/esolm SCITLDR/dev.jsonl --out esolm.json

`score` compares the bound of each true summary given its own abstract and given another one, and ROUGE of samples at
several numbers of steps with that of another summary and of the first sentence of the abstract.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import esolm
from esolm.core.batch import Batch
from esolm.likelihood import scoring as evaluate
from esolm.likelihood.orders import padded
from esolm.likelihood.texts import Sequences
from esolm.metrics import overlap
from esolm.model import LanguageModel
from esolm.sampling.events import until

SEPARATOR = " TLDR:"


def read(path: str) -> list[dict[str, Any]]:
    """Read abstracts, their summaries and their first sentences."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    docs = [json.loads(line) for line in lines if line.strip()]
    return [{"prompt": " ".join(d["source"]), "targets": d["target"], "lead": d["source"][0]} for d in docs]


def lines(path: str, out: str) -> None:
    """Write the input of `esolm prepare --packing conditional`, with the first summary as the target."""
    docs = read(path)
    rows = (json.dumps({"prompt": d["prompt"], "target": d["targets"][0]}, ensure_ascii=False) + "\n" for d in docs)
    Path(out).write_text("".join(rows), encoding="utf-8")


def text(path: str, abstracts: str | None, out: str) -> None:
    """Write plain text of the same kind: other abstracts, and the documents with their summaries."""
    more = Path(abstracts).read_text(encoding="utf-8").splitlines() if abstracts else []
    texts = [json.loads(line)["abstract"].strip() for line in more if line.strip()]
    texts += [f"{d['prompt']}{SEPARATOR} {d['targets'][0]}" for d in read(path)]
    Path(out).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")


def prompts(lm: LanguageModel, docs: list[dict[str, Any]], room: int) -> list[list[int]]:
    """Return the ends of the prompts, truncated as by the packing."""
    kept = lm.net.config.length - room
    return [lm.tokenizer.encode(doc["prompt"] + SEPARATOR)[-kept:] for doc in docs]


def bounds(lm: LanguageModel, given: list[list[int]], docs: list[dict[str, Any]], draws: int) -> torch.Tensor:
    """Return nats per token of each true summary and its EOS given a prompt, float64 [n]."""
    eos = lm.tokenizer.eos_id
    assert eos is not None
    rows = [[*p, *lm.tokenizer.encode(d["targets"][0]), eos] for p, d in zip(given, docs, strict=True)]
    x, valid = padded(rows)
    head = torch.arange(x.shape[1]) < torch.tensor([len(p) for p in given])[:, None]
    found = evaluate.nelbo(lm, Sequences("scitldr", Batch(x, valid, head), 0), num_draws=draws)
    return found.nats / found.tokens


def score(
    run: str, path: str, room: int, number: int, draws: int, steps: list[int], top_p: float = 0.5
) -> dict[str, Any]:
    """Return all numbers of one model."""
    lm, docs = esolm.load(run), read(path)
    docs = [d for d in docs if len(lm.tokenizer.encode(d["targets"][0])) < room][:number]
    given = prompts(lm, docs, room)
    true, other = bounds(lm, given, docs, draws), bounds(lm, given[1:] + given[:1], docs, draws)
    gain = other - true
    about: dict[str, Any] = {
        "run": Path(run).name,
        "summaries": len(docs),
        "top_p": top_p,
        "nats": {"own abstract": true.mean().item(), "another abstract": other.mean().item()},
        "gain": {"mean": gain.mean().item(), "stderr": (gain.std() / len(gain) ** 0.5).item()},
        "preferred": (gain > 0).double().mean().item(),
    }
    references = [d["targets"] for d in docs]
    shuffled = docs[1:] + docs[:1]
    about["rouge"] = {
        "another summary": overlap.best_rouge([d["targets"][0] for d in shuffled], references),
        "first sentence": overlap.best_rouge([d["lead"] for d in docs], references),
    }
    rows = [[*p, *[None] * room] for p in given]
    for count in steps:
        made = lm.sample(tokens=rows, num_steps=count, top_p=top_p, seed=0, batch_size=32)
        texts = [until(t[len(p) :], lm.tokenizer.eos_id) for t, p in zip(made.tokens, given, strict=True)]
        found = overlap.best_rouge([lm.tokenizer.decode(ids) for ids in texts], references)
        about["rouge"][f"T = {count}"] = {**found, "seconds": made.seconds, "passes": made.passes}
    about["examples"] = [lm.tokenizer.decode(ids) for ids in texts[:3]]
    return about


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("lines")
    make.add_argument("path")
    make.add_argument("out")
    plain = commands.add_parser("text")
    plain.add_argument("path")
    plain.add_argument("out")
    plain.add_argument("--abstracts", help="JSON lines with more abstracts")
    judge = commands.add_parser("score")
    judge.add_argument("run")
    judge.add_argument("path")
    judge.add_argument("--out")
    judge.add_argument("--room", type=int, default=56, help="tokens per summary, the target_length of the data")
    judge.add_argument("--number", type=int, default=200, help="number of summaries to score")
    judge.add_argument("--draws", type=int, default=8, help="draws of the bound per summary")
    judge.add_argument("--steps", type=int, nargs="+", default=[4, 16, 56])
    judge.add_argument("--top_p", type=float, default=0.5, help="top-p of the samples")
    options = parser.parse_args()
    if options.command == "lines":
        lines(options.path, options.out)
        return
    if options.command == "text":
        text(options.path, options.abstracts, options.out)
        return
    found = score(options.run, options.path, options.room, options.number, options.draws, options.steps, options.top_p)
    printed = json.dumps(found, indent=1, ensure_ascii=False)
    print(printed)
    if options.out:
        Path(options.out).write_text(printed + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
