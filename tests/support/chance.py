"""Chi-square tests of drawn tokens and schedules against their distributions.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.order import Schedule
from support.naive import Naive, Plan, Tokens, plan_of

ALARM = 1e-6
"""The chance that a right sampler is called wrong, per test. Seeds are fixed, so a test that passes keeps passing."""


def chance(found: Iterable[Any] | Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """The p-value of Pearson's chi-square, of draws or of their counts; cells that expect fewer than 5 are pooled."""
    counts = Counter(found)
    draws = sum(counts.values())
    assert sum(expected.values()) == pytest.approx(1, abs=1e-9)
    if set(counts) - {x for x, p in expected.items() if p > 0}:
        return 0.0
    cells, rest = [], [0.0, 0.0]
    for x, p in expected.items():
        if p * draws >= 5:
            cells.append((counts[x], p * draws))
        else:
            rest = [rest[0] + counts[x], rest[1] + p * draws]
    if rest[1] > 0:
        cells.append((rest[0], rest[1]))
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    assert degrees > 0
    return torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def code(columns: Tensor) -> Tensor:
    """Rows of small numbers as one number each: [B, n] -> [B]."""
    return (columns << (3 * torch.arange(columns.shape[1]))).sum(1)


def rows(tokens: Tensor) -> Counter[Tokens]:
    """How often each sequence was drawn."""
    unique, counts = code(tokens).unique(return_counts=True)
    every = (unique[:, None] >> (3 * torch.arange(tokens.shape[1]))) & 7
    return Counter(dict(zip(map(tuple, every.tolist()), counts.tolist())))


def numbered(schedule: Schedule) -> tuple[list[Plan], Tensor]:
    """The different plans, and which of them each row has, int [B]."""
    columns = [schedule.sigma, schedule.sizes, schedule.given[:, None], schedule.diffusion[:, None]]
    unique, number = code(torch.cat(columns, 1)).unique(return_inverse=True)
    first = torch.full((len(unique),), len(number)).scatter_reduce(0, number, torch.arange(len(number)), "amin")
    return [plan_of(schedule, row) for row in first.tolist()], number


def given_the_plans(tokens: Tensor, schedule: Schedule, naive: Naive, known: dict[int, int]) -> float:
    """The p-value of the tokens given the schedule of each row: chi-squares of all plans added up."""
    statistic, degrees = 0.0, 0
    found, number = numbered(schedule)
    for n, plan in enumerate(found):
        counts = rows(tokens[number == n])
        total, pooled, cells = sum(counts.values()), [0.0, 0.0], []
        expected = naive.joint(plan, known)
        assert set(counts) <= set(expected)
        for x, p in expected.items():
            if p * total >= 5:
                cells.append((counts[x], p * total))
            else:
                pooled = [pooled[0] + counts[x], pooled[1] + p * total]
        if pooled[1] >= 5:
            cells.append((pooled[0], pooled[1]))
        if len(cells) > 1:
            statistic += sum((seen - e) ** 2 / e for seen, e in cells)
            degrees += len(cells) - 1
    assert degrees > 10
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()
