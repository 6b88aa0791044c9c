"""The cached step as a graph: recorded once for each shape, then replayed without Python between its kernels.

A graph has its memory for good. Tokens, positions, slots and bias therefore go through buffers; a step reads as many
keys as the next multiple of BUCKET, of which the bias hides the rest; and a sample gets the cache memory of one that
has ended, with the graphs that were recorded on it.

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
from .head import Score
from .protocol import Network

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""From a function of fixed memory: what does the same again, and where its result then stands."""
BUCKET = 256
MOST = 64
"""Graphs of one cache; where steps have more shapes than that, as in ancestral sampling, the rest run as they are."""


def cuda_graphs(device: torch.device) -> Capture:
    """CUDA's own; all graphs share memory, since none of them runs while another's result is wanted."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate at their first use, which a recording must not see
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                found = step()
        return graph.replay, found

    return capture


class Graph:
    """One shape of step on one cache's memory."""

    def __init__(self, net: Folded, room: KVCache, length: int, tokens: Tensor, position: Tensor, out: Rows) -> None:
        self.tokens, self.position = tokens.new_empty(tokens.shape), position.new_empty(position.shape)
        self.slot = tokens.new_empty(tokens.shape)
        self.bias = torch.empty(len(tokens), 1, tokens.shape[1], length, dtype=net.dtype, device=net.device)
        self.index = None if out.index is None else out.index.new_empty(out.index.shape)
        self.net, self.window, self.out = net, room.window(length, self.slot), Rows(out.span, self.index)
        self.replay: Callable[[], object] | None = None

    def fill(self, tokens: Tensor, position: Tensor, slot: Tensor, seen: Tensor, index: Tensor | None) -> None:
        """The inputs of a step; seen: bool [B|1, 1, N, at most S]."""
        self.tokens.copy_(tokens)
        self.position.copy_(position)
        self.slot.copy_(slot)
        self.bias.fill_(float("-inf"))
        self.bias[..., : seen.shape[-1]].masked_fill_(seen, 0.0)
        if self.index is not None and index is not None:
            self.index.copy_(index)

    def run(self, capture: Capture, visibility: Visibility) -> Tensor:
        """Logits [B, span, V] or [R, V] of what was filled in."""
        if self.replay is None:

            def step() -> Tensor:  # the bias stands for the visibility
                return self.net.head(
                    self.net.rows(self.tokens, self.position, visibility, self.window, self.bias, self.out)
                )

            self.replay, self.logits = capture(step)
        self.replay()
        return self.logits.clone()  # the next step overwrites them


class Room(NamedTuple):
    """A cache's memory, and the graphs on it; None where a shape was met once, which is not worth a recording."""

    memory: KVCache
    graphs: dict[tuple[int | None, ...], Graph | None]


class Graphed:
    """A folded network, called in the same way, whose cached steps are recorded and replayed."""

    def __init__(self, net: Folded, capture: Capture) -> None:
        self.net, self.capture = net, capture
        self.config, self.device, self.dtype = net.config, net.device, net.dtype
        self.rooms: list[Room] = []
        self.used: WeakKeyDictionary[KVCache, Room] = WeakKeyDictionary()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache, in the memory of one of this size that nobody holds any more, if there is one."""
        capacity = -(-capacity // BUCKET) * BUCKET
        live = list(self.used.values())
        free = (room for room in self.rooms if not any(room is other for other in live))
        room = next((room for room in free if room.memory.ranks.shape == (batch, capacity)), None)
        self.rooms = live  # before there is another, memory of other sizes goes back
        with torch.inference_mode(False):  # used in and outside of inference mode
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
        score: Score | None = None,
    ) -> Tensor:
        """As Denoiser.forward; raises ValueError for a time, which is zero here."""
        out = out or Rows(slice(0, tokens.shape[1]))
        room = None if cache is None or time is not None or score is not None else self.used.get(cache)
        if cache is not None and room is not None and not isinstance(visibility, Packed):
            graph = self._graph(room, cache.extent, tokens, position, out)
            if graph is not None:
                graph.fill(tokens, position, cache.slots(tokens.shape[1]), cache.place(visibility), out.index)
                return graph.run(self.capture, visibility)
        return self.net(tokens, position, visibility, time, cache, out, score)

    def _graph(self, room: Room, extent: int, tokens: Tensor, position: Tensor, out: Rows) -> Graph | None:
        """The graph of this shape, from its second step on."""
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
