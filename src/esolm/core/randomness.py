"""Counter-based randomness: every number is a pure function of a key, an example and a column.

There is no generator state. Example g has the same number in column c alone, in a batch, in a micro-batch, or on
another rank or device, so resuming and splitting change nothing.

Shapes: B examples here, N numbers each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_64 = (1 << 64) - 1
FEW = 4
"""Up to this number of values, Python integers are faster than thirty tensor operations."""


def _signed(value: int) -> int:
    value &= _64
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    z = (z + _GOLDEN) & _64
    z = ((z ^ (z >> 30)) * _M1) & _64
    z = ((z ^ (z >> 27)) * _M2) & _64
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function on int64 tensors; masking the sign bits makes the shifts logical."""
    z = z + _signed(_GOLDEN)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_M1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_M2)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def fold(key: int, data: int | str) -> int:
    """A new 64-bit key from a key and a number or a name."""
    if isinstance(data, str):
        data = int.from_bytes(data.encode().ljust(8, b"\0"), "little")
        while data >> 64:
            key, data = _mix_int(key ^ _mix_int(data & _64)), data >> 64
    return _mix_int(key ^ _mix_int(data & _64))


def uniform(key: int, row: Tensor, column: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64, one for each pair of the broadcast int64 tensors row and column.

    Every row is its own SplitMix64 stream, seeded by the key and the row.
    """
    if row.shape == column.shape and row.numel() <= FEW:
        pairs = zip(row.flatten().tolist(), column.flatten().tolist(), strict=True)
        words = [_mix_int((_mix_int((r + _mix_int(key)) & _64) + c * _GOLDEN) & _64) for r, c in pairs]
        numbers = [((word >> 11) + 0.5) * 2.0**-53 for word in words]
        return torch.tensor(numbers, dtype=torch.float64, device=row.device).view(row.shape)
    word = _mix(_mix(row + _signed(_mix_int(key))) + column * _signed(_GOLDEN))
    return (((word >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Randomness:
    """The key of one step, and the indices of these examples, first .. first + B, in its global batch of `total`."""

    key: int
    first: int = 0
    total: int = 1

    def at(self, *data: int | str) -> Randomness:
        """The same examples with an independent key: rng.at(step), rng.at("mask")."""
        key = self.key
        for d in data:
            key = fold(key, d)
        return replace(self, key=key)

    def examples(self, batch: int) -> Tensor:
        """Global indices of these examples, int64 [B]."""
        return torch.arange(self.first, self.first + batch)

    def uniform(self, examples: Tensor, columns: int) -> Tensor:
        """Independent uniforms in (0, 1), float64 [B, N], for the given global example indices."""
        return uniform(self.key, examples[:, None], torch.arange(columns)[None])

    def times(self, stratum: Tensor, strata: int, columns: int = 1) -> Tensor:
        """Low-discrepancy times in (0, 1), float64 [B, N]: t ~ U[i/n, (i+1)/n], one stratum i of n for each.

        A random permutation assigns the strata to the examples, so that each example's time is uniform too; otherwise,
        in a bound on texts in a fixed order, the first texts would always be nearly clean and the last ones masked.
        With several columns (one time per block of BD3-LM) each example has one time in every band of width 1/N, in
        random order, so that no column is tied to a noise level. Raises ValueError if an example is beyond the strata.
        """
        if stratum.numel() and int(stratum.max()) >= strata:
            raise ValueError(f"example {int(stratum.max())} is not in a global batch of {strata}")
        dealt = self.at("deal").uniform(torch.zeros(1, dtype=torch.long), strata)[0].argsort()[stratum]
        band = self.at("band").uniform(stratum, columns).argsort(-1)
        cell = dealt[:, None] + strata * band
        return (cell + self.uniform(stratum, columns)) / (strata * columns)
