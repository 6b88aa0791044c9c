"""`esolm doctor`: report what this machine has, and what to install for what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from . import COMMANDS
from .extras import check_extras
from .parsing import add_json, announce, parse, parser

TORCH = ((2, 6), (2, 14))
"""The supported versions of PyTorch: from the first, below the second."""
MEMORY, DISK = 2e9, 5e9
"""Bytes below which free memory or disk space are worth a line of advice."""
SECONDS = 1.0
"""Time of the measurement of the memory bandwidth."""


def make_parser() -> Any:
    """The parser."""
    made = parser("doctor", COMMANDS["doctor"])
    add_json(made)
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse(make_parser(), argv)
    announce("looking at this machine …", quiet=options["json"])
    found = examine()
    print(json.dumps(found, indent=1) if options["json"] else "\n".join(lines(found)))
    return 0


def examine() -> dict[str, Any]:
    """Everything that is reported; a part that fails is reported as its error."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "python": python, "torch": torch_build, "device": devices, "precision": precision, "threads": threads,
        "native": native, "memory": memory, "disk": disk, "extras": check_extras,
    }  # fmt: skip
    found: dict[str, Any] = {"esolm": __version__}
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # whatever is broken on this machine is a finding, not a failure
            found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    found["advice"] = advice(found)
    return found


def python() -> dict[str, Any]:
    """The interpreter and the operating system."""
    return {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()}


def torch_build() -> dict[str, Any]:
    """The version of PyTorch."""
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda, "versions": versions()}


def versions() -> dict[str, str | None]:
    """The versions of the other packages that esolm needs."""
    names = ("numpy", "safetensors", "tokenizers", "jsonargparse", "PyYAML", "rich")
    return {name: importlib.metadata.version(name) for name in names}


def devices() -> dict[str, Any]:
    """The devices, and the one that `auto` chooses."""
    import torch

    from ..runtime.machine import pick_device

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found = [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus]
    return {"chosen": pick_device("auto").type, "cpu": cpu_name(), "gpus": found}


def cpu_name() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def precision() -> dict[str, Any]:
    """The precision that `auto` chooses, and why."""
    from ..runtime.machine import bf16_verdict, pick_device

    fast, why = bf16_verdict(pick_device("auto"))
    return {"chosen": "bf16" if fast else "float32", "reason": why}


def threads() -> dict[str, Any]:
    """The cores that this process may use, and the threads of PyTorch."""
    import torch

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    setting = os.environ.get("OMP_NUM_THREADS")
    return {"cores": os.cpu_count(), "allowed": allowed, "torch": torch.get_num_threads(), "OMP_NUM_THREADS": setting}


def native() -> dict[str, Any]:
    """The native engine: its instruction set and the result of its self-test, or why it cannot be used."""
    from ..net.native.library import INSTRUCTIONS, Broken, Unavailable, library

    try:
        return {"instructions": INSTRUCTIONS[library().esolm_isa(-1)], "self_test": "passed"}  # by loading it
    except Broken as error:
        return {"instructions": None, "self_test": "failed", "reason": str(error)}
    except Unavailable as error:
        return {"instructions": None, "self_test": "not run", "reason": str(error)}


def memory() -> dict[str, Any]:
    """Size, free part and measured bandwidth of the memory."""
    import torch

    from ..bench.machine import read_bandwidth
    from .estimates import available

    free = available(torch.device("cpu"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    size = 256 if free is None or free > MEMORY else 32
    bandwidth = read_bandwidth(size, rounds=10**6, most=SECONDS)
    return {"total": total, "free": free, "read_bytes_per_second": round(bandwidth * 1e9)}


def disk() -> dict[str, Any]:
    """The disk of the working directory."""
    used = shutil.disk_usage(".")
    return {"folder": os.getcwd(), "free": used.free, "total": used.total, "writable": os.access(".", os.W_OK)}


def advice(found: dict[str, Any]) -> list[str]:
    """What to do about what is missing or wrong, most important first."""
    made = list[str]()
    if "error" in found["torch"]:
        made.append(f"PyTorch cannot be imported ({found['torch']['error']}): install it again, see pytorch.org")
    elif not TORCH[0] <= release(found["torch"]["version"]) < TORCH[1]:
        low, high = (".".join(map(str, each)) for each in TORCH)
        made.append(f"PyTorch {found['torch']['version']} is not supported: pip install 'torch>={low},<{high}'")
    names = [name for name in ("device", "precision", "threads", "native", "memory", "disk") if "error" in found[name]]
    made += [f"{name} could not be examined: {found[name]['error']}" for name in names if "error" not in found["torch"]]
    if found["native"].get("self_test") in ("failed", "not run"):
        made.append(f"sampling on the CPU is slower without the native engine: {found['native']['reason']}")
    if found["device"].get("chosen") == "cpu":
        made.append("no GPU was found: the presets laptop-* are made for this; larger ones take days")
    if found["threads"].get("torch", 0) > (found["threads"].get("allowed") or 1):
        allowed = found["threads"]["allowed"]
        made.append(f"PyTorch uses more threads than there are cores: set OMP_NUM_THREADS={allowed}, or --threads")
    if (found["memory"].get("free") or MEMORY) < MEMORY:
        made.append(
            f"only {gigabytes(found['memory']['free'])} of memory are free: lower --batch_size or --batch.micro"
        )
    if found["disk"].get("free", DISK) < DISK:
        made.append(f"only {gigabytes(found['disk']['free'])} of disk space are free here: checkpoints may not fit")
    if not found["disk"].get("writable", True):
        made.append("this folder cannot be written: change to another one, or give --run and --out elsewhere")
    return made + extras_advice(found["extras"]) or ["nothing is missing: try `esolm sample stories --show`"]


def extras_advice(extras: dict[str, Any]) -> list[str]:
    """What to do about extras that are broken or missing."""
    if "error" in extras:
        return [f"the extras could not be examined: {extras['error']}"]
    wrong = {name: why for extra in extras.values() for name, why in extra.get("errors", {}).items()}
    made = [f"{name} is installed and cannot be imported ({why}): install it again" for name, why in wrong.items()]
    if missing := [key for key, extra in extras.items() if extra["state"] == "missing"]:
        made.append(f"for what the missing extras do: pip install 'esolm[{','.join(missing)}]'")
    return made


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def gigabytes(size: float | None) -> str:
    """A size in words."""
    return "?" if size is None else f"{size / 1e9:,.1f} GB"


def lines(found: dict[str, Any]) -> list[str]:
    """The report as text."""
    texts: dict[str, Callable[[dict[str, Any]], str]] = {
        "python": lambda f: f"{f['version']} on {f['platform']}",
        "torch": lambda f: f"{f['version']}, " + (f"CUDA {f['cuda']}" if f["cuda"] else "without CUDA"),
        "device": lambda f: (
            f"{f['chosen']}; {f['cpu']}" + "".join(f"; {gpu['name']}, {gigabytes(gpu['memory'])}" for gpu in f["gpus"])
        ),
        "precision": lambda f: f"{f['chosen']}: {f['reason']}",
        "threads": lambda f: f"{f['torch']} of PyTorch on {f['allowed']} of {f['cores']} cores",
        "native": lambda f: f"{f['instructions'] or f['reason']}; self-test {f['self_test']}",
        "memory": lambda f: (
            f"{gigabytes(f['free'])} free of {gigabytes(f['total'])}, read at {gigabytes(f['read_bytes_per_second'])}/s"
        ),
        "disk": lambda f: f"{gigabytes(f['free'])} free of {gigabytes(f['total'])} in {f['folder']}",
    }
    made = [f"{'esolm':12} {found['esolm']}"]
    for name, text in texts.items():
        made.append(f"{name:12} {found[name].get('error') or text(found[name])}")
    made += ["", "extras:"]
    if "error" in found["extras"]:
        made.append(f"  {found['extras']['error']}")
    for key, extra in found["extras"].items() if "error" not in found["extras"] else ():
        state = extra["state"] if extra["state"] != "missing" else extra["install"]
        made.append(f"  {key:12} {state:33} {extra['for']}")
    return [*made, "", "advice:", *(f"  {line}" for line in found["advice"])]
