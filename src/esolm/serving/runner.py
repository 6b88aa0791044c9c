"""One pass for many requests: their calls, padded to a common number of slots, over adjacent rows of the KV pool.

A call is kept as one tensor [5, N] of tokens, positions, ranks, horizons and cliques. A long call is fed in chunks, cut
where no slot sees a later one. Requests that feed very different numbers of slots get separate network calls.

Shapes: B rows of a network call, N slots, R rows that get logits, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.draw import BadLogits, Draw
from ..core.visibility import HIDDEN, Visibility
from ..net.denoiser import Rows
from ..net.protocol import Network
from ..sampling.passes import Pass
from .pool import KVPool, Lease

FIXED = 16
"""Cost of one more network call, in slots: below about this number the weights dominate the time of a call."""
FEWEST = 4
"""Slots of a common prefix that are worth a copy."""


class Pending:
    """A call that a request waits for: what was fed of it so far, and its logits in the end."""

    def __init__(self, wanted: Pass, lease: Lease | None) -> None:
        self.wanted, self.lease = wanted, lease
        seen, width = wanted.visibility, wanted.tokens.shape[1]
        labels = (wanted.tokens, wanted.position, seen.rank, seen.horizon, seen.clique)
        self.labels = torch.stack([t.reshape(-1).long() for t in labels])  # [5, N]
        self.width, self.done = width, 0
        first, index = wanted.out.span.start, wanted.out.index
        slots = range(first, wanted.out.span.stop) if index is None else (first + i for i in index.tolist())
        self.out: list[int] = list(slots)
        self.found: list[Tensor] = []
        self.tokens: Tensor | BadLogits | None = None  # drawn from the logits, if the call asks for it
        self.error: str | None = None
        self.leader: Pending | None = None  # has or computes the first `common` slots too
        self.common = 0
        self._cuts: list[int] | None = None

    @property
    def finished(self) -> bool:
        """Whether the pass has run or failed."""
        return self.done == self.width or self.error is not None

    @property
    def logits(self) -> Tensor:
        """As the network would return them, [1, m, V] or [R, V]."""
        found = self.found[0] if len(self.found) == 1 else torch.cat(self.found)
        return found[None] if self.wanted.out.index is None else found

    @property
    def cuts(self) -> list[int]:
        """Ends of chunks, ascending up to N: no slot before one sees a slot after it."""
        if self._cuts is None:
            seen = self.wanted.visibility.dense()[0, 0]  # [N, N]
            last = (seen * torch.arange(self.width, device=seen.device)).amax(1).cummax(0).values.tolist()
            self._cuts = [slot + 1 for slot in range(self.width) if last[slot] <= slot]
        return self._cuts

    def end(self, chunk: int | None) -> int:
        """Where the next chunk ends, at least one slot and if possible at most `chunk` slots away."""
        if self.lease is None or chunk is None or self.width - self.done <= chunk:
            return self.width
        fitting = [cut for cut in self.cuts if self.done < cut <= self.done + chunk]
        return fitting[-1] if fitting else next(cut for cut in self.cuts if cut > self.done)


class Fed:
    """The slots of a pending call that one pass feeds."""

    def __init__(self, pending: Pending, chunk: int | None) -> None:
        self.pending, self.start, self.stop = pending, pending.done, pending.end(chunk)
        self.slots = self.stop - self.start
        self.out = [slot - self.start for slot in pending.out if self.start <= slot < self.stop]
        lease = pending.lease
        self.row, self.length = (0, 0) if lease is None else (lease.row, lease.length + self.start)


class Runner:
    """Runs the pending calls of all requests. chunk: the most slots of a prompt that a pass feeds beside other rows."""

    def __init__(self, net: Network, pool: KVPool, chunk: int) -> None:
        self.net, self.pool, self.chunk = net, pool, chunk
        self.calls = self.slots = self.padding = self.reused = 0
        self.firsts: dict[Lease, Pending] = {}  # the first call of each row in use

    def run(self, pending: Sequence[Pending]) -> None:
        """One pass: every call goes on by one chunk, and those that fail get an error of their own."""
        ready = [each for each in pending if not self._waits(each)]
        chunk = self.chunk if len(ready) > 1 else None
        cached = sorted((Fed(p, chunk) for p in ready if p.lease is not None), key=lambda fed: fed.row)
        others = sorted((Fed(p, None) for p in ready if p.lease is None), key=lambda fed: fed.slots)
        for fed in cached:
            self._begin(fed)
        groups = [*self._groups([fed for fed in cached if fed.pending.error is None]), *self._groups(others)]
        for group in groups:
            self._attempt(group)
        draw_together([each for each in ready if each.error is None and each.finished])

    def _begin(self, fed: Fed) -> None:
        """Check that the call fits, and write its ranks behind the committed ones, where only later chunks see them."""
        pending, lease = fed.pending, fed.pending.lease
        assert lease is not None
        try:
            lease.cache.begin(pending.wanted.visibility)
        except ValueError as error:
            pending.error = str(error)
            return
        lease.used = lease.length + pending.width
        lease.cache.ranks[:, lease.length : lease.used] = pending.labels[2]

    def _groups(self, feds: list[Fed]) -> list[list[Fed]]:
        """Cut the list into network calls so that calls and padding together cost least, by dynamic programming."""
        best: list[tuple[int, int]] = [(0, 0)]  # cost of the first i, and where their last call begins
        for end in range(1, len(feds) + 1):
            options, widest, longest = list[tuple[int, int]](), 0, 0
            for begin in range(end - 1, -1, -1):
                fed, after = feds[begin], feds[begin + 1] if begin + 1 < end else None
                widest, longest = max(widest, fed.slots), max(longest, fed.length)
                if after is not None and (
                    longest + widest > self.pool.capacity or (fed.pending.lease and after.row != fed.row + 1)
                ):
                    break
                options.append((best[begin][0] + FIXED + (end - begin) * widest, begin))
            best.append(min(options))
        groups, end = list[list[Fed]](), len(feds)
        while end:
            begin = best[end][1]
            groups.append(feds[begin:end])
            end = begin
        return groups[::-1]

    def _attempt(self, group: list[Fed]) -> None:
        """Run a group; if that fails, each of its calls alone, so that a bad one fails alone."""
        try:
            self._call(group)
        except (RuntimeError, ValueError, IndexError) as error:
            if len(group) == 1:
                group[0].pending.error = str(error)
                return
            for fed in group:
                self._attempt([fed])

    def _call(self, group: list[Fed]) -> None:
        """One network call."""
        width = max(fed.slots for fed in group)
        labels = self._labels(group, width)
        seen = Visibility(labels[:, 2], labels[:, 3], labels[:, 4])
        cached = group[0].pending.lease is not None
        cache = None
        if cached:
            rows = slice(group[0].row, group[-1].row + 1)
            cache = self.pool.memory.part(rows, [fed.length for fed in group])
        elif all(fed.pending.wanted.visibility.kind == "full" and fed.slots == width for fed in group):
            seen = group[0].pending.wanted.visibility
        index = [i * width + slot for i, fed in enumerate(group) for slot in fed.out]
        out = Rows(slice(0, width), torch.tensor(index, dtype=torch.long, device=labels.device))
        logits = self.net(labels[:, 0], labels[:, 1], seen, _times(group), cache, out)  # [R, V]
        for fed, own in zip(group, logits.split([len(fed.out) for fed in group]), strict=True):
            fed.pending.found.append(own)
            fed.pending.done = fed.stop
        self.calls += 1
        self.slots += sum(fed.slots for fed in group)
        self.padding += sum(width - fed.slots for fed in group)

    def _labels(self, group: list[Fed], width: int) -> Tensor:
        """The labels of a network call, [B, 5, N]; padding sees only itself and nobody sees it."""
        parts = [fed.pending.labels[:, fed.start : fed.stop] for fed in group]
        if all(fed.slots == width for fed in group):
            return torch.stack(parts)
        labels = parts[0].new_zeros(len(group), 5, width)
        labels[:, 2], labels[:, 3] = HIDDEN, -1
        labels[:, 4] = HIDDEN + torch.arange(width, device=labels.device)
        for i, part in enumerate(parts):
            labels[i, :, : part.shape[1]] = part
        return labels

    def follow(self, pending: Pending) -> None:
        """Let the first call of a row take over what another row has computed of the same slots, or is about to."""
        lease = pending.lease
        if lease is None or lease.length > 0:
            return
        for other in self.firsts.values():
            if (common := _common(pending, other)) > pending.common:
                pending.leader, pending.common = other, common
        self.firsts[lease] = pending

    def forget(self, lease: Lease) -> None:
        """The row is free: nobody can copy from it."""
        self.firsts.pop(lease, None)

    def _waits(self, pending: Pending) -> bool:
        """Whether to leave a call out of this pass, because its leader is not there yet; copies when it is."""
        leader, lease = pending.leader, pending.lease
        if leader is None or lease is None or leader.lease is None:
            return False
        if leader.lease in self.firsts and leader.error is None:
            if leader.done < pending.common:
                return True
            self.pool.copy(leader.lease, lease, pending.common)
            pending.done = pending.common
            self.reused += pending.common
        pending.leader = None
        return False


def draw_together(pending: Sequence[Pending]) -> None:
    """Draw the tokens of all calls that ask for it, at once for those that are drawn in the same way."""
    alike: dict[tuple[Draw, int], list[Pending]] = {}
    for each in pending:
        if (drawing := each.wanted.drawing) is not None:
            alike.setdefault((drawing.draw, drawing.mask_id), []).append(each)
    for (draw, mask_id), group in alike.items():
        logits = [each.logits.flatten(0, -2) for each in group]
        uniforms = [each.wanted.drawing.uniform for each in group if each.wanted.drawing is not None]
        try:
            tokens = draw(torch.cat(logits), functools.partial(_joined, uniforms), mask_id)
        except BadLogits as error:
            if len(group) == 1:
                group[0].tokens = error
                continue
            for each in group:  # so that the bad one fails alone
                draw_together([each])
        else:
            for each, own in zip(group, tokens.split([len(rows) for rows in logits]), strict=True):
                each.tokens = own


def _joined(uniforms: Sequence[Callable[[int], Tensor]], attempt: int) -> Tensor:
    return torch.cat([uniform(attempt) for uniform in uniforms])


def _times(group: list[Fed]) -> Tensor | None:
    """The time of each row, [B]; None if no call has one."""
    times = [fed.pending.wanted.time for fed in group]
    if all(time is None for time in times):
        return None
    return torch.cat([torch.zeros(1) if time is None else time.cpu() for time in times]).to(
        group[0].pending.labels.device
    )


def _common(one: Pending, two: Pending) -> int:
    """Leading slots with the same keys and values in both calls, all before the first slot that gets logits; 0 if few.

    They are equal if the labels are, and if no slot before sees one after.
    """
    most = min(*one.out, *two.out)
    if most < FEWEST:
        return 0
    equal = (one.labels[:, :most] == two.labels[:, :most]).all(0).long().cumprod(0)
    same = int(equal.sum())
    cuts = {cut for cut in one.cuts if FEWEST <= cut <= same} & set(two.cuts) if same >= FEWEST else set()
    return max(cuts, default=0)
