"""Devices and precisions, and deterministic sums on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def pick_device(name: str) -> torch.device:
    """The named device; `auto` is a GPU if there is one. Raises ValueError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        found = ", ".join(kind for kind, available in there.items() if available)
        raise ValueError(f"device is {name!r}; this machine has {found}: use one of these, or auto") from error


def pick_precision(name: str, device: torch.device) -> str:
    """`float32` or `bf16`; `auto` is bf16 where that is faster."""
    if name not in ("auto", "float32", "bf16"):
        raise ValueError(f"precision is {name!r}; it must be auto, float32 or bf16")
    if name == "auto":
        return "bf16" if fast_bf16(device) else "float32"
    if name == "bf16" and device.type == "cpu" and not settle():
        raise ValueError("precision bf16 does not run on this CPU: use float32")
    return name


def pick_weights(name: str, device: torch.device) -> str:
    """The same for inference, which also has `int8` and `int4` weights with products in bf16."""
    if name not in ("auto", "float32", "bf16", "int8", "int4"):
        raise ValueError(f"precision is {name!r}; it must be auto, float32, bf16, int8 or int4")
    found = pick_precision("bf16" if name in ("int8", "int4") else name, device)
    return name if name in ("int8", "int4") else found


def fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are clearly faster; measured on a CPU, because its flags do not show it."""
    return bf16_verdict(device)[0]


@functools.cache
def bf16_verdict(device: torch.device) -> tuple[bool, str]:
    """What `fast_bf16` returns, and why; the same for the whole process."""
    if device.type == "cuda":
        found = torch.cuda.is_bf16_supported(including_emulation=False)
        return found, f"the GPU has {'' if found else 'no '}bf16 instructions"
    if device.type != "cpu":
        return False, f"bf16 is not used on {device.type}"
    if not torch.backends.mkldnn.is_available():
        return False, "PyTorch was built without oneDNN"
    if not (_probe("_is_amx_tile_supported") or _probe("_is_avx512_bf16_supported")):
        return False, "the CPU has no bf16 instructions"
    if not settle():
        return False, "the CPU announces bf16 instructions, but they do not run"
    low, full = _product_seconds(torch.bfloat16, torch.float32)
    return 1.2 * low < full, f"bf16 products take {low / full:.2f} times as long as float32 ones"


def _product_seconds(*dtypes: torch.dtype) -> list[float]:
    """The least CPU time of a product in each type, on one thread: it does not count while other processes run."""
    times: list[list[float]] = [[] for _ in dtypes]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(20):
            for dtype, found in zip(dtypes, times, strict=True):
                a = torch.ones(512, 512, dtype=dtype)
                start = time.thread_time()
                a @ a
                found.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return [min(found) for found in times]


def _probe(name: str) -> bool:
    # These are private to PyTorch, and another version may not have them.
    return bool(getattr(torch.cpu, name, bool)())


@functools.cache
def settle() -> bool:
    """Whether bf16 products run in this process; disables AMX in oneDNN if they do not run with it.

    Some virtual machines advertise AMX and then trap its instructions, which kills the process. oneDNN reads the
    variable once, at its first use, so the only way to know is to try in a fork of this process.
    """
    if not _probe("_is_amx_tile_supported") or not hasattr(os, "fork") or _survives_bf16():
        return True
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    return _survives_bf16()


def keep_memory() -> None:
    """Make glibc keep freed memory: it otherwise returns tensors above 32 MB, which then fault in again at each use."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _survives_bf16(seconds: float = 20.0) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child starts no thread and takes no lock
        child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()  # which writes to its own copy of stderr
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            torch.set_num_threads(1)
            a = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16)
            torch.nn.functional.scaled_dot_product_attention(a @ a, a, a)
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (done := os.waitpid(child, os.WNOHANG))[0]:
            return done[1] == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """A context without compiled code: inductor fails on the shapes of a pass without gradients."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of forward passes: bf16 matrix products, or no change."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On the CPU, scattered additions run in a fixed order, so that a step is reproducible bit by bit."""
    if device.type != "cpu":
        yield
        return
    settings: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill
