"""Some virtual machines advertise AMX and then refuse its instructions, which kills PyTorch at its first bf16 product.

`settle` finds out in a child process and keeps oneDNN from using what does not run.
"""

from __future__ import annotations

import functools
import os
import signal
import time

SECONDS = 20.0
"""A child that takes longer is taken for dead."""


def advertised() -> bool:
    """Whether the processor claims AMX."""
    try:
        with open("/proc/cpuinfo") as file:
            return any(line.startswith("flags") and " amx_tile" in line for line in file)
    except OSError:
        return False


@functools.cache
def runs() -> bool:
    """Whether a bf16 product survives, tried in a child process that may die of it."""
    import torch

    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the parent's other threads do not exist here
            a = torch.ones(512, 512, dtype=torch.bfloat16)
            os._exit(0 if (a @ a)[0, 0] == 512 else 1)
        finally:
            os._exit(1)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def settle() -> None:
    """Limit oneDNN to AVX-512 where AMX is advertised and does not run; call it before the first matrix product."""
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and advertised() and not runs():
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
