"""Numbers of a running server in Prometheus's text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

from .engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of seconds by upper bound."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        """The cumulative buckets, the sum and the count."""
        found, total = list[str](), 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class Measures:
    """What a server counts, besides what its engine knows."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.responses: Counter[tuple[str, int]] = Counter()
        self.first_token, self.latency = Histogram(), Histogram()
        self._lock = threading.Lock()

    def responded(self, path: str, status: int) -> None:
        """Count a response."""
        with self._lock:
            self.responses[path, status] += 1

    def took(self, first_token: float | None, latency: float) -> None:
        """Add the seconds of a finished request."""
        with self._lock:
            if first_token is not None:
                self.first_token.add(first_token)
            self.latency.add(latency)

    def text(self) -> str:
        """All numbers."""
        engine, lines = self.engine, list[str]()
        pool, runner = engine.pool, engine.runner
        gauges = {
            "queue_length": (len(engine.scheduler.queue), "Samples that wait."),
            "batch_size": (len(engine.scheduler.live), "Samples that run."),
            "batch_limit": (pool.rows, "Most samples that run together."),
            "kv_slots_used": (pool.slots_used, "Slots of the KV pool with content."),
            "kv_slots": (pool.rows * pool.capacity, "Slots of the KV pool."),
            "kv_bytes": (pool.bytes_held, "Allocated bytes of the KV pool."),
        }
        counters = {
            "passes_total": (engine.passes, "Passes of the engine."),
            "network_calls_total": (runner.calls, "Network calls; a pass makes several if rows differ much."),
            "slots_total": (runner.slots, "Slots that were fed."),
            "padding_slots_total": (runner.padding, "Slots of padding beside them."),
            "reused_slots_total": (runner.reused, "Prompt slots copied from a row with the same prompt."),
            "tokens_committed_total": (engine.committed, "Generated tokens."),
        }
        for kind, numbers in (("gauge", gauges), ("counter", counters)):
            for name, (value, about) in numbers.items():
                lines += [f"# HELP esolm_{name} {about}", f"# TYPE esolm_{name} {kind}", f"esolm_{name} {value}"]
        with self._lock:
            lines += ["# HELP esolm_responses_total HTTP responses.", "# TYPE esolm_responses_total counter"]
            for (path, status), count in sorted(self.responses.items()):
                lines.append(f'esolm_responses_total{{path="{path}",status="{status}"}} {count}')
            for name, about, histogram in (
                ("time_to_first_token", "From the request to its first token.", self.first_token),
                ("request", "From the request to its end.", self.latency),
            ):
                full = f"esolm_{name}_seconds"
                lines += [f"# HELP {full} {about}", f"# TYPE {full} histogram", *histogram.lines(full)]
        return "\n".join(lines) + "\n"
