"""Prometheus metrics of the checkpoint store.

```python
metrics = StoreMetrics(registry)
store = open_store(url, observer=metrics)
metrics.watch(store)
```

Counters are read from the store when they are scraped; only times are observed as they happen. In the labels, `tier` is
`memory`, `disk` or `redis`, `tag` a precision, and `kind` that of `Refused` or `Lost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.outcomes import StoreStats

__all__ = ["StoreMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PREFIX = "agentcache_store_"

_GAUGES: tuple[tuple[str, str, Callable[[StoreStats], int]], ...] = (
    ("versions", "Versions that are stored.", lambda s: s["versions"]),
    ("objects", "Objects that they share.", lambda s: s["objects"]),
    ("used_bytes", "Bytes of payloads, manifests and reservations.", lambda s: s["used_bytes"]),
    ("reserved_bytes", "Bytes that open saves have reserved.", lambda s: s["reserved_bytes"]),
    ("budget_bytes", "Most bytes.", lambda s: s["budget_bytes"]),
)
_COUNTERS: tuple[tuple[str, str, Callable[[StoreStats], int]], ...] = (
    ("hits", "Versions that were found.", lambda s: s["hits"]),
    ("misses", "Versions that were not.", lambda s: s["misses"]),
    ("saves", "Versions that were stored.", lambda s: s["saves"]),
    ("evictions", "Versions that were evicted.", lambda s: s["evictions"]),
    ("corruptions", "Payloads and manifests that were damaged.", lambda s: _corruptions(s)),
)


def _corruptions(stats: StoreStats) -> int:
    return stats["lost"].get("corrupt", 0) + stats["refusals"].get("corrupt", 0)


class StoreMetrics(Collector):
    """Metrics of any number of stores in one registry; also the `Observer` to open them with.

    Args:
        registry: Where they are scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stores: list[KVStore] = []
        self._save = Histogram(
            f"{_PREFIX}save_seconds", "From prepare to complete.", ["tier"], buckets=_SECONDS, registry=registry
        )
        self._restore = Histogram(
            f"{_PREFIX}restore_seconds", "One fetch of payloads.", ["tier"], buckets=_SECONDS, registry=registry
        )
        self._restored = Counter(f"{_PREFIX}restored_bytes", "Bytes of payloads fetched.", ["tier"], registry=registry)
        registry.register(self)

    def watch(self, store: KVStore) -> None:
        """Adds a store's counters to what is scraped."""
        self._stores.append(store)

    def unwatch(self, store: KVStore) -> None:
        """Takes a store's counters out again, before it is closed."""
        self._stores.remove(store)

    def saved(self, tier: str, seconds: float) -> None:
        """Observes a save."""
        self._save.labels(tier).observe(seconds)

    def restored(self, tier: str, seconds: float, size_bytes: int) -> None:
        """Observes a fetch."""
        self._restore.labels(tier).observe(seconds)
        self._restored.labels(tier).inc(size_bytes)

    def collect(self) -> Iterable[Metric]:
        """Yields the counters of all stores that are watched."""
        tiers = [stats for store in self._stores for stats in store.stats()]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["tier"])
            for stats in tiers:
                gauge.add_metric([stats["tier"]], read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["tier"])
            for stats in tiers:
                counter.add_metric([stats["tier"]], read(stats))
            yield counter
        tags = GaugeMetricFamily(f"{_PREFIX}payload_bytes", "Bytes of payloads by precision.", labels=["tier", "tag"])
        refusals = CounterMetricFamily(f"{_PREFIX}refusals", "What was refused.", labels=["tier", "kind"])
        lost = CounterMetricFamily(f"{_PREFIX}lost", "Payloads that could not be had.", labels=["tier", "kind"])
        for stats in tiers:
            for tag, size in stats["bytes_by_tag"].items():
                tags.add_metric([stats["tier"], tag], size)
            for kind, number in stats["refusals"].items():
                refusals.add_metric([stats["tier"], kind], number)
            for kind, number in stats["lost"].items():
                lost.add_metric([stats["tier"], kind], number)
        yield from (tags, refusals, lost)
