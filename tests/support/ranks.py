"""Training commands for several ranks, and the comparison of their runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import tiny, toy

STEPS, TOLERANCE = 6, 2e-5
NAMED = {
    "esolm": ("esolm", "--system.loss=two_term", "--system.alpha_0=0.25"),
    "esolm (A)": ("esolm", "--system.loss=two_term", "--system.alpha_0=0.5", "--system.variant=A"),
    "any_order": ("esolm", "--system.loss=any_order", "--system.alpha_0=0.25"),
    "mdlm": ("mdlm",),
    "bd3lm": ("bd3lm", "--system.block_size=4", "--system.clip_widths=[0.5,0.7]"),
    "ar": ("ar",),
}
SYSTEMS = NAMED | {
    name: (name, *toy.flags(options)) for name, options in toy.one_of_each().items() if name not in NAMED
}
"""Systems and their options: those above, and every other system of the package."""


def command(data: Path, run: Path, system: str, *more: str) -> list[str]:
    name, *options = SYSTEMS[system]
    short = (f"--steps={STEPS}", "--batch.micro=2", "--validation.every=3", "--saving.every=0", "--net.init=gpt2")
    return tiny.command(data, run, f"--system.name={name}", *options, *short, *more)


def assert_close(run: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    """Every logged number and every weight of the last checkpoint agrees."""
    (tensors, records), (others, expected) = tiny.outcome(run), tiny.outcome(other)
    assert len(records) == len(expected)
    for record, wanted in zip(records, expected, strict=True):
        assert flat(record) == pytest.approx(flat(wanted), rel=tolerance, abs=1e-6)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=50 * tolerance, msg=name)


def flat(record: dict) -> dict[str, float]:
    found = {k: v for k, v in record.items() if not isinstance(v, dict)}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= {f"{key}.{k}": v for k, v in flat(value).items()}
    return found
