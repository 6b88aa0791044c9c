"""Counter-based randomness: uniform, independent, and the same however the batch is cut.

Every statistic here is of a fixed key, so a test either always passes or never; the bounds are what a true uniform
source would break with the chance stated (for the normal approximation, |z| < 5 has p < 6e-7).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esolm.core.randomness import Randomness, fold, uniform

M64 = (1 << 64) - 1


def splitmix(z: int) -> int:
    """SplitMix64's output function in Python integers."""
    z = (z + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def chi_square(u: Tensor, cells: int) -> float:
    """Standardised: (chi^2 - df) / sqrt(2 df)."""
    counts = torch.bincount((u.flatten() * cells).long(), minlength=cells).double()
    expected = u.numel() / cells
    return (((counts - expected) ** 2 / expected).sum().item() - (cells - 1)) / (2 * (cells - 1)) ** 0.5


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard errors of an uncorrelated pair."""
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item() * a.numel() ** 0.5


def test_equals_splitmix_in_python_integers() -> None:
    for key, row, column in [(0, 0, 0), (12345, 7, 3), (M64, 10**12, 2**40), (1 << 63, 1, 1), (fold(3, "mask"), 5, 9)]:
        seed = splitmix((row + splitmix(key)) & M64)
        word = splitmix((seed + column * 0x9E3779B97F4A7C15) & M64)
        expected = ((word >> 11) + 0.5) * 2.0**-53
        for count in (1, 100):  # few numbers and many go different ways
            found = uniform(key, torch.tensor(row).expand(count), torch.tensor(column).expand(count))
            assert found.tolist() == [expected] * count


@pytest.mark.parametrize("key", [0, 1, fold(0, "train")])
def test_uniform(key: int) -> None:
    u = Randomness(key).uniform(torch.arange(500), 400)
    assert u.dtype == torch.float64
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert abs(chi_square(u, 100)) < 5
    assert abs(chi_square(u * 1000 % 1, 100)) < 5  # the digits behind
    assert len(u.flatten().unique()) == u.numel()


@pytest.mark.parametrize("key", [0, 7, fold(1, "order")])
def test_neighbours_are_independent(key: int) -> None:
    rng, rows = Randomness(key), torch.arange(500)
    u = rng.uniform(rows, 400)
    assert abs(correlation(u[:, 1:], u[:, :-1])) < 5
    assert abs(correlation(u[1:], u[:-1])) < 5
    assert abs(correlation(u, Randomness(key + 1).uniform(rows, 400))) < 5
    for name in ("mask", "order", 1):
        assert abs(correlation(u, rng.at(name).uniform(rows, 400))) < 5
    pairs = (u[:, 1:] * 16).floor() * 16 + (u[:, :-1] * 16).floor()
    assert abs(chi_square((pairs + 0.5) / 256, 256)) < 5


def test_a_key_is_folded_from_every_part() -> None:
    keys = {fold(0, d) for d in range(1000)} | {fold(k, 0) for k in range(1, 1000)}
    names = ["mask", "masks", "time", "band", "a long name of many bytes", "a long name of many bytes!"]
    keys |= {fold(0, name) for name in names}
    assert len(keys) == 1000 + 999 + len(names)
    assert all(0 <= k <= M64 for k in keys)
    rng = Randomness(5, 2, 9)
    assert rng.at("a", 3) == rng.at("a").at(3)
    assert rng.at("a", 3) != rng.at(3, "a")
    assert (rng.at("a").first, rng.at("a").total) == (2, 9)


def test_the_batch_an_example_comes_in_does_not_matter() -> None:
    whole = Randomness(3, 0, 12)
    u, t = whole.uniform(whole.examples(12), 6), whole.times(whole.examples(12), 12, 4)
    for first, size in [(0, 5), (5, 1), (6, 6)]:
        part = Randomness(3, first, 12)
        rows = part.examples(size)
        assert torch.equal(rows, torch.arange(first, first + size))
        assert torch.equal(part.uniform(rows, 6), u[first : first + size])
        assert torch.equal(part.uniform(rows, 3), u[first : first + size, :3])
        assert torch.equal(part.times(rows, 12, 4), t[first : first + size])


@pytest.mark.parametrize(("total", "columns"), [(1, 1), (7, 1), (512, 1), (16, 4), (5, 8)])
def test_one_time_in_every_stratum_of_the_global_batch(total: int, columns: int) -> None:
    rng = Randomness(11, 0, total)
    t = rng.times(rng.examples(total), total, columns)
    assert t.shape == (total, columns)
    cells = (t * total * columns).floor().long()
    assert torch.equal(cells.flatten().sort()[0], torch.arange(total * columns))
    bands = (t * columns).floor().long()  # each example has one time in each band
    assert torch.equal(bands.sort(-1)[0], torch.arange(columns).expand(total, -1))


def test_no_column_is_tied_to_a_band() -> None:
    total, columns, keys = 8, 4, 500
    t = torch.stack([Randomness(k, 0, total).times(torch.arange(total), total, columns) for k in range(keys)])
    for column in range(columns):
        bands = torch.bincount((t[:, :, column] * columns).long().flatten(), minlength=columns) / (keys * total)
        assert ((bands - 1 / columns).abs() < 5 * (3 / 16 / (keys * total)) ** 0.5).all()


@pytest.mark.parametrize("columns", [1, 3])
def test_no_example_is_tied_to_a_stratum(columns: int) -> None:
    """Over keys, the time of one example is uniform: the bound of a text does not depend on where it stands."""
    total = 10
    t = torch.stack([Randomness(k, 0, total).times(torch.arange(total), total, columns) for k in range(2000)])
    for example in range(total):
        for column in range(columns):
            assert abs(chi_square(t[:, example, column], 20)) < 5


def test_an_example_beyond_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="example 4 is not in a global batch of 4"):
        Randomness(0, 0, 4).times(torch.arange(5), 4)
    assert Randomness(0, 0, 4).times(torch.arange(0), 4).shape == (0, 1)
