"""The bench of what many paused episodes take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentcache.errors import ConfigError
from agentcache.store.tiers import Refused
from agentcache.store.tiers.bench import (
    EpisodeShape,
    bench_memory,
    disk_bytes,
    fill_store,
    pooled,
    read_back,
    rows_as_payloads,
    stored_payloads,
)
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.memory import MemoryStore

SHAPE = EpisodeShape(300, 5, 32)
ROW_BYTES = 5000
FINGERPRINT = {"model": "m"}


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3000, ROW_BYTES), dtype=np.uint8)


def test_versions_take_little_more_disk_than_their_distinct_tokens(rows: np.ndarray, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store", 1 << 40, fsync=False, fingerprint=FINGERPRINT) as store:
        made = fill_store(store, rows_as_payloads(rows), SHAPE, 6, fingerprint=FINGERPRINT)
        distinct = 6 * SHAPE.distinct_tokens * ROW_BYTES
        assert made.versions == 36
        assert store.stats()[0]["used_bytes"] <= 1.1 * distinct
    assert distinct <= disk_bytes(tmp_path / "store") <= 1.1 * distinct
    with DiskStore(tmp_path / "store", 1 << 40, fingerprint=FINGERPRINT) as store:
        assert read_back(store, made.sample)["versions"] == 1
        report = store.verify()
        assert not isinstance(report, Refused)
        assert (report.versions, report.faults) == (36, ())
        assert report.payload_bytes <= distinct


def test_memory_counts_little_more_than_the_distinct_tokens(rows: np.ndarray) -> None:
    seen: list[int] = []
    made = bench_memory(rows_as_payloads(rows), SHAPE, 3, progress=seen.append)
    assert made["versions"] == 18
    assert made["accounted_bytes"] <= 1.1 * 3 * SHAPE.distinct_tokens * ROW_BYTES
    assert seen == [1, 2, 3]


def test_an_episode_is_cut_into_objects_as_the_engine_cuts_it() -> None:
    assert EpisodeShape().distinct_tokens == 832
    assert EpisodeShape().object_tokens == (32, 256)
    assert EpisodeShape(600, 3, 300).object_tokens == (44, 88, 256)
    assert EpisodeShape(100, 0, 32).object_tokens == (100,)


def test_episodes_are_made_of_what_a_store_holds(rows: np.ndarray) -> None:
    with MemoryStore(1 << 40, fingerprint=FINGERPRINT) as store:
        fill_store(store, rows_as_payloads(rows), SHAPE, 2, fingerprint=FINGERPRINT, tag="k8v4")
        versions = [info.version for info in store.versions("bench")]
        pool = stored_payloads(store, "bench", versions, SHAPE, "k8v4")
        assert sorted(pool) == [32, 44, 256]
        assert {n: {len(blob) for blob in blobs} for n, blobs in pool.items()} == {n: {n * ROW_BYTES} for n in pool}
        first = pooled(pool)(32)
        assert any(np.array_equal(first, blob) for blob in pool[32])
        assert not any(np.shares_memory(first, blob) for blob in pool[32])
        with pytest.raises(ConfigError, match="no exact object of"):
            stored_payloads(store, "bench", versions, SHAPE, "exact")
        with pytest.raises(ConfigError, match="'nowhere' is not in the store"):
            stored_payloads(store, "bench", ["nowhere"], SHAPE, "k8v4")


def test_what_is_not_as_it_was_stored_is_noticed(rows: np.ndarray) -> None:
    with MemoryStore(1 << 40, fingerprint=FINGERPRINT) as store:
        made = fill_store(store, rows_as_payloads(rows), SHAPE, 1, fingerprint=FINGERPRINT)
        [(version, blobs)] = made.sample.items()
        altered = {key: blob ^ 1 for key, blob in blobs.items()}
        with pytest.raises(RuntimeError, match="is not what was stored"):
            read_back(store, {version: altered})
        with pytest.raises(RuntimeError, match="is not found"):
            read_back(store, {"gone": blobs})


def test_a_refused_save_ends_the_bench(rows: np.ndarray) -> None:
    with (
        MemoryStore(1000, fingerprint=FINGERPRINT) as store,
        pytest.raises(RuntimeError, match="a save was refused"),
    ):
        fill_store(store, rows_as_payloads(rows), SHAPE, 1, fingerprint=FINGERPRINT)
