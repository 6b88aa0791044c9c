"""A folded network whose cached passes are one native call each.

Shapes: B batch, N new slots, H heads, C capacity, D head width, R rows that get logits, V vocabulary.
"""

from __future__ import annotations

import logging
from ctypes import c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.visibility import Packed, Visibility
from ..cache import KVCache
from ..conditioned import conditioned
from ..cuda_graphs import replayed
from ..denoiser import Denoiser, Rows
from ..fold import PRECISIONS, Folded, FoldedLinear, Maker, Norm, fold
from ..head import Scoring
from ..protocol import Network
from ..rotary import rotary_table
from . import library as native
from .library import BlockStruct, CallStruct, LinearStruct, ModelStruct, NormStruct, library
from .linear import SCRATCH, NativeBf16, NativeFloat32, NativeInt4, NativeInt8, NativeLinear, pointer

KINDS: dict[str, type[NativeLinear]] = {
    "float32": NativeFloat32,
    "bf16": NativeBf16,
    "int8": NativeInt8,
    "int4": NativeInt4,
}
ENGINES = ("auto", "native", "torch")
MOST_POSITIONS = 2**20
LABELS = ("position", "rank", "horizon", "clique")


class Described(NamedTuple):
    """The model as the library sees it, and the tensors that its pointers need."""

    struct: ModelStruct
    alive: tuple[Any, ...]


class Native:
    """The same calls as `Folded`. Cached passes over few rows are native; the rest runs in PyTorch, on the same weights
    and the same cache."""

    def __init__(self, net: Folded, threads: int | None = None) -> None:
        self.net, self.threads = net, threads
        self.config, self.device, self.dtype = net.config, net.device, net.dtype
        self.many = _native(net.head).many
        self.blocks = (BlockStruct * len(net.blocks))(*map(_block, net.blocks))
        self.model = self._describe(2 * net.config.length)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache in the precision of the products."""
        return self.net.new_cache(batch, capacity)

    def __call__(
        self,
        tokens: Tensor,
        position: Tensor,
        visibility: Visibility | Packed,
        time: Tensor | None = None,
        cache: KVCache | None = None,
        out: Rows | None = None,
        score: Scoring | None = None,
    ) -> Tensor:
        """As Denoiser.forward; raises ValueError for a time, which is zero here."""
        # The one rule: native is a cached pass over at most `many` rows that gives logits.
        few = 0 < tokens.shape[0] * tokens.shape[1] <= self.many
        if cache is None or isinstance(visibility, Packed) or time is not None or score is not None or not few:
            return self.net(tokens, position, visibility, time, cache, out, score)
        return self._step(tokens, position, visibility, cache, out or Rows(slice(0, tokens.shape[1])))

    def _step(self, tokens: Tensor, position: Tensor, visibility: Visibility, cache: KVCache, out: Rows) -> Tensor:
        batch, rows = tokens.shape[:2]
        labels = [
            _label(name, t, batch, rows)
            for name, t in zip(LABELS, (position, visibility.rank, visibility.horizon, visibility.clique))
        ]
        self._check(tokens, cache, out)
        cache.begin(visibility)
        span = out.span.stop - out.span.start
        outs = batch * span if out.index is None else len(out.index)
        logits = torch.empty(outs, self.config.vocab_size)
        ids, inputs = self._embed(tokens, labels[0])
        index = None if out.index is None else out.index.contiguous()
        start, stop = (out.span.start, out.span.stop) if outs else (0, 0)  # an empty index has no address
        shared = cache.even and cache.shared
        call = CallStruct(
            batch, rows, outs, cache.ranks.shape[1], self.threads or torch.get_num_threads(), start,
            stop, cache.even, cache.extent, cache.lengths.data_ptr(), pointer(ids), pointer(inputs),
            labels[0].data_ptr(), cache.ranks.data_ptr(), *(t.data_ptr() for t in labels[1:]), _stride(labels[0]),
            0 if shared else cache.ranks.stride(0), *map(_stride, labels[1:]), _pointers(cache.keys),
            _pointers(cache.values), pointer(index), logits.data_ptr(),
        )  # fmt: skip
        self._run(call, labels[0])
        return logits if out.index is not None else logits.unflatten(0, (batch, span))

    def _embed(self, tokens: Tensor, position: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Ids int64 [B, N] for the library to look up, or the inputs of the first block, float32 [B, N, W]: of
        probabilities [B, N, V], and of networks with learned positions."""
        if not tokens.is_floating_point() and self.net.places is None:
            return tokens.long().contiguous(), None
        return None, self.net.inputs(tokens, position).float().contiguous()

    def _run(self, call: CallStruct, position: Tensor) -> None:
        """Call the library; a position behind the rotary table extends it. Raises ValueError."""
        lib, model = library(), self.model
        call.scratch_bytes = lib.esolm_scratch_bytes(model.struct, call)
        memory = SCRATCH.at_least(call.scratch_bytes)
        call.scratch = memory.data_ptr()
        status = lib.esolm_step(model.struct, call)
        if status == native.BAD_POSITION and int(position.min()) >= 0 and int(position.max()) < MOST_POSITIONS:
            self.model = model = self._describe(1 << int(position.max()).bit_length())
            status = lib.esolm_step(model.struct, call)
        if status != native.OK:
            raise ValueError(f"the native step refused a call: {_REASONS[status]}")

    def _check(self, tokens: Tensor, cache: KVCache, out: Rows) -> None:
        """Raise ValueError unless the cache and the rows fit the network and the tokens."""
        c, (batch, rows) = self.config, tokens.shape[:2]
        if tokens.shape != ((batch, rows, c.vocab_size) if tokens.is_floating_point() else (batch, rows)):
            found = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(f"tokens are {found}; they must be ids [B, N] or probabilities [B, N, V]")
        shape = (batch, c.sizes.kv_heads, cache.ranks.shape[1], c.sizes.head_width)
        for t in (*cache.keys, *cache.values):
            if t.shape != shape or t.dtype != self.dtype or not t.is_contiguous():
                raise ValueError(f"the cache holds {t.dtype} {tuple(t.shape)}; this call needs {self.dtype} {shape}")
        if len(cache.keys) != c.layers or len(cache.values) != c.layers:
            raise ValueError(f"the cache has {len(cache.keys)} layers, the network {c.layers}")
        if cache.ranks.shape[0] != batch or not cache.ranks.is_contiguous() or cache.lengths.shape != (batch,):
            raise ValueError(f"the cache is for {cache.ranks.shape[0]} examples, and {batch} were given")
        if not 0 <= out.span.start <= out.span.stop <= rows:
            raise ValueError(f"the rows {out.span.start} to {out.span.stop} are not among the {rows} that were given")
        if out.index is not None and (out.index.dim() != 1 or out.index.dtype != torch.long):
            raise ValueError(f"index is {out.index.dtype} {tuple(out.index.shape)}; it must be int64 of one dimension")

    def _describe(self, positions: int) -> Described:
        """The model's struct, with a rotary table for the first `positions` positions if it has one."""
        c, net = self.config, self.net
        cos = sin = None
        if net.places is None:
            table = rotary_table(torch.arange(positions)[None], c, torch.float32)
            cos, sin = (t[0, 0].contiguous() for t in table)
        low = native.BF16 if self.dtype == torch.bfloat16 else native.FLOAT32
        struct = ModelStruct(
            c.layers, c.width, *c.sizes, c.vocab_size, c.norm == "rms", c.mlp == "swiglu", low, positions,
            pointer(cos), pointer(sin), self.blocks, _norm(net.norm), _linear(net.head), net.embed.weight.data_ptr(),
        )  # fmt: skip
        return Described(struct, (cos, sin))


_REASONS = {
    native.NO_INSTRUCTIONS: "this CPU has no AVX2 and FMA",
    native.BAD_MODEL: "the sizes of the network do not fit together",
    native.BAD_CALL: "the sizes of the call do not fit together",
    native.BAD_TOKEN: "a token is not in the vocabulary",
    native.BAD_POSITION: f"a position is not between 0 and {MOST_POSITIONS - 1}",
    native.BAD_INDEX: "an index is not among the rows of the span",
    native.FULL: "the cache is full",
}


def _label(name: str, t: Tensor, batch: int, rows: int) -> Tensor:
    """int64 with adjacent elements; raises ValueError unless it is [B|1, N]."""
    if t.shape not in ((1, rows), (batch, rows)):
        raise ValueError(f"{name} is {tuple(t.shape)}; it must be {(1, rows)} or {(batch, rows)}")
    t = t.long()
    return t if t.stride(1) == 1 or rows == 1 else t.contiguous()


def _stride(t: Tensor) -> int:
    return 0 if t.shape[0] == 1 else t.stride(0)


def _pointers(tensors: list[Tensor]) -> Any:
    return (c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def _native(linear: FoldedLinear) -> NativeLinear:
    assert isinstance(linear, NativeLinear), "fold with the native kinds of linear"
    return linear


def _linear(linear: FoldedLinear) -> LinearStruct:
    return _native(linear).struct


def _norm(norm: Norm | None) -> NormStruct:
    return NormStruct() if norm is None else NormStruct(norm.weight.data_ptr(), pointer(norm.bias), norm.eps)


def _block(block: Any) -> BlockStruct:
    norms = map(_norm, (block.norm1, block.norm2, block.q_norm, block.k_norm))
    project = (LinearStruct * 2)(*map(_linear, block.project))
    rest = map(_linear, (block.attn_out, block.mlp_up, block.mlp_down))
    return BlockStruct(*norms, project, *rest)


@torch.no_grad()
def native_fold(net: Denoiser, precision: str, threads: int | None = None) -> Native:
    """A copy of the network at time zero for inference by the native library; raises Unavailable.

    threads: of a cached pass; by default as many as PyTorch uses.
    """
    if precision not in KINDS:
        raise ValueError(f"no precision {precision!r}: choose one of {', '.join(KINDS)}")
    library()
    if net.device.type != "cpu":
        raise native.Unavailable(f"the network is on {net.device}")
    return Native(Folded(net, Maker(KINDS[precision], PRECISIONS[precision])), threads)


def fold_for(net: Denoiser, precision: str, engine: str = "auto", timed: bool = False) -> Network:
    """A copy of the network at time zero for inference, as it is fastest on its device.

    engine: `native` raises ValueError where the native library cannot be used; `auto` then takes `torch`.
    timed: the network is fed times, so that nothing can be folded: the copy runs in float32 or bf16 in PyTorch.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if timed:
        if engine == "native":
            raise ValueError("engine native has networks at time zero only, and this one is fed the time: choose torch")
        return conditioned(net, precision)
    if engine != "torch":
        try:
            return native_fold(net, precision)
        except native.Unavailable as error:
            if engine == "native":
                raise ValueError(f"engine native cannot be used: {error}. Choose auto or torch") from error
            if isinstance(error, native.Broken):
                logging.getLogger("esolm").warning("%s; until then sampling runs in PyTorch", error)
    return replayed(fold(net, precision))
