"""Prometheus metrics read back from a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from agentcache.cache import AgentCache
from agentcache.config import GuardConfig
from agentcache.engine.wire import Recovery
from agentcache.errors import ConfigError, EngineDeadError
from agentcache.events import EventBus, EventKind, KVResumed, Subscriber
from agentcache.guard import QualityGuard
from agentcache.metrics import CacheMetrics, StoreMetrics
from agentcache.store.tiers import Manifest, open_store
from agentcache.store.tiers.conformance_kit import Material, found, refused
from agentcache.store.tiers.memory import MemoryStore
from agentcache.store.tiers.tiered import TieredStore
from tests.models import make_tiny
from tests.store.tiers.backends import flip


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"agentcache_store_{name}", labels)


def test_a_store_is_counted_and_timed() -> None:
    registry = CollectorRegistry()
    metrics = StoreMetrics(registry)
    material = Material()
    first = material.draft("v1", new=(5000,), tag="k8v4")
    with MemoryStore(2 * (first.cost_bytes + 5000), fingerprint=first.fingerprint, observer=metrics) as store:
        metrics.watch(store)
        material.must_save(store, first)
        material.must_save(store, material.draft("v2", new=(4000,)))
        material.must_save(store, material.draft("v3", new=(4000,)))
        store.find("red", "v1")
        third = found(store, "red", "v3")
        material.check(store, third)
        refused(store.prepare(material.draft("v4"), 1 << 40), "full")
        refused(store.prepare(material.draft("v4", fingerprint={}), 1), "foreign")
        store._blobs[third.objects[0].key, 0][3] ^= 1
        store.fetch([third.objects[0].key, "0" * 32], 0)
        assert value(registry, "versions", tier="memory") == 2
        assert value(registry, "saves_total", tier="memory") == 3
        assert value(registry, "evictions_total", tier="memory") == 1
        assert value(registry, "hits_total", tier="memory") == 1
        assert value(registry, "misses_total", tier="memory") == 1
        assert value(registry, "corruptions_total", tier="memory") == 1
        assert value(registry, "refusals_total", tier="memory", kind="full") == 1
        assert value(registry, "refusals_total", tier="memory", kind="foreign") == 1
        assert value(registry, "lost_total", tier="memory", kind="corrupt") == 1
        assert value(registry, "lost_total", tier="memory", kind="absent") == 1
        assert value(registry, "payload_bytes", tier="memory", tag="exact") == 8000
        assert value(registry, "payload_bytes", tier="memory", tag="k8v4") is None
        assert value(registry, "used_bytes", tier="memory") == store.stats()[0]["used_bytes"]
        assert value(registry, "save_seconds_count", tier="memory") == 3
        assert value(registry, "restore_seconds_count", tier="memory") == 2
        assert value(registry, "restored_bytes_total", tier="memory") == 4000
        metrics.unwatch(store)
    assert value(registry, "versions", tier="memory") is None
    assert b"agentcache_store_save_seconds_bucket" in generate_latest(registry)


def test_copies_between_tiers_are_not_timed_as_saves(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = StoreMetrics(registry)
    material = Material()
    url = f"tiered:memory?mode=through+disk://{tmp_path}/store?fsync=false"
    with open_store(url, observer=metrics) as store:
        assert isinstance(store, TieredStore)
        metrics.watch(store)
        made = material.must_save(store, material.draft("v1"))
        assert value(registry, "save_seconds_count", tier="memory") == 1
        assert value(registry, "save_seconds_count", tier="disk") is None
        assert value(registry, "restore_seconds_count", tier="memory") is None
        material.check(store, made)
        store.upper.delete("red", "v1")
        material.check(store, made)
        assert value(registry, "restore_seconds_count", tier="memory") == 1
        assert value(registry, "restore_seconds_count", tier="disk") == 1
        assert value(registry, "payload_bytes", tier="disk", tag="exact") == made.payload_bytes
        [path] = (tmp_path / "store" / "versions").iterdir()
        flip(path, 60)
        assert not isinstance(store.find("red", "v1"), Manifest)
        assert value(registry, "corruptions_total", tier="disk") == 1


# -- a cache -----------------------------------------------------------------------------------------------------------


class FakeCache:
    """What `CacheMetrics` asks of a cache."""

    def __init__(self, stats: dict[str, Any] | Exception) -> None:
        self.answer = stats
        self.bus = EventBus()

    def stats(self) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def subscribe(self, subscriber: Subscriber, kinds: Iterable[EventKind] | None = None) -> Callable[[], None]:
        return self.bus.subscribe(subscriber, kinds)


def tier_stats(**counts: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("versions", "objects", "used_bytes", "reserved_bytes", "budget_bytes"), 0)
    empty |= dict.fromkeys(("hits", "misses", "saves", "evictions"), 0)
    return {"tier": "disk", **empty, "bytes_by_tag": {}, "refusals": {}, "lost": {}, **counts}


def rank_stats(**more: Any) -> dict[str, Any]:
    index = {
        "versions": 3,
        "objects": 5,
        "bytes": 900,
        "token_bytes": 100,
        "budget_bytes": 5000,
        "evictions": 2,
        "refusals": 1,
    }
    return {
        "pending_saves": 1,
        "tag_bytes": {"exact": 100, "k8v4": 350},
        "counts": {"saves": 4, "save_s": 0.5},
        "tier": None,
        "index": index,
        **more,
    }


def cache_stats(episodes: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"episodes": episodes, "guard": QualityGuard(GuardConfig()).stats(), "ranks": ranks}


def cache_value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"agentcache_{name}", {"cache": "default", **labels})


def recovery(**fields: Any) -> dict[str, Any]:
    return Recovery(policy="edit_local", **fields).model_dump(mode="json")


def test_a_cache_without_a_store_has_its_memory_counted() -> None:
    registry = CollectorRegistry()
    CacheMetrics(registry).watch(FakeCache(cache_stats(7, [rank_stats(), rank_stats()])))
    assert cache_value(registry, "up") == 1
    assert cache_value(registry, "episodes") == 7
    assert cache_value(registry, "bytes", tier="memory", tag="k8v4") == 700
    assert cache_value(registry, "used_bytes", tier="memory") == 1000
    assert cache_value(registry, "budget_bytes", tier="memory") == 5000
    assert cache_value(registry, "versions", tier="memory") == 3
    assert cache_value(registry, "open_saves", tier="memory") == 1
    assert cache_value(registry, "evictions_total", tier="memory") == 2
    assert cache_value(registry, "refusals_total", tier="memory", kind="refused") == 1
    assert cache_value(registry, "save_seconds_count") == 4
    assert cache_value(registry, "save_seconds_sum") == 0.5
    assert cache_value(registry, "versions", tier="disk") is None


def test_the_tiers_below_are_counted_where_they_are_known() -> None:
    registry = CollectorRegistry()
    found = tier_stats(versions=9, saves=8, hits=2, misses=3, bytes_by_tag={"mixed": 70}, refusals={"full": 1})
    scheduler = {"open_saves": 6, "owed": 0, "tiers": [found]}
    ranks = [
        rank_stats(tier={"worker": {"pending": 0, "tiers": [tier_stats(lost={"corrupt": 1})]}, "scheduler": scheduler}),
        rank_stats(
            tier={
                "worker": {"pending": 0, "tiers": [tier_stats(lost={"corrupt": 1, "absent": 4}, refusals={"full": 2})]},
                "scheduler": scheduler,
            }
        ),
    ]
    CacheMetrics(registry).watch(FakeCache(cache_stats(0, ranks)))
    assert cache_value(registry, "versions", tier="disk") == 9
    assert cache_value(registry, "bytes", tier="disk", tag="mixed") == 70
    assert cache_value(registry, "open_saves", tier="disk") == 6
    assert cache_value(registry, "saves_total", tier="disk") == 8
    assert cache_value(registry, "hits_total", tier="disk") == 2
    assert cache_value(registry, "misses_total", tier="disk") == 3
    assert cache_value(registry, "lost_total", tier="disk", kind="corrupt") == 2
    assert cache_value(registry, "lost_total", tier="disk", kind="absent") == 4
    assert cache_value(registry, "refusals_total", tier="disk", kind="full") == 3


def test_an_engine_that_has_not_stepped_yet_has_what_is_known() -> None:
    registry = CollectorRegistry()
    young = rank_stats(index={}, tier={"worker": {"pending": 0, "tiers": [tier_stats()]}, "scheduler": {}})
    CacheMetrics(registry).watch(FakeCache(cache_stats(0, [young])))
    assert cache_value(registry, "up") == 1
    assert cache_value(registry, "versions", tier="memory") is None
    assert cache_value(registry, "open_saves", tier="disk") is None


def test_each_resume_is_observed_once() -> None:
    registry = CollectorRegistry()
    metrics, cache = CacheMetrics(registry), FakeCache(cache_stats(0, [rank_stats()]))
    metrics.watch(cache)
    restored = recovery(restored_tokens=90, recomputed_tokens=8, new_tokens=3, lost_tokens=2, restore_ms=4.0)
    for fields in (restored, recovery(new_tokens=5), recovery(new_tokens=50, reason="parent is unknown")):
        cache.bus.emit(KVResumed(episode="e", version="v", recovery=fields))
    cache.bus.emit(KVResumed(episode="e", key="announced"))
    outcomes = {"restored": 1, "resident": 1, "computed": 1}
    for outcome, count in outcomes.items():
        assert cache_value(registry, "resumes_total", policy="edit_local", outcome=outcome) == count
    assert cache_value(registry, "restore_seconds_count", policy="edit_local") == 1
    assert cache_value(registry, "restore_seconds_sum", policy="edit_local") == pytest.approx(0.004)
    tokens = {"restored": 90, "recomputed": 8, "computed": 58, "lost": 2}
    for source, count in tokens.items():
        assert cache_value(registry, "resume_tokens_total", policy="edit_local", source=source) == count
    metrics.unwatch(cache)
    cache.bus.emit(KVResumed(episode="e", version="w", recovery=restored))
    assert cache_value(registry, "restore_seconds_count", policy="edit_local") == 1
    assert cache_value(registry, "up") is None


def test_what_the_quality_guard_finds_is_counted_by_policy() -> None:
    registry = CollectorRegistry()
    guard = QualityGuard(GuardConfig(share=1, max_kl=1, window=1, episode_strikes=1, policy_episodes=2))
    cache = FakeCache(cache_stats(0, [rank_stats()]))
    CacheMetrics(registry).watch(cache)
    for episode, kl, agrees in (("e", 0.02, True), ("e", 2.0, True), ("f", 3.0, False)):
        checked, falls = guard.record(episode, "v", "epic", kl, agrees)
        for event in (checked, *falls):
            cache.bus.emit(event)
    for why in ("failed", "dropped", "dropped"):
        guard.missed("epic", why)
    cache.answer = cache_stats(0, [rank_stats()]) | {"guard": guard.stats()}
    for outcome, count in {"agreed": 2, "disagreed": 1, "failed": 1, "dropped": 2, "unfit": 0}.items():
        assert cache_value(registry, "shadows_total", policy="epic", outcome=outcome) == count
    assert cache_value(registry, "shadow_kl_count", policy="epic") == 3
    assert cache_value(registry, "shadow_kl_sum", policy="epic") == pytest.approx(5.02)
    assert cache_value(registry, "shadow_kl_bucket", policy="epic", le="0.03") == 1
    assert cache_value(registry, "fallbacks_total", policy="epic", scope="episode") == 2
    assert cache_value(registry, "fallbacks_total", policy="epic", scope="policy") == 1


def test_an_engine_that_cannot_be_asked_is_down_and_disturbs_no_other() -> None:
    registry = CollectorRegistry()
    metrics = CacheMetrics(registry)
    metrics.watch(FakeCache(EngineDeadError("it has died")), "dead")
    metrics.watch(FakeCache(cache_stats(1, [rank_stats()])), "alive")
    assert registry.get_sample_value("agentcache_up", {"cache": "dead"}) == 0
    assert registry.get_sample_value("agentcache_up", {"cache": "alive"}) == 1
    assert registry.get_sample_value("agentcache_versions", {"cache": "dead", "tier": "memory"}) is None
    assert b'agentcache_versions{cache="alive",tier="memory"} 3.0' in generate_latest(registry)


def test_two_caches_cannot_have_one_name() -> None:
    metrics, stats = CacheMetrics(CollectorRegistry()), cache_stats(0, [rank_stats()])
    metrics.watch(FakeCache(stats))
    with pytest.raises(ConfigError, match="'default' is watched already"):
        metrics.watch(FakeCache(stats))


@pytest.mark.slow
@pytest.mark.engine
def test_a_running_engine_tells_of_its_saves_and_resumes(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = CacheMetrics(registry)
    ids = [*range(5, 205)]
    model = make_tiny("llama", tmp_path / "llama")
    with AgentCache(model, store=f"disk://{tmp_path}/store", max_model_len=512) as cache:
        metrics.watch(cache)
        episode = cache.episode("e")
        episode.generate(ids, max_tokens=1, precision="k8v4")
        assert cache.flush()
        assert cache.reset_prefix_cache()
        episode.generate([*ids[:100], 7, *ids[101:]], max_tokens=1, policy="direct_reuse", save=False)
        assert cache_value(registry, "up") == 1
        assert cache_value(registry, "versions", tier="memory") == 1
        assert cache_value(registry, "versions", tier="disk") == 1
        assert cache_value(registry, "saves_total", tier="disk") == 1
        assert cache_value(registry, "open_saves", tier="disk") == 0
        stored = cache_value(registry, "bytes", tier="disk", tag="k8v4")
        kept = cache_value(registry, "bytes", tier="memory", tag="k8v4")
        assert stored is not None and kept is not None and 0 < kept <= stored < kept + 1000
        assert cache_value(registry, "save_seconds_count") == 1
        assert cache_value(registry, "save_seconds_sum") > 0
        assert cache_value(registry, "resumes_total", policy="direct_reuse", outcome="restored") == 1
        assert cache_value(registry, "restore_seconds_count", policy="direct_reuse") == 1
        assert cache_value(registry, "resume_tokens_total", policy="direct_reuse", source="restored") == 198
        with ThreadPoolExecutor(1) as thread:
            assert b"agentcache_episodes" in thread.submit(generate_latest, registry).result()
    assert cache_value(registry, "up") == 0
    metrics.unwatch(cache)
    assert cache_value(registry, "up") is None
