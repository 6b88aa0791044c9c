"""The limits of this machine: speed of matrix products and of memory reads."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.nn import functional as F

from .report import table


def gemm(dtype: torch.dtype, size: int = 1024, rounds: int = 5) -> float:
    """Return the best GFLOP/s of a square matrix product."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / _best(lambda: F.linear(a, b), rounds) / 1e9


def read_bandwidth(megabytes: int = 512, rounds: int = 5, most: float = math.inf) -> float:
    """Return the best GB/s of summing a buffer much larger than the CPU caches; most: seconds after which to stop."""
    buffer = torch.ones(megabytes * 2**20 // 4)
    return buffer.numel() * 4 / _best(lambda: buffer.sum(), rounds, most) / 1e9


def _best(call: Any, rounds: int, most: float = math.inf) -> float:
    call()
    seconds = list[float]()
    while len(seconds) < rounds and (not seconds or sum(seconds) < most):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def limits() -> dict[str, float]:
    """Return GFLOP/s and GB/s with the current number of threads."""
    return {
        "gemm_float32_gflops": round(gemm(torch.float32), 1),
        "gemm_bf16_gflops": round(gemm(torch.bfloat16), 1),
        "read_gb_per_s": round(read_bandwidth(), 1),
    }


def run() -> dict[str, Any]:
    """Measure matrix products and memory reads."""
    found = limits()
    columns = {"what": "what", "value": "value"}
    table("limits of this machine", columns, ({"what": name, "value": value} for name, value in found.items()))
    return {"limits": found}
