"""Prometheus metrics read back from a registry."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from agentcache.metrics import StoreMetrics
from agentcache.store.tiers import Manifest, open_store
from agentcache.store.tiers.conformance_kit import Material, found, refused
from agentcache.store.tiers.memory import MemoryStore
from agentcache.store.tiers.tiered import TieredStore
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
