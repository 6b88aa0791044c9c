"""Cached steps as CUDA graphs: recorded once for each shape, then replayed without Python between the kernels.

A CUDA graph uses fixed addresses. Tokens, positions, slots and bias therefore go through buffers; a step reads keys up
to the next multiple of BUCKET, and the bias hides the surplus; and a new sample reuses the cache memory of a finished
one, with the graphs that were recorded on it.

Shapes: B batch, N new slots, S slots read, R rows that get logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.visibility import Packed, Visibility
from .cache import KVCache
from .denoiser import Rows
from .fold import Folded
from .head import Scoring
from .protocol import Network

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Record a function on fixed memory; returns a function that replays it, and the tensor that holds its result."""
BUCKET = 256
MOST = 64
"""Most graphs of one cache; steps of further shapes, as in ancestral sampling, run without a graph."""


def cuda_graphs(device: torch.device) -> Capture:
    """CUDA graphs that share one memory pool, since a result is copied before the next graph runs."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate at their first use, which must not be recorded
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                found = step()
        return graph.replay, found

    return capture


class Graph:
    """The graph of one step shape on the memory of one cache."""

    def __init__(self, net: Folded, room: KVCache, length: int, tokens: Tensor, position: Tensor, out: Rows) -> None:
        self.tokens, self.position = tokens.new_empty(tokens.shape), position.new_empty(position.shape)
        self.slot = tokens.new_empty(tokens.shape)
        self.bias = torch.empty(len(tokens), 1, tokens.shape[1], length, dtype=net.dtype, device=net.device)
        self.index = None if out.index is None else out.index.new_empty(out.index.shape)
        self.net, self.window, self.out = net, room.window(length, self.slot), Rows(out.span, self.index)
        self.replay: Callable[[], object] | None = None

    def fill(self, tokens: Tensor, position: Tensor, slot: Tensor, seen: Tensor, index: Tensor | None) -> None:
        """Copy the inputs of a step into the buffers; seen: bool [B|1, 1, N, at most S]."""
        self.tokens.copy_(tokens)
        self.position.copy_(position)
        self.slot.copy_(slot)
        self.bias.fill_(float("-inf"))
        self.bias[..., : seen.shape[-1]].masked_fill_(seen, 0.0)
        if self.index is not None and index is not None:
            self.index.copy_(index)

    def run(self, capture: Capture, visibility: Visibility) -> Tensor:
        """Logits [B, span, V] or [R, V] of the inputs in the buffers."""
        if self.replay is None:

            def step() -> Tensor:  # the bias replaces the visibility
                return self.net.head(
                    self.net.rows(self.tokens, self.position, visibility, self.window, self.bias, self.out)
                )

            self.replay, self.logits = capture(step)
        self.replay()
        return self.logits.clone()  # the next step overwrites them


class Room(NamedTuple):
    """The memory of a cache, and its graphs by shape; None until a shape has been seen twice."""

    memory: KVCache
    graphs: dict[tuple[int | None, ...], Graph | None]


class Graphed:
    """A folded network whose cached steps are recorded and replayed, with the same call."""

    def __init__(self, net: Folded, capture: Capture) -> None:
        self.net, self.capture = net, capture
        self.config, self.device, self.dtype = net.config, net.device, net.dtype
        self.rooms: list[Room] = []
        self.used: WeakKeyDictionary[KVCache, Room] = WeakKeyDictionary()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache, on the memory of a released cache of this size if there is one."""
        capacity = -(-capacity // BUCKET) * BUCKET
        live = list(self.used.values())
        free = (room for room in self.rooms if not any(room is other for other in live))
        room = next((room for room in free if room.memory.ranks.shape == (batch, capacity)), None)
        self.rooms = live  # frees memory of other sizes before a new cache is allocated
        with torch.inference_mode(False):  # the memory is used both in and outside of inference mode
            if room is None:
                room = Room(self.net.new_cache(batch, capacity), {})
            for t in (*room.memory.keys, *room.memory.values):
                t.zero_()
            cache = room.memory.again()
        self.rooms = [*live, room]
        self.used[cache] = room
        return cache

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
        """As Denoiser.forward; raises ValueError if a time is given."""
        out = out or Rows(slice(0, tokens.shape[1]))
        room = None if cache is None or time is not None or score is not None else self.used.get(cache)
        if cache is not None and room is not None and not isinstance(visibility, Packed):
            graph = self._graph(room, cache.extent, tokens, position, out)
            if graph is not None:
                graph.fill(tokens, position, cache.slots(tokens.shape[1]), cache.place(visibility), out.index)
                return graph.run(self.capture, visibility)
        return self.net(tokens, position, visibility, time, cache, out, score)

    def _graph(self, room: Room, extent: int, tokens: Tensor, position: Tensor, out: Rows) -> Graph | None:
        """The graph of this shape, from its second use on."""
        if tokens.is_floating_point():
            return None
        length = -(-(extent + tokens.shape[1]) // BUCKET) * BUCKET
        rows = None if out.index is None else len(out.index)
        shape = (*tokens.shape, len(position), length, out.span.start, out.span.stop, rows)
        if shape not in room.graphs:
            room.graphs[shape] = None
        elif room.graphs[shape] is None and sum(g is not None for g in room.graphs.values()) < MOST:
            with torch.inference_mode(False):
                room.graphs[shape] = Graph(self.net, room.memory, length, tokens, position, out)
        return room.graphs[shape]


def replayed(net: Folded) -> Network:
    """A folded network as it is fastest on its device: with graphs on CUDA, unchanged elsewhere."""
    return Graphed(net, cuda_graphs(net.device)) if net.device.type == "cuda" else net
