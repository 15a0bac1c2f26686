"""Memory over a durable tier, beyond the conformance suite: copies down and up, outages, and what each tier counts."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from agentcache.store.tiers import KVStore, Lost, Manifest, Miss, Refused
from agentcache.store.tiers.conformance_kit import Material, found, refused
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.memory import MemoryStore
from agentcache.store.tiers.redis import RedisStore
from agentcache.store.tiers.tiered import TieredStore, copy_version
from tests.store.tiers.backends import FailingFiles
from tests.store.tiers.redis_process import RedisProcess

ROOM = 1 << 30
SIZE = 10_000


@pytest.fixture
def files() -> FailingFiles:
    return FailingFiles()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def tiered(
    folder: Path, files: FailingFiles, mode: Literal["through", "behind"] = "behind", memory: int = ROOM, jobs: int = 64
) -> TieredStore:
    return TieredStore(MemoryStore(memory), DiskStore(folder, ROOM, files=files), mode=mode, most_jobs=jobs)


def draft_of(material: Material, name: str, **options: object) -> Manifest:
    return material.draft(name, **({"new": (SIZE,)} | options))  # type: ignore[arg-type]


def room_for(count: int) -> int:
    return count * (draft_of(Material(), "x").cost_bytes + SIZE) + 100


def names(store: KVStore) -> list[str]:
    listed = store.versions()
    assert not isinstance(listed, Refused)
    return [info.version for info in listed]


class Held:
    """Holds up the background thread inside the block."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._free = threading.Event()
        self._reached = threading.Event()

    def __enter__(self) -> None:
        def wait() -> None:
            self._reached.set()
            self._free.wait()

        assert self._store._background.submit(wait)
        self._reached.wait()

    def __exit__(self, *error: object) -> None:
        self._free.set()
        self._store.flush()


def test_what_memory_evicts_is_found_below(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files, memory=room_for(2)) as store:
        saved = []
        for number in range(6):
            saved.append(material.must_save(store, draft_of(material, f"v{number}")))
            store.flush()
        assert len(names(store.upper)) == 2
        assert names(store) == [f"v{number}" for number in range(6)]
        for manifest in saved:
            material.check(store, found(store, "red", manifest.version))
        above, below = store.stats()
        assert (above["tier"], above["versions"], above["evictions"]) == ("memory", 2, 4)
        assert (below["tier"], below["versions"], below["evictions"]) == ("disk", 6, 0)


def test_nothing_is_evicted_before_it_was_copied(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files, memory=room_for(2)) as store:
        with Held(store):
            for number in range(5):  # two wait in memory; there is no room there for the others
                material.must_save(store, draft_of(material, f"v{number}"))
            assert names(store.upper) == ["v0", "v1"]
            assert names(store.lower) == ["v2", "v3", "v4"]
        assert sorted(names(store.lower)) == [f"v{number}" for number in range(5)]


def test_references_are_counted_in_each_tier(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files, memory=room_for(3)) as store:
        parent = material.must_save(store, draft_of(material, "parent", new=(SIZE, 50)))
        child = material.must_save(store, draft_of(material, "child", shared=parent.objects[:1], new=(20,)))
        store.flush()
        used = [tier["bytes_by_tag"]["exact"] for tier in store.stats()]
        assert used == [SIZE + 70, SIZE + 70]
        assert store.upper.delete("red", "parent") is True
        material.check(store, child)
        assert [tier["bytes_by_tag"]["exact"] for tier in store.stats()] == [SIZE + 20, SIZE + 70]
        assert store.delete("red", "parent") is True
        assert [tier["bytes_by_tag"]["exact"] for tier in store.stats()] == [SIZE + 20, SIZE + 20]
        assert store.delete("red", "child") is True
        assert [tier["used_bytes"] for tier in store.stats()] == [0, 0]


def test_a_child_of_a_version_that_is_only_below_is_stored_below(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files) as store:
        parent = material.must_save(store, draft_of(material, "parent"))
        store.flush()
        store.upper.delete("red", "parent")
        child = material.must_save(store, draft_of(material, "child", shared=parent.objects, new=(9,)))
        assert names(store.upper) == []
        material.check(store, found(store, "red", "child"))
        material.check(store, child)


def test_a_hint_brings_a_version_up_and_keeps_it_there(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files, memory=room_for(2)) as store:
        for number in range(4):
            material.must_save(store, draft_of(material, f"v{number}"))
            store.flush()
        assert names(store.upper) == ["v2", "v3"]
        assert store.hint("red", "v0") is True
        store.flush()
        assert names(store.upper) == ["v3", "v0"]
        for number in (4, 5):
            material.must_save(store, draft_of(material, f"v{number}"))
            store.flush()
        assert names(store.upper) == ["v0", "v5"]
        material.check(store.upper, found(store.upper, "red", "v0"))
        assert store.hint("red", "nobody") is False


def test_a_version_deleted_before_it_was_copied_stays_deleted(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files) as store:
        with Held(store):
            material.must_save(store, draft_of(material, "v1"))
            assert store.delete("red", "v1") is True
        assert isinstance(store.find("red", "v1"), Miss)
        assert names(store) == []
        with Held(store):
            material.must_save(store, draft_of(material, "v1"))
            assert store.delete("red", "v1") is True
            again = material.must_save(store, draft_of(material, "v1"))
        assert [e.key for e in found(store.lower, "red", "v1").objects] == [e.key for e in again.objects]
        with Held(store):  # nothing of this one has to be copied: what it points at is below already
            material.must_save(store, draft_of(material, "v2", shared=again.objects, new=()))
            assert store.delete("red", "v2") is True
        assert names(store.lower) == ["v1"]
        store.check_integrity()


@pytest.mark.parametrize("mode", ["through", "behind"])
def test_what_the_lower_tier_could_not_take_is_copied_when_it_can(
    mode: Literal["through", "behind"], folder: Path, files: FailingFiles
) -> None:
    material = Material()
    with tiered(folder, files, mode) as store:
        first = material.must_save(store, draft_of(material, "v1"))
        store.flush()
        with files.failing(errno.ENOSPC):
            second = material.must_save(store, draft_of(material, "v2", shared=first.objects, new=(70,)))
            third = material.must_save(store, draft_of(material, "v3", shared=second.objects, new=(30,)))
            store.flush()
            material.check(store, found(store, "red", "v3"))
            assert names(store.lower) == ["v1"]
        fourth = material.must_save(store, draft_of(material, "v4", shared=third.objects, new=()))
        store.flush()
        assert sorted(names(store.lower)) == ["v1", "v2", "v3", "v4"]
        assert store.lower.stats()[0]["bytes_by_tag"] == {"exact": SIZE + 100}
        store.check_integrity()
    with DiskStore(folder, ROOM, fsync=False) as store:
        material.check(store, found(store, "red", "v4"))
        material.check(store, fourth)


def test_a_full_queue_delays_a_copy_and_blocks_nobody(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files, jobs=2) as store:
        with Held(store):
            for number in range(5):
                material.must_save(store, draft_of(material, f"v{number}"))
            assert names(store.lower) == []
        assert sorted(names(store.lower)) == [f"v{number}" for number in range(5)]


def test_write_through_is_below_when_complete_returns(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files, "through") as store:
        made = material.must_save(store, draft_of(material, "v1"))
        material.check(store.lower, found(store.lower, "red", "v1"))
        assert found(store, "red", "v1") == made


def test_a_payload_damaged_in_memory_is_taken_from_below(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files) as store:
        manifest = material.must_save(store, draft_of(material, "v1"))
        store.flush()
        store.upper._blobs[manifest.objects[0].key, 0][5] ^= 1
        material.check(store, manifest)
        assert store.stats()[0]["lost"] == {"corrupt": 1}


def test_a_damaged_payload_is_not_copied(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with MemoryStore(ROOM) as source, DiskStore(folder, ROOM, files=files) as target:
        manifest = material.must_save(source, draft_of(material, "v1"))
        source._blobs[manifest.objects[0].key, 0][5] ^= 1
        made = copy_version(manifest, source, target)
        refused(made, "unavailable")
        assert "checksum" in str(made)
        assert isinstance(target.find("red", "v1"), Miss)
        assert target.stats()[0]["used_bytes"] == 0


def test_a_version_that_was_stored_by_an_earlier_process_is_not_stored_again(folder: Path, files: FailingFiles) -> None:
    material = Material()
    with tiered(folder, files) as store:
        old = material.must_save(store, draft_of(material, "v1"))
    with tiered(folder, files) as store:
        refused(store.prepare(draft_of(material, "v1"), SIZE), "exists")
        material.check(store, found(store, "red", "v1"))
        material.check(store, old)


def test_everything_queued_is_below_after_close(folder: Path, files: FailingFiles) -> None:
    material = Material()
    store = tiered(folder, files)
    for number in range(10):
        material.must_save(store, draft_of(material, f"v{number}"))
    store.close()
    store.close()
    with DiskStore(folder, ROOM, fsync=False) as lower:
        assert len(names(lower)) == 10


def test_a_dead_server_leaves_a_memory_store(redis_server: RedisProcess) -> None:
    redis_server.flush()
    material = Material()
    server = RedisProcess("--save", "", "--appendonly", "no")
    try:
        lower = RedisStore(server.url, ROOM, retry_s=0, timeout_s=0.3)
        with TieredStore(MemoryStore(ROOM), lower) as store:
            first = material.must_save(store, draft_of(material, "v1"))
            store.flush()
            server.kill()
            second = material.must_save(store, draft_of(material, "v2", shared=first.objects))
            store.flush()
            for manifest in (first, second):
                material.check(store, found(store, "red", manifest.version))
            store.upper.delete("red", "v1")
            refused(store.find("red", "v1"), "unavailable")
            server.start()
            material.must_save(store, draft_of(material, "v3"))
            store.flush()
            assert sorted(names(store.lower)) == ["v2", "v3"]
            store.check_integrity()
    finally:
        server.close()


@pytest.fixture
def pinned_parent() -> Iterator[int]:
    """Runs on one core."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    yield len(before)
    os.sched_setaffinity(0, before)


def test_the_background_thread_leaves_its_parents_core(folder: Path, files: FailingFiles, pinned_parent: int) -> None:
    cores: list[int] = []
    with tiered(folder, files) as store:
        assert store._background.submit(lambda: cores.append(len(os.sched_getaffinity(0))))
        store.flush()
    assert cores == [pinned_parent]
    assert len(os.sched_getaffinity(0)) == 1


def test_a_job_that_fails_does_not_end_the_thread(
    folder: Path, files: FailingFiles, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    material = Material()
    with tiered(folder, files) as store:
        assert store._background.submit(fail)
        made = material.must_save(store, draft_of(material, "v1"))
        store.flush()
        material.check(store.lower, made)
    assert "on purpose" in caplog.text
    assert store._background.submit(fail) is False


def test_a_lost_payload_of_both_tiers_says_so(folder: Path, files: FailingFiles) -> None:
    with tiered(folder, files) as store:
        [lost] = store.fetch(["0" * 32], 0).values()
        assert lost == Lost("it is not stored", "absent")
