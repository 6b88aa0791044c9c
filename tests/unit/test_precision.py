"""Devices without float64: losses, samples and likelihoods on a device that refuses it equal those of the CPU.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.draw import Draw
from esolm.core.float64 import to_device, wide
from esolm.core.randomness import Randomness
from esolm.net.fold import fold
from esolm.sampling.options import SamplingOptions
from esolm.sampling.request import Request
from esolm.training import loss
from esolm.training.options import Batching, Compute
from support import toy
from support.away import DEVICE, Away, AwayTensor

B, L, V = 4, 8, 7
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
LABELS = ("ar", "bd3lm-4", "esolm-B-0.5", "esolm-B-1", "esolm-A-0.5", "esolm-any-0.5", "mdlm")
SYSTEMS = pytest.mark.parametrize(("name", "options"), [found[1:] for found in toy.variants() if found[0] in LABELS])


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    wide.cache_clear()
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda kind, **o: autocast("cpu" if kind == DEVICE.type else kind, **o))
    with Away():
        yield DEVICE
    wide.cache_clear()


def here(t: Any) -> Tensor:
    assert isinstance(t, AwayTensor)
    return t.values


def test_the_widest_type_of_a_device(away: torch.device) -> None:
    assert wide(torch.device("cpu")) == torch.float64
    assert wide(away) == torch.float32
    with pytest.raises(TypeError):
        torch.ones(1, dtype=torch.float64).to(away)


def test_uniforms_stay_inside_their_group(away: torch.device) -> None:
    """Orders are sorted by group + u: rounding to float32 must not move a token to the next group."""
    u = torch.tensor([2.0**-54, 0.25, 1 - 2.0**-54], dtype=torch.float64)
    assert to_device(u, torch.device("cpu")) is u
    found = here(to_device(u, away))
    assert found.dtype == torch.float32
    assert ((3 + found < 4) & (3 + found > 3)).all()


@pytest.mark.parametrize("train", [True, False])
@SYSTEMS
def test_losses(name: str, options: dict[str, Any], train: bool, away: torch.device) -> None:
    system, net, x = toy.make(name, V - 1, **options), toy.network(dtype=torch.float32), toy.text(B)
    valid = toy.padding(B, L)
    expected = toy.values(system, net, x, Randomness(3, 0, B), train, valid=valid)
    found = toy.values(system, net.to(away), x.to(away), Randomness(3, 0, B), train, valid=valid.to(away))
    assert found.keys() == expected.keys()
    for key, nats in found.items():
        torch.testing.assert_close(here(nats), expected[key], **CLOSE)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("draw", [Draw(), Draw(0.7, top_p=0.8)], ids=["plain", "nucleus"])
@pytest.mark.parametrize("sampler", [None, "speculative"])
@SYSTEMS
def test_samples(name: str, options: dict[str, Any], sampler: str | None, draw: Draw, away: torch.device) -> None:
    system, net = toy.make(name, V - 1, **options), toy.network(dtype=torch.float32)
    given = (torch.arange(L) < 2).expand(B, -1)
    if sampler == "speculative" and (name != "esolm" or options.get("variant") == "A"):
        pytest.skip("the system has no such sampler")

    def sample(net: Any, x: Tensor) -> list[list[Any]]:
        asked = Request(x, given, torch.ones_like(given), SamplingOptions(sampler=sampler), draw)
        rng = Randomness(3, 0, B)
        return [step.token.tolist() for step in system.sample(net, asked, system.plan(asked, rng), rng)]

    with torch.no_grad():
        expected = sample(fold(net), toy.text(B))
        assert sample(fold(net.to(away)), toy.text(B).to(away)) == expected


class Source:
    """The same batch at every step."""

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Any:
        x = toy.text(B)[first : None if count is None else first + count]
        return Batch(x)

    def __len__(self) -> int:
        return 2


@SYSTEMS
def test_training(name: str, options: dict[str, Any], away: torch.device) -> None:
    """The nats and the gradients of a step, and the validation."""
    system, net = toy.make(name, V - 1, **options), toy.network(dtype=torch.float32)
    other = copy.deepcopy(net).to(away)
    found = []
    for one, device in ((net, "cpu"), (other, str(away))):
        compute = Compute(device=device, precision="float32")
        nats, tokens = loss.accumulate(one, system, Source(), 0, 0, Batching(B), compute)
        found.append((nats, tokens, loss.validate(one, system, Source(), None, compute)))
    assert found[1][1] == found[0][1]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert found[1][2] == pytest.approx(found[0][2], rel=1e-4)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(here(q.grad), p.grad, rtol=1e-3, atol=1e-4)
