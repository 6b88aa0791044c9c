"""The approximate caches as their authors describe them, for one row: loops, and keys and values in dictionaries.

Nothing of the library is used but its random numbers. A pass is told which positions it feeds and which stored keys and
values they may read beside their own; every rule about which of these are out of date is written out where it applies.

Shapes: V vocabulary, H heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esolm.core.randomness import Randomness
from esolm.sampling.chooser import Chooser
from support import paper

Stored = list[dict[int, tuple[Tensor, Tensor]]]
"""For each layer, keys and values [H, D] by position."""
TIE = 1e-5
"""Confidences closer than this are equal, and the leftmost is preferred."""


def forward(net: Any, tokens: dict[int, int], stored: Stored | None) -> tuple[dict[int, Tensor], Stored]:
    """Logits [V] of the fed positions, and their keys and values. `tokens` are fed; they read what is stored too."""
    w, c = {name: p.detach() for name, p in net.named_parameters()}, net.config
    fed = sorted(tokens)
    h = w["embed.weight"][torch.tensor([tokens[i] for i in fed])]
    if c.positions == "learned":
        h = h + w["places.weight"][torch.tensor(fed)]
    one, zero = torch.ones(h.shape[1], dtype=h.dtype), torch.zeros(h.shape[1], dtype=h.dtype)
    condition = None
    if c.adaln:  # time 0: cosines are 1 and sines are 0
        feature = torch.cat([torch.ones(128, dtype=h.dtype), torch.zeros(128, dtype=h.dtype)])
        condition = paper.silu(paper.linear(paper.silu(paper.linear(feature, w, "time.0")), w, "time.2"))
    made: Stored = []
    for n in range(c.layers):
        p = {name.removeprefix(f"blocks.{n}."): t for name, t in w.items() if name.startswith(f"blocks.{n}.")}
        shift1, scale1, gate1, shift2, scale2, gate2 = zero, zero, one, zero, zero, one
        if condition is not None:
            shift1, scale1, gate1, shift2, scale2, gate2 = paper.modulation(condition, p, 6)
        q, k, v = heads(paper.norm(h, p, "norm1", c) * (1 + scale1) + shift1, p, c, fed)
        made.append({i: (k[j], v[j]) for j, i in enumerate(fed)})
        mixed = attend(q, {**(stored[n] if stored else {}), **made[n]}, c)
        h = h + gate1 * paper.linear(mixed, p, "attn_out")
        a = paper.linear(paper.norm(h, p, "norm2", c) * (1 + scale2) + shift2, p, "mlp.0")
        half = a.shape[1] // 2
        a = paper.silu(a[:, :half]) * a[:, half:] if c.mlp == "swiglu" else paper.gelu(a)
        h = h + gate2 * paper.linear(a, p, "mlp.2")
    h = paper.norm(h, w, "norm", c)
    if condition is not None:
        shift, scale = paper.modulation(condition, w, 2)
        h = h * (1 + scale) + shift
    out = paper.linear(h, {"head.weight": w["embed.weight"], **w}, "head")
    return {i: out[j] for j, i in enumerate(fed)}, made


def heads(a: Tensor, p: dict[str, Tensor], c: Any, fed: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the fed positions, rotated: [n, H, D]."""
    kept = c.kv_heads or c.heads
    wide = c.head_width or c.width // c.heads
    parts = paper.linear(a, p, "attn_qkv").split((c.heads * wide, kept * wide, kept * wide), -1)
    q, k, v = (t.reshape(len(a), -1, wide) for t in parts)
    if c.qk_norm:
        q, k = (t / (t.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() for t in (q, k))
        q, k = q * p["q_norm.weight"], k * p["k_norm.weight"]
    if c.positions == "rotary":
        q, k = paper.rotary(q, fed, c), paper.rotary(k, fed, c)
    return q, k, v


def attend(q: Tensor, seen: dict[int, tuple[Tensor, Tensor]], c: Any) -> Tensor:
    """Every query over all keys of `seen`: [n, H, D] -> [n, H D]."""
    keys, values = (torch.stack([seen[i][part] for i in sorted(seen)]) for part in (0, 1))
    shared = c.heads // (c.kv_heads or c.heads)
    mixed = torch.zeros_like(q)
    for head in range(c.heads):
        score = q[:, head] @ keys[:, head // shared].T / math.sqrt(q.shape[-1])
        mixed[:, head] = score.softmax(-1) @ values[:, head // shared]
    return mixed.flatten(1)


def only(stored: Stored, positions: Iterable[int]) -> Stored:
    kept = set(positions)
    return [{i: kv for i, kv in layer.items() if i in kept} for layer in stored]


def merged(old: Stored, new: Stored) -> Stored:
    return [{**a, **b} for a, b in zip(old, new, strict=True)]


@dataclass
class Sample:
    """One row that is being unmasked, in blocks from its first undecided position on."""

    net: Any
    tokens: list[int | None]  # None where a token is to be drawn
    mask: int
    choose: Chooser  # of this row
    row: int
    block_length: int | None = None
    counts: list[int] | None = None  # tokens kept in each pass; None: by tau
    tau: float = 0.9
    measure: str = "probability"
    logits: list[dict[int, Tensor]] = field(default_factory=list)  # of the candidates, in each pass
    fed: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)  # kept positions, surest first

    @property
    def now(self) -> int:
        """The number of the next commit."""
        return len(self.steps)

    def everything(self) -> range:
        return range(len(self.tokens))

    def blocks(self) -> Iterator[range]:
        """Blocks that have something to draw."""
        first = self.tokens.index(None)
        size = self.block_length or len(self.tokens)
        for begin in range(first, len(self.tokens), size):
            block = range(begin, min(begin + size, len(self.tokens)))
            if any(self.tokens[i] is None for i in block):
                yield block

    def run(self, fed: Iterable[int], stored: Stored | None = None) -> tuple[dict[int, Tensor], Stored]:
        tokens = {i: self.mask if self.tokens[i] is None else self.tokens[i] for i in fed}
        self.fed.append(len(tokens))
        return forward(self.net, tokens, stored)

    def open(self, block: range) -> list[int]:
        return [i for i in block if self.tokens[i] is None]

    def commit(self, logits: dict[int, Tensor], block: range) -> None:
        """Draw every mask of the block, and keep the surest."""
        candidates = self.open(block)
        self.logits.append({i: logits[i] for i in candidates})
        chooser = Chooser(self.choose.draw, self.choose.rng.at(self.now), self.mask)
        drawn = {}
        for i in candidates:
            token = int(chooser(logits[i][None], torch.tensor([self.row]), torch.tensor([i])))
            drawn[i] = token, self.sure(logits[i], token)
        groups = list[list[int]]()  # of equal confidence, surest first
        for i in sorted(candidates, key=lambda i: -drawn[i][1]):
            if groups and drawn[groups[-1][-1]][1] - drawn[i][1] <= TIE:
                groups[-1].append(i)
            else:
                groups.append([i])
        ranked = [i for group in groups for i in sorted(group)]
        if self.counts is not None:
            kept = ranked[: self.counts[self.now]]
        else:
            sure = [i for group in groups if drawn[group[0]][1] >= self.tau for i in sorted(group)]
            kept = sure or ranked[:1]
        for i in kept:
            self.tokens[i] = drawn[i][0]
        self.steps.append(kept)

    def sure(self, logits: Tensor, token: int) -> float:
        real = [i for i in range(len(logits)) if i != self.mask]
        total = sum(math.exp(float(logits[i] - logits.max())) for i in real)
        p = {i: math.exp(float(logits[i] - logits.max())) / total for i in real}
        if self.measure == "probability":
            return p[token]
        if self.measure == "entropy":
            return math.exp(sum(value * math.log(value) for value in p.values() if value > 0))
        first, second = sorted(p.values())[-2:][::-1]
        return first - second


def uncached(s: Sample) -> None:
    for block in s.blocks():
        while s.open(block):
            s.commit(s.run(s.everything())[0], block)


def fast_dllm(s: Sample, dual: bool, refresh: int | None = None) -> None:
    """Section Fast-dLLM of the specification, by its numbers."""
    for block in s.blocks():
        step, cache = 0, None
        while s.open(block):  # 7
            if cache is None or (refresh and step % refresh == 0):
                logits, found = s.run(s.everything())  # 1, and 2: its logits commit
                cache = found if dual else only(found, range(block.start))  # 3
            elif dual:
                outside = only(cache, set(s.everything()) - set(block))
                logits, found = s.run(block, outside)  # 4
                cache = merged(cache, found)
            else:
                logits, _ = s.run(range(block.start, len(s.tokens)), cache)  # 4
            s.commit(logits, block)  # 5, 6
            step += 1


def dkv_decode(s: Sample, cache_steps: int = 8) -> None:
    """Section dKV-Cache, variant Decode, as for LLaDA."""
    for block in s.blocks():
        cache: Stored = []  # 6: reset at each block
        decoded = [{i for i in s.everything() if s.tokens[i] is not None}] * 2  # D_{i-1}, D_i
        step = 0
        while s.open(block):
            if step % cache_steps == 0 or step <= 1:  # 5
                logits, found = s.run(s.everything())
                cache = found
            else:
                logits, found = s.run(set(s.everything()) - decoded[0], only(cache, decoded[0]))  # 2, 3
                cache = merged(cache, found)
            cache = only(cache, decoded[1])  # 4
            s.commit(logits, block)
            decoded = [decoded[1], {i for i in s.everything() if s.tokens[i] is not None}]
            step += 1


def freecache(s: Sample, refresh: int | None = None, authors: bool = False) -> None:
    """Section FreeCache; without `authors`, frozen one step later, when all tokens of the block are written."""
    frozen: Stored | None = None
    until = s.tokens.index(None)  # the prompt
    number, blocks = 0, list(s.blocks())
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        while s.open(block):
            if frozen is None or (refresh and number % refresh == 0):
                logits, found = s.run(s.everything())  # 1
            else:
                logits, found = s.run(range(until, len(s.tokens)), frozen)  # 2
                found = merged(frozen, found)
            if not authors:
                until = max(until, block.start)  # what was before this block had all its tokens in this pass
            frozen = only(found, range(until))
            last = found
            s.commit(logits, block)
            number += 1
        if authors:  # 3: by the pass of the block's last step
            until = after.start if after else len(s.tokens)
            frozen = only(last, range(until))


def sample_of(net: Any, request: Any, row: int, rng: Randomness, mask: int, counts: list[int] | None) -> Sample:
    """One row of a request."""
    o = request.options
    length = int(request.valid[row].sum())
    tokens = [int(request.x[row, i]) if request.given[row, i] else None for i in range(length)]
    choose = Chooser(request.draw, rng.at("token"), mask)
    tau = 0.9 if o.tau is None else o.tau
    return Sample(net, tokens, mask, choose, row, o.block_length, counts, tau, o.confidence or "probability")
