"""A network that counts its work, and requests for it.

Shapes: B batch, L length, N slots of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.net.cache import KVCache
from esolm.sampling.request import Request
from support import toy

VOCABULARY = 7


@dataclass
class Call:
    """What one pass did."""

    tokens: Tensor  # [B, N]
    position: Tensor  # [B, N]
    cached: bool
    head: int = 0  # rows of the vocabulary head
    mlp: int = 0  # rows of the last block's MLP
    writes: list[int] = field(default_factory=list)  # slots of a row written, one number a layer
    kept: list[int] | None = None  # slots of each row that stay


class Counting(nn.Module):
    """A network that counts. It is called as the real one, which does the work."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.config, self.embed = net, net.config, net.embed
        self.calls: list[Call] = []
        self.buffers_seen: set[tuple[int, ...]] = set()
        net.head.register_forward_hook(lambda _, inputs, out: self.add("head", inputs[0]))
        net.blocks[-1].mlp.register_forward_hook(lambda _, inputs, out: self.add("mlp", inputs[0]))

    def add(self, name: str, h: Tensor) -> None:
        call = self.calls[-1]
        setattr(call, name, getattr(call, name) + h.shape[:-1].numel())

    def forward(self, tokens: Tensor, position: Tensor, visibility: Any, time: Any = None, **named: Any) -> Tensor:
        self.calls.append(
            Call(tokens.clone(), position.expand(len(tokens), -1).clone(), named.get("cache") is not None)
        )
        return self.net(tokens, position, visibility, time, **named)

    def new_cache(self, batch: int, slots: int) -> KVCache:
        cache = self.net.new_cache(batch, slots)
        extend, commit = cache.extend, cache.commit

        def counted_extend(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            self.calls[-1].writes.append(k.shape[2])
            self.buffers_seen.add(tuple(t.data_ptr() for t in (*cache.keys, *cache.values)))
            return extend(layer, k, v)

        def counted_commit(count: int | Tensor, *rest: int) -> None:
            assert self.calls[-1].kept is None  # once a pass
            self.calls[-1].kept = [count] * batch if isinstance(count, int) else count.tolist()
            commit(count, *rest)

        cache.extend, cache.commit = counted_extend, counted_commit  # type: ignore[method-assign]
        return cache

    def committed(self, row: int) -> list[int]:
        """The positions of a row whose keys and values stayed, in the order in which they were committed."""
        found: list[int] = []
        for call in self.calls:
            if call.kept is not None:
                found += call.position[row, : call.kept[row]].tolist()
        return found


def ask(rows: list[list[int]], **options: Any) -> Request:
    """Rows of 1 (given) and 0 (to be drawn)."""
    longest = max(map(len, rows))
    known = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]).bool()
    valid = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    return toy.request(toy.text(len(rows), longest, VOCABULARY), known, valid, **options)


def count(system: Any, request: Request, **sizes: Any) -> tuple[Counting, Schedule, Tensor]:
    net = Counting(toy.network(VOCABULARY, request.x.shape[1], **sizes))
    rng = Randomness(4)
    schedule = system.plan(request, rng)
    tokens = request.x.clone()
    with torch.inference_mode():
        for step in system.sample(net, request, schedule, rng):
            row, column = step.drawn.nonzero(as_tuple=True)
            tokens[row, step.position[row, column]] = step.token[row, column]
    return net, schedule, tokens
