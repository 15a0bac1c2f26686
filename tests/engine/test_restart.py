"""Episodes outlive their process: closed, or killed in the middle of a save, on a disk store that two caches share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from agentcache import AgentCache, AgentCacheError, ConfigError, EngineDeadError, StoreError, UnknownVersionError
from agentcache.metrics import CacheMetrics
from agentcache.store.tiers import Refused, open_store

pytestmark = pytest.mark.engine

SETTINGS = {"dtype": "float32", "kv_bytes": 64 << 20, "max_model_len": 2048}
OLD = list(range(1000, 1400))
NEW = [*OLD[:150], *range(3000, 3020), *OLD[160:]]
REPLY: dict[str, Any] = {"max_tokens": 8, "extra": {"ignore_eos": True}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk://{tmp_path / 'store'}"


def _dies(cache: AgentCache) -> bool:
    """Whether a cache whose processes were killed says so; it may take a request to find out."""
    for _ in range(100):
        try:
            cache.generate(OLD, max_tokens=1)
        except EngineDeadError:
            return True
    return False


def test_an_episode_goes_on_in_a_new_cache_and_a_killed_one_loses_only_open_saves(
    tiny: Callable[[str], Path], url: str
) -> None:
    model = tiny("llama")
    registry = CollectorRegistry()
    metrics = CacheMetrics(registry)
    with AgentCache(model, store=url, **SETTINGS) as cache:
        metrics.watch(cache, "c")
        first = cache.episode("thread-1").generate(OLD, **REPLY)
        assert first.recovery is not None and first.recovery.saved == "pending"
        want = cache.generate(NEW, **REPLY)
        with pytest.raises(AgentCacheError, match="open in this process already"):
            cache.reopen("thread-1")
        with pytest.raises(UnknownVersionError, match="no version of episode 'other'"):
            cache.reopen("other")
        assert cache.flush()
        of_cache = {"cache": "c"}
        assert registry.get_sample_value("agentcache_save_seconds_count", of_cache) == 1
        assert registry.get_sample_value("agentcache_versions", of_cache | {"tier": "disk"}) == 1
        stored = registry.get_sample_value("agentcache_bytes", of_cache | {"tier": "disk", "tag": "exact"})
        assert stored is not None and stored > 400 * 2048
        metrics.unwatch(cache)
        late = cache.episode("thread-2").generate(OLD[:200], **REPLY)  # close() waits for this save
    cache = AgentCache(model, store=url, policy="edit_local", **SETTINGS)
    try:
        episode = cache.reopen("thread-1")
        assert episode.head == first.version
        exact = episode.generate(NEW, policy="prefix_cache", **REPLY)
        assert exact.recovery is not None
        assert exact.recovery.tier == "store" and exact.recovery.reason is None
        assert exact.recovery.exact and exact.recovery.restored_tokens > 100
        assert exact.token_ids == want.token_ids
        lossy = episode.generate(NEW, parent=first.version, **REPLY)
        assert lossy.recovery is not None and lossy.recovery.reused_tokens > 100
        assert cache.flush()
        stats = cache.stats()["ranks"][0]
        assert stats["tier"]["scheduler"]["open_saves"] == 0
        with open_store(url) as store:
            listed = store.versions("default")
        assert not isinstance(listed, Refused)
        assert {info.version for info in listed} == {r.version for r in (first, late, exact, lossy)}
        # A save is open when the worker is killed, and then the whole engine.
        episode.generate([*NEW, *range(5000, 6000)], **REPLY)
        for pid in reversed(cache.pids):
            os.kill(pid, signal.SIGKILL)
        assert _dies(cache)
        cache.restart()
        again = episode.generate(NEW, parent=first.version, policy="prefix_cache", **REPLY)
        assert again.recovery is not None and again.recovery.tier == "store" and again.recovery.reason is None
        assert again.token_ids == want.token_ids
    finally:
        cache.close()
    with open_store(url) as store:
        report = store.verify()
    assert not isinstance(report, Refused)
    assert report.faults == ()


def test_a_store_that_is_none_is_refused_before_the_engine_starts(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disc"):
        AgentCache(tiny("llama"), store="disc:///nowhere", **SETTINGS)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        AgentCache(tiny("llama"), store=f"disk://{tmp_path / 'file'}", **SETTINGS)
