"""The KV pool: a fixed number of rows of fixed capacity, of which the first ones are in use.

The rows in use stay adjacent, so that a pass over any range of them works on a view: when a row in the middle is
released, the last one moves into its place.
"""

from __future__ import annotations

from collections.abc import Callable

from ..net.cache import KVCache


class Lease:
    """One row of the pool, as a cache of one row."""

    def __init__(self, cache: KVCache, row: int) -> None:
        self.cache, self.row = cache, row
        self.used = 0  # slots with content, committed or not

    @property
    def length(self) -> int:
        """Committed slots."""
        return self.cache.extent


class KVPool:
    """Rows for at most `rows` requests of at most `capacity` slots; allocated at the first lease."""

    def __init__(self, new_cache: Callable[[int, int], KVCache], rows: int, capacity: int) -> None:
        self.rows, self.capacity, self._new_cache = rows, capacity, new_cache
        self.leases: list[Lease] = []
        self._memory: KVCache | None = None

    @property
    def memory(self) -> KVCache:
        """The cache that holds all rows."""
        if self._memory is None:
            self._memory = self._new_cache(self.rows, self.capacity)
        return self._memory

    @property
    def slots_used(self) -> int:
        """Slots of all rows with content."""
        return sum(lease.used for lease in self.leases)

    @property
    def bytes_held(self) -> int:
        """Size of the allocated keys and values."""
        cache = self._memory
        return 0 if cache is None else sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))

    def lease(self) -> Lease:
        """A free row, empty; raises ValueError if there is none."""
        row = len(self.leases)
        if row >= self.rows:
            raise ValueError(f"all {self.rows} rows of the KV pool are in use: raise max_batch or kv_memory")
        found = Lease(self.memory.part(slice(row, row + 1), [0]), row)
        self.leases.append(found)
        return found

    def release(self, lease: Lease, scrub: bool = False) -> None:
        """Free a row. scrub: erase it, because a NaN behind the committed slots would spread even though it is hidden:
        attention multiplies it by zero."""
        if scrub:
            for t in (*lease.cache.keys, *lease.cache.values):
                t.zero_()
        last = self.leases.pop()
        if last is not lease:
            self._move(last, lease.row)
            self.leases[lease.row] = last

    def copy(self, source: Lease, target: Lease, slots: int) -> None:
        """Copy the first slots of a row, with their ranks."""
        memory = self.memory
        for t in (*memory.keys, *memory.values):
            t[target.row, :, :slots] = t[source.row, :, :slots]
        memory.ranks[target.row, :slots] = memory.ranks[source.row, :slots]
        target.used = max(target.used, slots)

    def _move(self, lease: Lease, row: int) -> None:
        place = Lease(self.memory.part(slice(row, row + 1), [0]), row)
        self.copy(lease, place, lease.used)
        cache = lease.cache
        cache.keys, cache.values, cache.ranks = place.cache.keys, place.cache.values, place.cache.ranks
        lease.row = row
