"""Number of orders that an estimator saves, from the log-weights that `esolm score --work FILE` writes.

    python experiments/estimators/measure.py TOKENS plain.work antithetic.work > result.json

Values are averaged over disjoint groups of the orders in the file, which reduces their variance. TOKENS is the number
of scored tokens per sequence.
"""

from __future__ import annotations

import itertools
import json
import math
import sys

from safetensors.torch import load_file

from esolm.likelihood import estimators

GRID = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 100, 128, 160, 200, 250, 320, 400, 500, 640, 800, 1000)
SIZES = (4, 16, 64)


def worth(value: float, curve: dict[int, float]) -> float | None:
    """Return the number of orders at which the plain bound has this value, interpolated in log K; None if outside."""
    pairs = list(curve.items())
    for (k, high), (m, low) in itertools.pairwise(pairs):
        if low <= value <= high:
            return math.exp(math.log(k) + (high - value) / (high - low) * math.log(m / k))
    return None


def main(tokens: int, plain: str, antithetic: str) -> None:
    """Print the value of each estimator and the equivalent number of orders of the plain bound."""
    one, two = (load_file(path)["0"] for path in (plain, antithetic))
    if one.isnan().any() or two.isnan().any():
        raise SystemExit("some log-weights are missing: give files of finished runs")
    plain_values, paired = estimators.curve(one, list(GRID)), estimators.curve(two, list(SIZES), 2)
    curve = {k: float(values["bound"].mean() / tokens) for k, values in plain_values.items()}
    rows = []
    for k in SIZES:
        found = {
            "jackknife": plain_values[k]["jackknife"],
            "antithetic": paired[k]["bound"],
            "antithetic jackknife": paired[k]["jackknife"],
        }
        for name, values in found.items():
            value = float(values.mean() / tokens)
            rows.append({"estimator": name, "orders": k, "nats": round(value, 4), "worth": worth(value, curve)})
    print(json.dumps({"bound": {k: round(v, 4) for k, v in curve.items()}, "estimators": rows}, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
