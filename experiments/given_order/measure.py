"""Likelihood by the order among given tokens: python measure.py DATA RUN ... > result.json"""

from __future__ import annotations

import json
import math
import sys

import torch

import esolm
from esolm.likelihood.texts import read

SEQUENCES, ORDERS = 128, 4


def main(data: str, runs: list[str]) -> list[dict]:
    """Return nats per target token under single orders, given the first half or a random half, with paired errors."""
    found = []
    for run in runs:
        lm = esolm.load(run)
        x = read(data, lm.tokenizer, lm.net.config.length, num_sequences=SEQUENCES).batch.x
        length = x.shape[1]
        generator = torch.Generator().manual_seed(0)
        anywhere = [torch.randperm(length, generator=generator)[: length // 2].tolist() for _ in x]
        contexts = {"the first half": [list(range(length // 2))] * len(x), "a random half": anywhere}
        for context, given in contexts.items():
            nats = {
                order: -lm.log_prob(x.tolist(), given=given, num_orders=ORDERS, given_order=order).log_weights.mean(1)
                / (length - length // 2)
                for order in ("random", "ascending")
            }
            change = nats["random"] - nats["ascending"]
            found.append(
                {
                    "run": run.rstrip("/").rpartition("/")[2],
                    "context": context,
                    **{order: round(values.mean().item(), 4) for order, values in nats.items()},
                    "random_minus_ascending": round(change.mean().item(), 4),
                    "stderr": round(change.std().item() / math.sqrt(len(x)), 4),
                }
            )
            print(found[-1], file=sys.stderr)
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:]), indent=1))
