"""The absorbing process: rates, counts and the weights that make them the same bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from esolm.core.batch import Batch
from esolm.core.noise import LinearSchedule, mask_by_count, mask_by_rate, mask_within
from esolm.core.randomness import Randomness
from support.chance import ALARM, chance


@pytest.mark.parametrize("alpha_0", [0.0, 0.125, 0.5, 1.0])
def test_the_linear_schedule(alpha_0: float) -> None:
    t = torch.linspace(0.01, 1, 50, dtype=torch.float64)
    noise = LinearSchedule(alpha_0)
    torch.testing.assert_close(noise.alpha(t), alpha_0 * (1 - t))
    slope = (noise.alpha(t + 1e-6) - noise.alpha(t - 1e-6)) / 2e-6
    torch.testing.assert_close(noise.dalpha(t), slope, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(noise.weight(t), -noise.dalpha(t) / (1 - noise.alpha(t)))
    assert noise.alpha(torch.zeros(1)).item() == alpha_0
    assert noise.alpha(torch.ones(1)).item() == 0


def test_scored_are_valid_and_not_given() -> None:
    x = torch.zeros(1, 4, dtype=torch.long)
    valid, given = torch.tensor([[True, True, True, False]]), torch.tensor([[True, False, False, True]])
    assert Batch(x).scored.tolist() == [[True] * 4]
    assert Batch(x, valid).scored.tolist() == valid.tolist()
    assert Batch(x, None, given).scored.tolist() == [[False, True, True, False]]
    assert Batch(x, valid, given).scored.tolist() == [[False, True, True, False]]


def test_masked_at_the_rate() -> None:
    """Within 5 standard errors of 1 - alpha (p < 6e-7), and nothing that is not scored."""
    u = Randomness(0).uniform(torch.arange(1000), 200)
    scored = torch.arange(200).expand(1000, -1) % 4 != 0
    for alpha in (0.0, 0.1, 0.7, 1.0):
        masked = mask_by_rate(scored, alpha, u)
        assert not masked[~scored].any()
        error = 5 * math.sqrt(alpha * (1 - alpha) / scored.sum())
        assert abs(masked[scored].double().mean().item() - (1 - alpha)) <= error
    per_row = torch.tensor([[0.0], [1.0]])
    assert mask_by_rate(scored[:2], per_row, u[:2]).sum(1).tolist() == [150, 0]


def test_counts_are_uniform_and_subsets_too() -> None:
    """m uniform in 1..n and, given m, every subset alike; weight n/m. Within 5 standard errors."""
    rng, draws = Randomness(1, 0, 24000), 24000
    scored = torch.tensor([True, False, True, True, True]).expand(draws, -1)
    rows = rng.examples(draws)
    t = rng.at("t").uniform(rows, 1)
    masked, weight = mask_by_count(scored, t, rng.at("u").uniform(rows, 5))
    assert not masked[:, 1].any()
    m = masked.sum(1)
    torch.testing.assert_close(weight[:, 0], 4 / m, check_dtype=False)
    code = (masked * 2 ** torch.arange(5)).sum(1)
    for pattern in range(1, 32):
        if pattern & 2:
            continue
        size = bin(pattern).count("1")
        expected = 0.25 / math.comb(4, size)
        share = (code == pattern).double().mean().item()
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)


def test_counts_at_the_ends() -> None:
    scored = torch.ones(4, 3, dtype=torch.bool)
    u = torch.tensor([[0.5, 0.1, 0.9]]).expand(4, -1)
    t = torch.tensor([[0.0], [0.34], [0.999], [1.0]], dtype=torch.float64)
    masked, weight = mask_by_count(scored, t, u)
    assert masked.tolist() == [[False, True, False], [True, True, False], [True] * 3, [True] * 3]
    assert weight[:, 0].tolist() == [3.0, 1.5, 1.0, 1.0]
    masked, weight = mask_by_count(torch.zeros(1, 3, dtype=torch.bool), t[:1], u[:1])
    assert not masked.any()
    assert weight.isfinite().all()


def test_each_block_counts_for_itself() -> None:
    rng = Randomness(2)
    scored = torch.ones(50, 3, 4, dtype=torch.bool)
    scored[:, 1, 2:] = False
    t, u = rng.uniform(torch.arange(50), 3)[..., None], rng.at("u").uniform(torch.arange(50), 12).unflatten(1, (3, 4))
    masked, weight = mask_by_count(scored, t, u)
    for b in range(50):
        for k in range(3):
            one, its = mask_by_count(scored[b, k][None], t[b, k][None], u[b, k][None])
            assert torch.equal(masked[b, k], one[0])
            assert torch.equal(weight[b, k], its[0])
    assert (masked.sum(-1) >= 1).all()


def test_both_ways_to_draw_give_one_bound() -> None:
    """E_t[1/t f(masks)] = E_m[n/m f(masks)], by quadrature over t and by enumeration, for a function of the count."""
    n = 5
    f = [0.0, 0.3, 1.1, 1.9, 2.0, 4.2]  # anything with f(0) = 0
    t, w = torch.linspace(0, 1, 200001, dtype=torch.float64)[1:], 1 / 200000
    by_time = sum(
        f[m] * math.comb(n, m) * (t ** (m - 1) * (1 - t) ** (n - m)).sum().item() * w for m in range(1, n + 1)
    )
    by_count = sum(f[m] * n / m for m in range(1, n + 1)) / n
    assert by_time == pytest.approx(by_count, rel=1e-4)


@pytest.mark.parametrize(("low", "high", "allowed"), [(0.25, 0.5, {1, 2}), (0.0, 0.6, {0, 1, 2}), (0.3, 0.4, None)])
def test_the_share_of_masks_within_bounds(low: float, high: float, allowed: set[int] | None) -> None:
    """Every set of masks has its probability given that its size is allowed; chi-square, alarm at 1e-6.

    Between 0.3 and 0.4 of four tokens lies no whole number, so there the sizes are not restricted.
    """
    t, n = 0.3, 40_000
    u = Randomness(1).uniform(torch.arange(n), 5)
    number = Randomness(2).uniform(torch.arange(n), 1)
    scored = torch.tensor([True, True, False, True, True]).expand(n, -1)
    masked = mask_within(scored, torch.full((n, 1), t, dtype=torch.float64), u, number, low, high)
    assert not masked[:, 2].any()
    sets = [s for s in itertools.product((False, True), repeat=4) if allowed is None or sum(s) in allowed]
    law = {s: t ** sum(s) * (1 - t) ** (4 - sum(s)) for s in sets}
    total = sum(law.values())
    found = [tuple(row) for row in masked[:, [0, 1, 3, 4]].tolist()]
    assert chance(found, {s: p / total for s, p in law.items()}) > ALARM


def test_all_tokens_are_masked_at_time_one() -> None:
    u = Randomness(1).uniform(torch.arange(3), 4)
    t, scored = torch.ones(3, 1, dtype=torch.float64), torch.ones(3, 4, dtype=torch.bool)
    assert mask_within(scored, t, u, u[:, :1], 0.5, 1.0).all()
