"""Prometheus metrics: of a cache and its engine (`CacheMetrics`), or of stores in this process (`StoreMetrics`).

```python
metrics = CacheMetrics(prometheus_client.REGISTRY)
metrics.watch(cache)                      # an AgentCache; metrics.unwatch(cache) before it is closed
```

The engine's processes keep the counts and are asked when somebody scrapes, from whatever thread; resumes are observed as they
happen. Of an engine that cannot be asked (it has died, or the cache is closed) there is only `agentcache_up`, 0.

| name | labels | what |
|---|---|---|
| `agentcache_up` | cache | whether the engine answers |
| `agentcache_episodes` | cache | episodes that the caller keeps |
| `agentcache_bytes` | cache, tier, tag | bytes of stored KV by precision, over all ranks |
| `agentcache_used_bytes`, `agentcache_budget_bytes` | cache, tier | what a tier's budget counts, and the budget |
| `agentcache_versions`, `agentcache_objects` | cache, tier | versions, and the objects that they share |
| `agentcache_open_saves` | cache, tier | saves that are under way |
| `agentcache_evictions_total` | cache, tier | versions that made room |
| `agentcache_refusals_total` | cache, tier, kind | what a tier did not take; of memory, `kind` is `refused` |
| `agentcache_saves_total` | cache, tier | versions that were stored below memory |
| `agentcache_hits_total`, `agentcache_misses_total` | cache, tier | versions that were looked for below memory |
| `agentcache_lost_total` | cache, tier, kind | payloads that could not be had; `corrupt` are corruptions |
| `agentcache_save_seconds` | cache | summary: a save's work in the worker, rank 0 |
| `agentcache_restore_seconds` | cache, policy | histogram: the restore of a resume's rows |
| `agentcache_resumes_total` | cache, policy, outcome | `restored`, `resident` (vLLM had the rows) or `computed` (a miss) |
| `agentcache_resume_tokens_total` | cache, policy, source | rows: `restored`, `recomputed`, `computed` by vLLM, `lost` |
| `agentcache_shadows_total` | cache, policy, outcome | resumes that the quality guard chose: top-1 `agreed`, `disagreed`, no result: `failed`, `dropped`, `unfit` |
| `agentcache_shadow_kl` | cache, policy | histogram: KL of the first token, exact to resumed, in nats |
| `agentcache_fallbacks_total` | cache, policy, scope | falls to exact: of an `episode`, of the `policy` |

`cache` is the name given to `watch`, `tier` is `memory`, `disk` or `redis`, `tag` a precision, and `kind` that of
`store.tiers.Refused` or `Lost`.

`StoreMetrics` tells of any `KVStore` of this process, as `agentcache_store_` and: `versions`, `objects`, `used_bytes`,
`reserved_bytes`, `budget_bytes`, `payload_bytes` {tag}, `hits_total`, `misses_total`, `saves_total`, `evictions_total`,
`corruptions_total`, `refusals_total` {kind}, `lost_total` {kind}, and as they happen `save_seconds`, `restore_seconds` and
`restored_bytes_total`, all by tier:

```python
metrics = StoreMetrics(registry)
store = open_store(url, observer=metrics)
metrics.watch(store)
```
"""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from threading import Lock
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from agentcache.errors import AgentCacheError, ConfigError
from agentcache.events import Event, EventKind, KVResumed, PolicyFellBack, QualityChecked, Subscriber
from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.outcomes import StoreStats

__all__ = ["CacheMetrics", "StoreMetrics", "WatchedCache"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NATS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
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


# -- a cache and its engine --------------------------------------------------------------------------------------------


class WatchedCache(Protocol):
    """What is asked of a cache: `AgentCache` has it."""

    def stats(self) -> dict[str, Any]:
        """Returns the engine's counters; may be called from any thread."""
        ...

    def subscribe(self, subscriber: Subscriber, kinds: Iterable[EventKind] | None = None) -> Callable[[], None]:
        """Adds a function that gets each event; returns the function that removes it."""
        ...


class _Watched:
    """A cache, the name that its values carry, and how to stop listening to it."""

    def __init__(self, cache: WatchedCache, name: str) -> None:
        self.cache = cache
        self.name = name
        self.stop: Callable[[], None] = lambda: None


class CacheMetrics(Collector):
    """Metrics of any number of caches in one registry.

    Args:
        registry: Where they are scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = Lock()
        self._watched: list[_Watched] = []
        labels = ["cache", "policy"]
        self._restore = Histogram(
            "agentcache_restore_seconds", "The restore of a resume's rows.", labels, buckets=_SECONDS, registry=registry
        )
        self._resumes = Counter(
            "agentcache_resumes",
            "Requests that had a parent, by what became of it.",
            [*labels, "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "agentcache_resume_tokens",
            "Rows of resumes, by where they came from.",
            [*labels, "source"],
            registry=registry,
        )
        self._kl = Histogram(
            "agentcache_shadow_kl",
            "KL of a resume's first token, exact to resumed, in nats.",
            labels,
            buckets=_NATS,
            registry=registry,
        )
        self._fallbacks = Counter(
            "agentcache_fallbacks", "Falls to exact recovery.", [*labels, "scope"], registry=registry
        )
        registry.register(self)

    def watch(self, cache: WatchedCache, name: str = "default") -> None:
        """Adds a cache to what is scraped.

        Args:
            cache: An `AgentCache`.
            name: The label `cache` of its values.

        Raises:
            ConfigError: Another cache has the name.
        """
        watched = _Watched(cache, name)
        with self._lock:
            if any(other.name == name for other in self._watched):
                raise ConfigError(f"a cache of the name {name!r} is watched already: give this one another name")
            self._watched.append(watched)
        watched.stop = cache.subscribe(
            lambda event: self._heard(name, event), ["kv_resumed", "quality_checked", "policy_fell_back"]
        )

    def unwatch(self, cache: WatchedCache) -> None:
        """Takes a cache out again; one that is not watched is ignored."""
        with self._lock:
            out = [watched for watched in self._watched if watched.cache is cache]
            self._watched = [watched for watched in self._watched if watched.cache is not cache]
        for watched in out:
            watched.stop()

    def _heard(self, name: str, event: Event) -> None:
        if isinstance(event, QualityChecked):
            self._kl.labels(name, event.policy).observe(event.kl)
        elif isinstance(event, PolicyFellBack):
            self._fallbacks.labels(name, event.policy, event.scope).inc()
        elif isinstance(event, KVResumed) and event.recovery:  # else it is announced: its request is still to come
            self._resumed(name, event.recovery)

    def _resumed(self, name: str, recovery: Mapping[str, Any]) -> None:
        policy, restored = recovery["policy"], recovery["restored_tokens"]
        if restored:
            self._restore.labels(name, policy).observe(recovery["restore_ms"] / 1e3)
        outcome = "restored" if restored else "computed" if recovery["reason"] is not None else "resident"
        self._resumes.labels(name, policy, outcome).inc()
        for source, field in (
            ("restored", "restored_tokens"),
            ("recomputed", "recomputed_tokens"),
            ("computed", "new_tokens"),
            ("lost", "lost_tokens"),
        ):
            self._tokens.labels(name, policy, source).inc(recovery[field])

    def collect(self) -> Iterable[Metric]:
        """Yields the counters of all caches that are watched."""
        families = _families()
        with self._lock:
            watched = [*self._watched]
        for one in watched:
            try:
                stats = one.cache.stats()
            except (AgentCacheError, CancelledError):
                families["up"].add_metric([one.name], 0)
                continue
            families["up"].add_metric([one.name], 1)
            _add_stats(families, one.name, stats)
        yield from families.values()


_CACHE_GAUGES = (
    ("up", "Whether the engine answers.", ()),
    ("episodes", "Episodes that the caller keeps.", ()),
    ("bytes", "Bytes of stored KV by precision.", ("tier", "tag")),
    ("used_bytes", "What the budget counts.", ("tier",)),
    ("budget_bytes", "Most bytes.", ("tier",)),
    ("versions", "Versions that are stored.", ("tier",)),
    ("objects", "Objects that they share.", ("tier",)),
    ("open_saves", "Saves that are under way.", ("tier",)),
)
_CACHE_COUNTERS = (
    ("evictions", "Versions that made room.", ("tier",)),
    ("refusals", "What a tier did not take.", ("tier", "kind")),
    ("saves", "Versions that were stored below memory.", ("tier",)),
    ("hits", "Versions that were found below memory.", ("tier",)),
    ("misses", "Versions that were not.", ("tier",)),
    ("lost", "Payloads that could not be had.", ("tier", "kind")),
    ("shadows", "Resumes that the quality guard chose.", ("policy", "outcome")),
)


def _families() -> dict[str, Any]:
    gauges = {n: GaugeMetricFamily(f"agentcache_{n}", t, labels=["cache", *more]) for n, t, more in _CACHE_GAUGES}
    counters = {n: CounterMetricFamily(f"agentcache_{n}", t, labels=["cache", *more]) for n, t, more in _CACHE_COUNTERS}
    summary = SummaryMetricFamily("agentcache_save_seconds", "A save's work in the worker.", labels=["cache"])
    return {**gauges, **counters, "save_seconds": summary}


def _add_stats(families: Mapping[str, Any], name: str, stats: Mapping[str, Any]) -> None:
    """Adds what `AgentCache.stats` tells of one engine."""
    families["episodes"].add_metric([name], stats["episodes"])
    for policy, counts in stats["guard"]["policies"].items():
        for outcome in ("agreed", "disagreed", "failed", "dropped", "unfit"):
            families["shadows"].add_metric([name, policy, outcome], counts[outcome])
    ranks: list[dict[str, Any]] = stats["ranks"]
    first = ranks[0]
    for tag, size in _total(rank["tag_bytes"] for rank in ranks).items():
        families["bytes"].add_metric([name, "memory", tag], size)
    families["open_saves"].add_metric([name, "memory"], first["pending_saves"])
    counts = first["counts"]
    if "saves" in counts:
        families["save_seconds"].add_metric([name], counts["saves"], counts["save_s"])
    index = first["index"]
    if index:  # the scheduler half tells of it with the first step
        used = index["bytes"] + index["token_bytes"]
        memory = {"used_bytes": used} | {n: index[n] for n in ("versions", "objects", "budget_bytes", "evictions")}
        for field, value in memory.items():
            families[field].add_metric([name, "memory"], value)
        families["refusals"].add_metric([name, "memory", "refused"], index["refusals"])
    tiers = [rank["tier"] for rank in ranks if rank["tier"] is not None]
    if tiers:
        _add_tiers(families, name, tiers)


def _add_tiers(families: Mapping[str, Any], name: str, ranks: list[dict[str, Any]]) -> None:
    """Adds what is known of the tiers below memory: by the scheduler half, which finds and completes, and by each rank's worker."""
    scheduler = ranks[0]["scheduler"]
    handles: list[StoreStats] = scheduler.get("tiers", [])  # told with the first change
    workers: list[StoreStats] = [tier for rank in ranks for tier in rank["worker"]["tiers"]]
    for tier in handles:
        at = [name, tier["tier"]]
        for field in ("used_bytes", "budget_bytes", "versions", "objects", "evictions", "saves", "hits", "misses"):
            families[field].add_metric(at, tier[field])
        for tag, size in tier["bytes_by_tag"].items():
            families["bytes"].add_metric([*at, tag], size)
    if handles:
        families["open_saves"].add_metric([name, handles[-1]["tier"]], scheduler["open_saves"])
    for tier_name in dict.fromkeys(tier["tier"] for tier in (*handles, *workers)):
        both = [tier for tier in (*handles, *workers) if tier["tier"] == tier_name]
        for kind, number in _total(tier["refusals"] for tier in both).items():
            families["refusals"].add_metric([name, tier_name, kind], number)
        for kind, number in _total(tier["lost"] for tier in both).items():
            families["lost"].add_metric([name, tier_name, kind], number)


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    out: Sums[str] = Sums()
    for one in counts:
        out.update(one)
    return dict(out)
