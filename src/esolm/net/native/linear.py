"""Linear layers whose weights lie in the order in which the native kernels read them.

Shapes: R rows, O outputs, I inputs.
"""

from __future__ import annotations

import functools
import threading
from typing import ClassVar

import torch
from torch import Tensor

from ..fold import FoldedLinear, Int4Linear, Int8Linear, PackedLinear, PlainLinear, packs
from ..rounding import from_int4, to_int4, to_int8
from .library import BF16, FLOAT32, INT4, INT8, OK, LinearStruct, library

PANEL = 32
HUGE = 2**21


class Scratch(threading.local):
    """Working memory of each Python thread; it grows and is kept."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, size: int) -> Tensor:
        """At least `size` bytes; their content is undefined."""
        if len(self.memory) < size:
            self.memory = torch.empty(size + size // 2, dtype=torch.uint8)
        return self.memory


SCRATCH = Scratch()


class NativeLinear:
    """x weight + bias, and GELU after it, by the native kernel for few rows."""

    rounds = True
    form: ClassVar[int]
    many: ClassVar[int] = 512
    """Above so many rows a product is limited by arithmetic, and PyTorch's is used. In low precision its kernels are
    slower up to there unless the CPU has AMX; in float32 they draw level at 50 (AVX-512) to 100 (AVX2) rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gelu: bool) -> None:
        self.outputs, self.inputs = weight.shape
        self.gelu = gelu
        stored, scale = self.stored(weight.float())
        self.packed = aligned(library().esolm_packed_bytes(self.form, *weight.shape))
        groups = scale.data_ptr() if scale is not None and scale.dim() == 2 else None
        library().esolm_pack(self.form, stored.data_ptr(), groups, *weight.shape, self.packed.data_ptr())
        self.scale, self.bias = padded(scale if groups is None else None), padded(bias)
        self.struct = LinearStruct(
            self.packed.data_ptr(), pointer(self.scale), pointer(self.bias), self.outputs, self.inputs, self.form
        )

    @staticmethod
    def stored(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The numbers to pack [O, I], and their scales: float32 [O] or bf16 [O, G]."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.inputs
        if rows > self.many:
            return self.twin(x)
        lib, threads, given = library(), torch.get_num_threads(), x.float().contiguous()
        memory = SCRATCH.at_least(lib.esolm_linear_scratch_bytes(self.struct, rows, threads))
        y = torch.empty(*x.shape[:-1], self.outputs)
        status = lib.esolm_linear(
            self.struct, given.data_ptr(), rows, y.data_ptr(), self.gelu, threads, memory.data_ptr()
        )
        assert status == OK, status
        return y.to(x.dtype)

    def weight(self) -> Tensor:
        """The weights as they are multiplied, float32 [O, I]."""
        shape, groups = (self.outputs, self.inputs), -(-self.inputs // PANEL)
        kinds = {FLOAT32: torch.float32, BF16: torch.bfloat16, INT8: torch.int8, INT4: torch.uint8}
        found = torch.empty(shape, dtype=kinds[self.form])
        scale = torch.empty(self.outputs, groups, dtype=torch.bfloat16) if self.form == INT4 else None
        library().esolm_unpack(self.form, self.packed.data_ptr(), *shape, found.data_ptr(), pointer(scale))
        if scale is not None:
            return from_int4(found, scale)
        return found.float() if self.scale is None else found.float() * self.scale[: self.outputs, None]

    @functools.cached_property
    def twin(self) -> FoldedLinear:
        """The same layer in PyTorch, made at its first use."""
        dtype = torch.float32 if self.form == FLOAT32 else torch.bfloat16
        plain: type[FoldedLinear] = PackedLinear if packs(dtype, torch.device("cpu")) else PlainLinear
        rounded: dict[int, type[FoldedLinear]] = {INT8: Int8Linear, INT4: Int4Linear}
        kind = rounded.get(self.form, plain)
        bias = None if self.bias is None else self.bias[: self.outputs].to(dtype)
        weight = self.weight()
        return kind(weight if kind.rounds else weight.to(dtype), bias, self.gelu)


class NativeFloat32(NativeLinear):
    """Weights in float32."""

    form = FLOAT32
    many = 64

    @staticmethod
    def stored(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return weight.contiguous(), None


class NativeBf16(NativeLinear):
    """Weights in bfloat16."""

    form = BF16

    @staticmethod
    def stored(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return weight.to(torch.bfloat16).contiguous(), None


class NativeInt8(NativeLinear):
    """Weights in 8 bits, with a scale for each output."""

    form = INT8

    @staticmethod
    def stored(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        whole, scale = to_int8(weight)
        return whole.contiguous(), scale.float()


class NativeInt4(NativeLinear):
    """Weights in 4 bits, with a scale for each group of inputs."""

    form = INT4

    @staticmethod
    def stored(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return to_int4(weight)


def padded(t: Tensor | None) -> Tensor | None:
    """float32 [O] with zeros up to a multiple of PANEL, which kernels read in whole vectors."""
    return None if t is None else torch.nn.functional.pad(t.detach().float(), (0, -len(t) % PANEL)).contiguous()


def pointer(t: Tensor | None) -> int | None:
    """The address of a tensor, or None without one."""
    return None if t is None else t.data_ptr()


def aligned(size: int) -> Tensor:
    """Memory at a multiple of a huge page, or of a cache line if it is small."""
    step = HUGE if size >= HUGE else 64
    memory = torch.empty(size + step, dtype=torch.uint8)
    found = memory[-memory.data_ptr() % step :][:size]
    if step == HUGE:
        library().esolm_huge_pages(found.data_ptr(), size)
    return found
