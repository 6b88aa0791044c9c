"""A keyed random permutation of 0 … n-1 in constant memory: a Feistel network with cycle walking.

A Feistel network permutes 0 … 4^k - 1. Applying it again to values of n or more until all are below n permutes 0 … n-1.
"""

from __future__ import annotations

import numpy as np

from ..core.randomness import fold

_ROUNDS = 8


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the image of each index under the permutation: int64 [...] in 0 … n-1 -> int64 [...]."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [np.uint64(fold(key, i)) for i in range(_ROUNDS)]
    value = _feistel(index.astype(np.uint64), half, keys)
    while (beyond := value >= n).any():
        value[beyond] = _feistel(value[beyond], half, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & low
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low)
    return (left << bits) | right


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
