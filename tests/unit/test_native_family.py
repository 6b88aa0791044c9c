"""The parts of the native interface that this package's own network does not use yet, against a plain network in
PyTorch: RMSNorm, SwiGLU, fewer heads of keys and values than of queries, QK-norm, biases, a tied head.

Shapes: B batch, N new slots, H heads, K heads of keys and values, D head width, C capacity, W width, I inner width.
"""

from __future__ import annotations

from ctypes import c_void_p
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esolm.net.native import library
from esolm.net.native.library import BlockStruct, CallStruct, LinearStruct, ModelStruct, NormStruct
from esolm.net.native.linear import NativeFloat32
from esolm.net.rotary import rotate

try:
    library.library()
except library.Unavailable as error:
    pytest.skip(str(error), allow_module_level=True)

B, N, C, V, LAYERS, PAST = 2, 3, 9, 11, 2, 4
EPS = 1e-6


class Family:
    """Random weights of one architecture, its step in PyTorch, and its description for the library."""

    def __init__(self, heads: int, kv_heads: int, head_width: int, swiglu: bool, rms: bool, qk_norm: bool, bias: bool):
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.swiglu, self.rms, self.width, self.inner = swiglu, rms, 20, 27
        attended, kept = heads * head_width, kv_heads * head_width
        sizes = {
            "qkv": (attended + 2 * kept, self.width),
            "out": (self.width, attended),
            "up": (self.inner * (1 + swiglu), self.width),
            "down": (self.width, self.inner),
        }
        self.blocks: list[dict[str, Any]] = []
        for _ in range(LAYERS):
            block: dict[str, Any] = {name: torch.randn(size) / size[1] ** 0.5 for name, size in sizes.items()}
            block |= {f"{name}_bias": torch.randn(size[0]) if bias else None for name, size in sizes.items()}
            block |= {name: 1 + 0.3 * torch.randn(self.width) for name in ("norm1", "norm2")}
            block |= {name: torch.rand(head_width) + 0.5 if qk_norm else None for name in ("q_norm", "k_norm")}
            self.blocks.append(block)
        self.embed, self.norm = torch.randn(V, self.width), 1 + 0.3 * torch.randn(self.width)
        angle = torch.arange(C)[:, None] * 100 ** -(torch.arange(head_width // 2) / head_width)
        self.cos, self.sin = angle.cos().contiguous(), angle.sin().contiguous()

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        return F.rms_norm(x, shape, weight, EPS) if self.rms else F.layer_norm(x, shape, weight, None, EPS)

    def step(self, tokens: Tensor, position: Tensor, seen: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Logits [B, N, V]; new keys and values are written after PAST slots."""
        h, cos, sin = self.embed[tokens], self.cos[position][:, None], self.sin[position][:, None]
        counts = (self.heads, self.kv_heads, self.kv_heads)
        for layer, block in enumerate(self.blocks):
            parts = F.linear(self.normed(h, block["norm1"]), block["qkv"], block["qkv_bias"])
            parts = parts.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            q, k, v = parts.split(counts, 1)
            if block["q_norm"] is not None:
                q, k = (F.rms_norm(t, t.shape[-1:], block[f"{n}_norm"], EPS) for t, n in ((q, "q"), (k, "k")))
            keys[layer][:, :, PAST : PAST + N], values[layer][:, :, PAST : PAST + N] = rotate(k, cos, sin), v
            k, v = (t[:, :, : PAST + N] for t in (keys[layer], values[layer]))
            mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, attn_mask=seen, enable_gqa=True)
            h = h + F.linear(mixed.transpose(1, 2).flatten(2), block["out"], block["out_bias"])
            up = F.linear(self.normed(h, block["norm2"]), block["up"], block["up_bias"])
            if self.swiglu:
                gate, value = up.chunk(2, -1)
                up = F.silu(gate) * value
            else:
                up = F.gelu(up, approximate="tanh")
            h = h + F.linear(up, block["down"], block["down_bias"])
        return self.normed(h, self.norm) @ self.embed.T

    def described(self) -> tuple[ModelStruct, list[Any]]:
        """The struct, and what must stay alive as long as it."""
        alive: list[Any] = []

        def linear(weight: Tensor, bias: Tensor | None) -> LinearStruct:
            alive.append(NativeFloat32(weight, bias, False))
            return alive[-1].struct

        def norm(weight: Tensor | None) -> NormStruct:
            return NormStruct(None if weight is None else weight.data_ptr(), None, EPS)

        blocks = (BlockStruct * LAYERS)()
        for i, b in enumerate(self.blocks):
            project = (LinearStruct * 2)(linear(b["qkv"], b["qkv_bias"]))
            rest = (linear(b[name], b[f"{name}_bias"]) for name in ("out", "up", "down"))
            norms = (norm(b[name]) for name in ("norm1", "norm2", "q_norm", "k_norm"))
            blocks[i] = BlockStruct(*norms, project, *rest)
        sizes = (LAYERS, self.width, self.heads, self.kv_heads, self.head_width, self.inner, V)
        struct = ModelStruct(
            *sizes, int(self.rms), int(self.swiglu), library.FLOAT32, C, self.cos.data_ptr(), self.sin.data_ptr(),
            blocks, norm(self.norm), linear(self.embed, None), self.embed.data_ptr(),
        )  # fmt: skip
        return struct, [*alive, blocks]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("instructions", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("swiglu", "rms", "qk_norm"), [(True, True, False), (True, True, True), (False, False, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 6), (6, 1, 32), (3, 3, 64), (4, 2, 64)])
def test_family(
    heads: int, kv_heads: int, width: int, swiglu: bool, rms: bool, qk_norm: bool, bias: bool, instructions: int,
    threads: int,
) -> None:  # fmt: skip
    if library.use(instructions) != instructions:
        pytest.skip("the CPU has no AVX-512 with VNNI")
    net = Family(heads, kv_heads, width, swiglu, rms, qk_norm, bias)
    tokens, position = torch.randint(V, (B, N)), torch.randint(C, (B, N))
    ranks, rank = torch.arange(C).expand(B, -1).contiguous(), torch.arange(PAST, PAST + N).expand(B, -1).contiguous()
    none = torch.full_like(rank, -1)
    keys, values = ([torch.randn(B, kv_heads, C, width) for _ in range(LAYERS)] for _ in range(2))
    own_keys, own_values = ([t.clone() for t in part] for part in (keys, values))
    seen = torch.arange(PAST + N) <= rank[:, :, None]
    expected = net.step(tokens, position, seen[:, None], keys, values)
    struct, _alive = net.described()
    found = torch.empty(B, N, V)
    pointers = [(c_void_p * LAYERS)(*(t.data_ptr() for t in part)) for part in (own_keys, own_values)]
    call = CallStruct(
        B, N, B * N, C, threads, 0, N, True, PAST, None, tokens.data_ptr(), None, position.data_ptr(), ranks.data_ptr(),
        rank.data_ptr(), rank.data_ptr(), none.data_ptr(), N, C, N, N, N, *pointers, None, found.data_ptr(),
    )  # fmt: skip
    lib = library.library()
    call.scratch_bytes = lib.esolm_scratch_bytes(struct, call)
    memory = torch.empty(call.scratch_bytes, dtype=torch.uint8)
    call.scratch = memory.data_ptr()
    assert lib.esolm_step(struct, call) == library.OK
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, two in zip((*own_keys, *own_values), (*keys, *values)):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    library.use(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_heads", 3), ("head_width", 5), ("head_width", 4096), ("vocab", 12), ("norm_kind", 2), ("mlp_kind", 7),
     ("cache_format", 2), ("layers", 0), ("inner", 28), ("embed", None), ("width", 1 << 20)],
)  # fmt: skip
def test_models_that_do_not_fit_are_refused(field: str, value: Any) -> None:
    struct, _alive = Family(4, 2, 6, True, True, False, False).described()
    setattr(struct, field, value)
    found = library.library().esolm_step(struct, CallStruct())
    assert found == library.BAD_MODEL


def test_calls_that_do_not_fit_are_refused() -> None:
    struct, _alive = Family(4, 2, 6, True, True, False, False).described()
    assert library.library().esolm_step(struct, CallStruct()) == library.BAD_CALL
