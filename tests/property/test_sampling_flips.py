"""How often rounding changes a sample: a row alone against the same row in a batch, in float32 and bfloat16, and the
native engine against PyTorch.

The uniform number of a draw is the same, and the logits are not quite: a matrix product of another shape adds in
another order. A token flips if the number lies between the two places of a boundary between tokens. So the chance of a
flip is known from the logits of the two runs, without waiting for one: the part of the unit interval on which the two
inverse cumulative distributions differ.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.randomness import Randomness
from esolm.sampling.request import Request
from support import engines, toy
from support.naive import Recording, run

ROWS = LENGTH = 64
V = 258
MASK = V - 1


def flip_chance(one: Tensor, two: Tensor) -> Tensor:
    """The chance, over u, that two logits [R, V] draw different tokens: 1 - the overlap of their stretches, [R]."""
    ends = []
    for logits in (one, two):
        weights = Recording().weights(logits, MASK).double().cumsum(-1)
        ends.append(torch.nn.functional.pad(weights / weights[:, -1:], (1, 0)))
    overlap = torch.minimum(ends[0][:, 1:], ends[1][:, 1:]) - torch.maximum(ends[0][:, :-1], ends[1][:, :-1])
    return 1 - overlap.clamp_min(0).sum(-1)


@dataclass
class Rate:
    """Of one comparison of ROWS rows."""

    rows: float  # share of rows that differ
    per_token: float  # expected flips a draw, from the logits
    draws: int  # that were compared: up to a row's first flip

    def __str__(self) -> str:
        return f"{self.rows:.2%} of {ROWS} rows differ; {self.per_token:.1e} flips expected per token of {self.draws}"


def measure(system: Any, net: Any, length: int = LENGTH, rows: int = ROWS) -> Rate:
    """Samples of one batch against the same rows alone; one token a step, so that both runs have the same steps."""
    none = torch.zeros(rows, length, dtype=torch.bool)
    request = Request(torch.zeros_like(none, dtype=torch.long), none, ~none)
    batched, rng = Recording(), Randomness(0)
    together, _, steps = run(system, net, replace(request, draw=batched), rng)
    differing, chances = 0, []
    for b in range(rows):
        here = slice(b, b + 1)
        single = Recording()
        one = replace(request, x=request.x[here], given=none[here], valid=~none[here], draw=single)
        found, _, alone = run(system, net, one, Randomness(0, b))
        differing += found[0].tolist() != together[b].tolist()
        for k, step in enumerate(alone):
            mine = batched.seen[k].view(rows, -1, V)[b]
            chances.append(flip_chance(mine, single.seen[k].view(-1, V)))
            if step.token.item() != steps[k].token[b].item():
                break
    every = torch.cat(chances)
    return Rate(differing / rows, every.mean().item(), len(every))


def report(name: str, rate: Rate, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{name}: {rate}")


SYSTEMS = {"esolm": {"alpha_0": 0.5}, "mdlm": {}, "ar": {}}


def test_the_chance_of_a_flip() -> None:
    """By trying a fine grid of numbers."""
    one = torch.randn(4, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    two = one + 0.01 * torch.randn(4, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grid = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    for a, b, p in zip(one, two, flip_chance(one, two).tolist()):
        tokens = [Recording()(t.expand(5000, -1), lambda _: grid, MASK) for t in (a, b)]
        assert (tokens[0] != tokens[1]).double().mean().item() == pytest.approx(p, abs=0.005)
        assert 0.001 < p < 0.5
    assert flip_chance(one, one).abs().max() < 1e-12


def test_float64_never_flips() -> None:
    """The logits differ in their last bits at most: fewer than one flip in 10^12 draws."""
    rate = measure(toy.make("esolm", MASK, alpha_0=0.5), toy.network(V, 16, width=32), 16, 8)
    assert rate.rows == 0
    assert rate.per_token < 1e-12


@pytest.mark.parametrize("name", ["esolm", "ar"])
def test_the_native_engine_never_flips_in_a_batch(name: str) -> None:
    """A row has the same bits in every batch."""
    net = engines.native(toy.network(V, 16, torch.float32, width=64, layers=4))
    rate = measure(toy.make(name, MASK, **SYSTEMS[name]), net, 16, 8)
    assert rate.rows == 0
    assert rate.per_token < 1e-12


@pytest.mark.parametrize("name", ["esolm", "ar"])
def test_native_against_torch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """64 rows of 64 tokens by both engines in float32. Measured: no row differs, 1e-6 to 1e-5 flips a token."""
    net = toy.network(V, LENGTH, torch.float32, width=64, layers=4)
    none = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    seen, found = [], []
    for engine in engines.ENGINES:
        recording = Recording()
        request = Request(torch.zeros_like(none, dtype=torch.long), none, ~none, draw=recording)
        system = toy.make(name, MASK, **SYSTEMS[name])
        found.append(run(system, engines.on(engine, net), request, Randomness(0))[0])
        seen.append(recording.seen)
    same = (found[0] == found[1]).all(1)
    assert len(seen[0]) == len(seen[1])
    chances = [flip_chance(one, two)[same] for one, two in zip(*seen) if len(one) == len(two) == ROWS]
    every = torch.cat(chances)
    rate = Rate(1 - same.double().mean().item(), every.mean().item(), len(every))
    report(f"{name}, native against torch", rate, capsys)
    assert rate.rows <= 0.05
    assert rate.per_token < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_float32(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four layers of width 64 with strong random weights, 64 rows of 64 tokens. Measured: no row, 7e-6 to 2e-5 flips a
    token, so one row in a hundred at length 1024."""
    net = toy.network(V, LENGTH, torch.float32, width=64, layers=4)
    rate = measure(toy.make(name, MASK, **SYSTEMS[name]), net)
    report(f"{name}, float32", rate, capsys)
    assert rate.rows <= 0.1
    assert rate.per_token < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("name", SYSTEMS)
def test_bfloat16(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same network in bfloat16, where most logits are the same bits. Measured: no or one row, 3e-5 to 2e-4 flips a
    token."""
    net = toy.network(V, LENGTH, torch.bfloat16, width=64, layers=4)
    rate = measure(toy.make(name, MASK, **SYSTEMS[name]), net)
    report(f"{name}, bfloat16", rate, capsys)
    assert rate.per_token < 5e-3
