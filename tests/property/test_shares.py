"""How Eso-LM splits a global batch between its two terms, and which options it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.systems import find
from support import toy

V, MASK = 3, 2


@pytest.mark.parametrize("kappa", [0.5, 0.25, 0.125, 0.7, 0.58, 1 / 3, 0.9])
@pytest.mark.parametrize("total", [10, 64, 512])
def test_shares_of_the_global_batch(kappa: float, total: int) -> None:
    """floor(kappa B) examples take the diffusion term, spread evenly: every run of n has kappa n of them, to one."""
    diffused = toy.make("esolm", MASK, alpha_0=0.5, kappa=kappa).diffused(torch.arange(total).double())
    assert int(diffused.sum()) == int(total * kappa)
    so_far = diffused.cumsum(0)
    for n in (2, 4, 8):
        runs = so_far[n:] - so_far[:-n]
        assert ((runs - n * kappa).abs() < 1).all()


@pytest.mark.parametrize(("alpha_0", "share"), [(0.0, 0), (1.0, 1)])
def test_the_ends_take_the_whole_batch(alpha_0: float, share: int) -> None:
    found = toy.make("esolm", MASK, alpha_0=alpha_0)
    assert found.share == share
    assert found.diffused(torch.arange(50).double()).double().mean() == share
    scored = torch.ones(50, 3, dtype=torch.bool)
    assert found.counts(scored, Randomness(0)) == {"diffusion" if share else "sequential": 150}


@pytest.mark.parametrize("kappa", [0.5, 0.7, 0.58, 0.29, 1 / 3])
def test_one_time_per_diffused_example(monkeypatch: pytest.MonkeyPatch, kappa: float) -> None:
    """Low-discrepancy times are scaled to the share: one stratum each, none twice, over micro-batches too."""
    asked: list[tuple[Tensor, int]] = []
    times = Randomness.times

    def note(self: Randomness, stratum: Tensor, strata: int, columns: int = 1) -> Tensor:
        asked.append((stratum, strata))
        return times(self, stratum, strata, columns)

    monkeypatch.setattr(Randomness, "times", note)
    found, net, total = toy.make("esolm", MASK, alpha_0=0.5, kappa=kappa), toy.network(V, 2), 128
    for first in range(0, total, 32):
        with torch.no_grad():
            found.terms(net, Batch(toy.text(32, 2, V)), Randomness(1, first, total), True)
    assert {strata for _, strata in asked} == {int(total * kappa)}
    strata = torch.cat([stratum for stratum, _ in asked])
    assert torch.equal(strata.sort()[0], torch.arange(int(total * kappa)))


def test_a_batch_too_small_for_both_terms_is_refused() -> None:
    net, x = toy.network(V, 2), toy.text(3, 2, V)
    for kappa in (0.25, 0.75):
        found = toy.make("esolm", MASK, alpha_0=0.5, kappa=kappa)
        with pytest.raises(ValueError, match="4"):
            found.terms(net, Batch(x), Randomness(0, 0, 3), True)
        found.terms(net, Batch(x), Randomness(0, 0, 3), False)  # the bound needs no share


def test_draws_of_the_two_terms_are_independent() -> None:
    """The same example has other masks in the diffusion term than in the sequential one."""
    found, net, x = toy.make("esolm", MASK, alpha_0=0.5), toy.network(V, 16), toy.text(200, 16, V)
    with torch.no_grad():
        weights = toy.weights(found, net, x, Randomness(0, 0, 200), False)
    one, two = (weights[name] > 0 for name in ("diffusion", "sequential"))
    together = torch.corrcoef(torch.stack([one.flatten(), two.flatten()]).double())[0, 1].item()
    assert abs(together) < 5 / one.numel() ** 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("esolm", {"alpha_0": 1.5}, "alpha_0 is 1.5"),
        ("esolm", {"alpha_0": -0.1}, "alpha_0 is -0.1"),
        ("esolm", {"kappa": 0.0}, "kappa is 0.0"),
        ("esolm", {"kappa": 1.0}, "kappa is 1.0"),
        ("esolm", {"t_min": 1.0}, "t_min is 1.0"),
        ("esolm", {"variant": "C"}, "variant is 'C'"),
        ("esolm", {"loss": "other"}, "loss is 'other'"),
        ("esolm", {"weights": "other"}, "weights is 'other'"),
        ("esolm", {"loss": "any_order", "variant": "A"}, "any_order needs variant B"),
        ("mdlm", {"t_min": 1.0}, "t_min is 1.0"),
        ("bd3lm", {"block_size": 0}, "block_size is 0"),
        ("bd3lm", {"mask_rate_min": 0.6, "mask_rate_max": 0.5}, "mask_rate_min 0.6"),
        ("bd3lm", {"clip_widths": [0.5, 1.0]}, "clip_widths"),
        ("bd3lm", {"clip_widths": []}, "clip_widths"),
        ("ar", {"first": "other"}, "first is 'other'"),
    ],
)
def test_impossible_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(name)(mask_id=MASK, **options)


def test_a_length_of_no_whole_blocks_is_refused() -> None:
    found, net = toy.make("bd3lm", MASK, block_size=2), toy.network(V, 5)
    with pytest.raises(ValueError, match="length 5 is not a multiple of block_size 2"):
        toy.values(found, net, toy.text(2, 5, V), Randomness(0, 0, 2), True)


@pytest.mark.parametrize("alpha_0", [0.0, 1.0])
def test_kappa_may_say_what_the_ends_take(alpha_0: float) -> None:
    assert toy.make("esolm", MASK, alpha_0=alpha_0, kappa=alpha_0).share == alpha_0
    with pytest.raises(ValueError, match="kappa"):
        toy.make("esolm", MASK, alpha_0=alpha_0, kappa=1 - alpha_0)
