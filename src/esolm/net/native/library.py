"""The compiled library: its C types, and loading it with checks of version, layout and results."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).with_name("libesolm_native.so.1")
VERSION = 2
"""Of native.h."""
INSTRUCTIONS = {1: "AVX2", 2: "AVX-512"}
CHOICE = "ESOLM_NATIVE_ISA"
"""Environment variable: `avx2` leaves AVX-512 unused, to compare the two or to work around a fault of the CPU."""
FLOAT32, BF16, INT8, INT4 = range(4)
OK, NO_INSTRUCTIONS, BAD_MODEL, BAD_CALL, BAD_TOKEN, BAD_POSITION, BAD_INDEX, FULL = range(8)


class Unavailable(ValueError):
    """The native library cannot be used; the message says why."""


class Broken(Unavailable):
    """The library is there, and does not work: it is damaged, or of another version."""


class LinearStruct(Structure):
    """A linear layer, as the C++ library declares it."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int32) for name in ("outputs", "inputs", "format", "reserved")),
    ]


class NormStruct(Structure):
    """A normalisation, as the C++ library declares it."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_double)]


class BlockStruct(Structure):
    """A block of the transformer, as the C++ library declares it."""

    _fields_ = [
        *((name, NormStruct) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        ("project", LinearStruct * 2),
        *((name, LinearStruct) for name in ("out", "up", "down")),
    ]


class ModelStruct(Structure):
    """A network, as the C++ library declares it."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_width", "inner", "vocab")),
        *((name, c_int32) for name in ("norm_kind", "mlp_kind", "cache_format")),
        *(("positions", c_int64), ("cos", c_void_p), ("sin", c_void_p)),
        *(("blocks", POINTER(BlockStruct)), ("norm", NormStruct), ("head", LinearStruct), ("embed", c_void_p)),
    ]


class CallStruct(Structure):
    """The arguments of a pass, as the C++ library declares them."""

    _fields_ = [
        *((name, c_int32) for name in ("batch", "rows", "outs", "capacity", "threads")),
        *((name, c_int32) for name in ("span_start", "span_stop", "even")),
        ("extent", c_int64),
        *(
            (name, c_void_p)
            for name in ("lengths", "tokens", "inputs", "position", "ranks", "rank", "horizon", "clique")
        ),
        *((f"{name}_stride", c_int64) for name in ("position", "ranks", "rank", "horizon", "clique")),
        *((name, POINTER(c_void_p)) for name in ("keys", "values")),
        *((name, c_void_p) for name in ("index", "logits", "scratch")),
        ("scratch_bytes", c_int64),
    ]


STRUCTS = (LinearStruct, NormStruct, BlockStruct, ModelStruct, CallStruct)


@functools.cache
def library() -> Any:
    """The library, checked; raises Unavailable."""
    lib = declared(PATH)
    if lib.esolm_version() != VERSION:
        raise Broken(f"{PATH.name} has version {lib.esolm_version()}, not {VERSION}: install esolm again")
    if [lib.esolm_struct_bytes(i) for i in range(len(STRUCTS))] != [ctypes.sizeof(s) for s in STRUCTS]:
        raise Broken(f"{PATH.name} was built for another layout of structs: install esolm again")
    choice = os.environ.get(CHOICE, "avx512")
    if choice not in ("avx2", "avx512"):
        raise Unavailable(f"{CHOICE} is {choice!r}; it must be avx2 or avx512")
    if lib.esolm_isa(1 if choice == "avx2" else -1) == 0:
        raise Unavailable("this CPU has no AVX2 and FMA")
    borrow_threads(lib)
    self_test(lib)
    return lib


def declared(path: Path) -> Any:
    """The functions of the library at `path` with their types; raises Unavailable."""
    if not path.exists():
        raise Unavailable(f"{path.name} was not built: install esolm with a C++ compiler on x86-64 Linux")
    try:
        lib: Any = ctypes.CDLL(str(path))
        results: dict[str, Any] = {
            "version": c_int32, "struct_bytes": c_int64, "isa": c_int32, "packed_bytes": c_int64, "pack": None,
            "unpack": None, "huge_pages": None, "linear_scratch_bytes": c_int64, "linear": c_int32,
            "scratch_bytes": c_int64, "step": c_int32, "read": c_uint32, "openmp": None,
        }  # fmt: skip
        linear, model, call = POINTER(LinearStruct), POINTER(ModelStruct), POINTER(CallStruct)
        arguments: dict[str, list[Any]] = {
            "pack": [c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p],
            "unpack": [c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p],
            "huge_pages": [c_void_p, c_int64],
            "linear_scratch_bytes": [linear, c_int32, c_int32],
            "linear": [linear, c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p],
            "scratch_bytes": [model, call],
            "step": [model, call],
            "read": [c_void_p, c_int64, c_int32],
            "openmp": [c_void_p, c_void_p],
        }
        for name, result in results.items():
            function = getattr(lib, f"esolm_{name}")
            function.restype = result
            if name in arguments:
                function.argtypes = arguments[name]
    except (OSError, AttributeError) as error:
        raise Broken(f"{path.name} cannot be loaded: {error}") from error
    return lib


def borrow_threads(lib: Any) -> None:
    """Run on PyTorch's OpenMP threads where they are GNU's or compatible; otherwise the library starts its own."""
    with contextlib.suppress(OSError, AttributeError):
        torch_lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = torch_lib.GOMP_parallel, torch_lib.omp_get_num_threads
        lib.esolm_openmp(*(ctypes.cast(function, c_void_p) for function in functions))


def self_test(lib: Any) -> None:
    """Multiply small matrices in every format; raises Unavailable if a result is wrong."""
    outputs, inputs, rows = 35, 40, 3
    whole = (torch.arange(outputs * inputs) * 7 % 15 - 7).view(outputs, inputs)
    x, scale = torch.arange(rows * inputs).view(rows, inputs).float() % 11 - 5, torch.ones(64)
    scales = torch.ones(outputs, 2, dtype=torch.bfloat16)
    stored = whole.float(), whole.bfloat16(), whole.to(torch.int8), (whole + 8).to(torch.uint8)
    for form, weight in enumerate(stored):
        packed = torch.empty(lib.esolm_packed_bytes(form, outputs, inputs) + 64, dtype=torch.uint8)
        at = packed.data_ptr() + -packed.data_ptr() % 64
        lib.esolm_pack(form, weight.data_ptr(), scales.data_ptr(), outputs, inputs, at)
        linear = LinearStruct(at, scale.data_ptr(), None, outputs, inputs, form)
        scratch = torch.empty(lib.esolm_linear_scratch_bytes(linear, rows, 1), dtype=torch.uint8)
        found = torch.empty(rows, outputs)
        status = lib.esolm_linear(linear, x.data_ptr(), rows, found.data_ptr(), 0, 1, scratch.data_ptr())
        # Not x @ whole.T: oneDNN would read its variables before runtime.machine.settle has set them.
        expected = (x[:, None] * whole).sum(-1)
        if status != OK or not torch.allclose(found, expected, rtol=1e-3, atol=1e-2):
            raise Broken(f"{PATH.name} fails its self-test in format {form}: install esolm again")


def use(instructions: int) -> int:
    """Lower the instruction set to 1 (AVX2) or allow 2 (AVX-512); returns the one in use. For tests."""
    return library().esolm_isa(instructions)


def status() -> str:
    """One line: the engine that `auto` chooses on the CPU, and why."""
    try:
        return f"native, with {INSTRUCTIONS[library().esolm_isa(-1)]}"
    except Unavailable as error:
        return f"torch: {error}"
