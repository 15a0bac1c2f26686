"""The disk tier beyond the conformance suite: its files, its upkeep, and what several handles see."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from agentcache.errors import ConfigError, StoreError
from agentcache.store.tiers import Manifest, Miss, Part, Refused
from agentcache.store.tiers.conformance_kit import Material, found, refused
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.files import Files
from tests.store.tiers.backends import FailingFiles, flip
from tests.store.tiers.test_manifest import sealed

ROOM = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_store(folder: Path, budget: int = ROOM, **options: object) -> DiskStore:
    return DiskStore(folder, budget, fsync=False, **options)  # type: ignore[arg-type]


def test_payload_files_are_safetensors_one_a_save_and_rank(folder: Path) -> None:
    material = Material()
    with open_store(folder) as store:
        first = material.must_save(store, material.draft("v1", ranks=2, new=(300, 5, 70_000)))
        material.must_save(store, material.draft("v2", ranks=2, shared=first.objects, new=(9,)))
        material.must_save(store, material.draft("v3", ranks=2, shared=first.objects, new=()))
    files = sorted((folder / "payloads").iterdir())
    assert len(files) == 4
    read = {}
    for path in files:
        rank = int(path.name.split(".")[1])
        with safe_open(path, "np") as tensors:
            read |= {(key, rank): tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    assert read.keys() == material.blobs.keys()
    assert all(np.array_equal(read[at], material.blobs[at]) for at in read)


def test_a_folder_with_something_else_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="no store folder, and not empty"):
        open_store(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("marker", "match"), [('{"format": 2}', "format 2"), ("", "damaged"), ("[]", "damaged")])
def test_another_format_or_a_damaged_marker_is_an_error(folder: Path, marker: str, match: str) -> None:
    open_store(folder).close()
    (folder / "agentcache-store.json").write_text(marker)
    with pytest.raises(StoreError, match=match):
        open_store(folder)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(tmp_path / "file" / "store")


@pytest.mark.parametrize("options", [{"policy": "mru"}, {"lock_timeout_s": -1.0}, {"lock_timeout_s": float("nan")}])
def test_settings_that_make_no_sense_are_errors(folder: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        open_store(folder, **options)


def test_a_lock_that_is_held_too_long_refuses_the_save_and_stops_no_reader(folder: Path) -> None:
    material = Material()
    with open_store(folder, lock_timeout_s=0.05) as store:
        first = material.must_save(store, material.draft("v1"))
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = store.prepare(material.draft("v2"), 1000)
            refused(made, "unavailable")
            assert "another process" in str(made)
            material.check(store, found(store, "red", "v1"))
        assert found(store, "red", "v1") == first
        material.must_save(store, material.draft("v2"))


def test_the_order_of_use_survives_a_restart_whatever_the_clock_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    material = Material()
    drafts = [material.draft(f"v{number}", new=(10_000,)) for number in range(6)]
    budget = 3 * (drafts[0].cost_bytes + 10_000)
    jumps = iter([1e9, 5e9, -1e9, 0.0, 2e9, 1.0])
    monkeypatch.setattr(time, "time", lambda: next(jumps, 7.0))
    with open_store(folder, budget) as store:
        for draft in drafts[:3]:
            material.must_save(store, draft)
        found(store, "red", "v0")
        store.hint("red", "v1", 1)
    with open_store(folder, budget) as store:
        for draft in drafts[3:5]:
            material.must_save(store, draft)
        listed = store.versions()
        assert not isinstance(listed, Refused)
        assert [info.version for info in listed] == ["v1", "v3", "v4"]


def test_handles_agree_on_the_order_of_use(folder: Path) -> None:
    material = Material()
    drafts = [material.draft(f"v{number}", new=(10_000,)) for number in range(4)]
    budget = 3 * (drafts[0].cost_bytes + 10_000)
    with open_store(folder, budget) as left, open_store(folder, budget) as right:
        for draft in drafts[:3]:
            material.must_save(left, draft)
        found(right, "red", "v0")
        for _ in range(5):
            found(left, "red", "v1")
        found(left, "red", "v2")
        found(right, "red", "v0")
        material.must_save(left, drafts[3])
        listed = right.versions()
        assert not isinstance(listed, Refused)
        assert [info.version for info in listed] == ["v0", "v2", "v3"]


def test_a_version_that_another_handle_made_anew_is_read_anew(folder: Path) -> None:
    material = Material()
    with open_store(folder) as left, open_store(folder) as right:
        material.must_save(left, material.draft("v1"))
        found(right, "red", "v1")
        assert left.delete("red", "v1") is True
        again = material.must_save(left, material.draft("v1"))
        assert found(right, "red", "v1") == again
        material.check(right, again)


@pytest.mark.parametrize("content", [None, b"", b"\x07" + bytes(7), b"\xff" * 8])
def test_a_lost_generation_is_made_up_for(folder: Path, content: bytes | None) -> None:
    material = Material()
    with open_store(folder) as left, open_store(folder) as right:
        first = material.must_save(left, material.draft("v1"))
        if content is None:
            (folder / "generation").unlink()
        else:
            (folder / "generation").write_bytes(content)
        second = material.must_save(right, material.draft("v2"))
        assert second.sequence > first.sequence
        material.check(left, found(left, "red", "v2"))
        left.check_integrity()
        right.check_integrity()


def test_unused_parts_of_a_file_are_given_back(folder: Path) -> None:
    material = Material()
    size = 1 << 20
    with open_store(folder) as store:
        first = material.must_save(store, material.draft("v1", new=(size, size)))
        second = material.must_save(store, material.draft("v2", shared=first.objects[1:], new=(100,)))
        path = folder / "payloads" / f"{first.objects[0].place.partition(':')[0]}.0.safetensors"
        before = 512 * path.stat().st_blocks
        assert store.delete("red", "v1") is True
        assert 512 * path.stat().st_blocks <= before - size + 8192
        assert path.stat().st_size > 2 * size
        material.check(store, second)
        assert store.delete("red", "v2") is True
        assert [*(folder / "payloads").iterdir()] == []


def test_gc_clears_what_a_dead_process_left_and_nothing_else(folder: Path) -> None:
    material = Material()
    with open_store(folder) as store:
        kept = material.must_save(store, material.draft("kept"))
        damaged = material.must_save(store, material.draft("damaged", new=(40_000,)))
        mine = material.draft("mine")
        ticket = store.prepare(mine, material.reserve(mine))
        assert isinstance(ticket, str)
        flip(next((folder / "versions").glob(f"{damaged.name}-*")), 100)
        (folder / "payloads" / f"{'0' * 32}.0.safetensors").write_bytes(bytes(1000))
        (folder / "owners" / "0123456789abcdef").touch()
        dead = folder / "staging" / f"0123456789abcdef-{'1' * 32}"
        dead.mkdir()
        (dead / "0.part").write_bytes(bytes(500))
        with open_store(folder) as other:
            report = other.gc()
            assert not isinstance(report, Refused)
            assert (report.saves, report.manifests, report.payloads) == (1, 1, 2)
            assert report.freed_bytes > 41_000
            again = other.gc()
            assert not isinstance(again, Refused)
            assert (again.saves, again.manifests, again.payloads, again.freed_bytes) == (0, 0, 0, 0)
            assert isinstance(other.find("red", "damaged"), Miss)
        assert not dead.exists()
        assert len([*(folder / "owners").iterdir()]) == 1
        assert material.put(store, ticket, mine) is None, "an open save of a living process was cleared away"
        assert isinstance(store.complete(ticket), Manifest)
        material.check(store, kept)
        store.check_integrity()


def test_gc_touches_nothing_when_a_manifest_is_of_another_format(folder: Path) -> None:
    material = Material()
    with open_store(folder) as store:
        made = material.must_save(store, material.draft("v1"))
    [path] = (folder / "versions").iterdir()
    fields = json.loads(path.read_bytes())
    fields.pop("checksum")
    path.write_bytes(sealed(fields | {"format": 2}))
    with open_store(folder) as store:
        refused(store.find("red", "v1"), "foreign")
        refused(store.gc(), "foreign")
        report = store.verify()
        assert not isinstance(report, Refused)
        assert "format 2" in report.faults[0]
        path.write_bytes(made.encode())
    with open_store(folder) as store:
        material.check(store, found(store, "red", "v1"))


@pytest.mark.parametrize("forged", ["tenant", "checksum"])
def test_a_manifest_that_claims_anothers_objects_is_refused(folder: Path, forged: str) -> None:
    material = Material()
    with open_store(folder) as store:
        mine = material.must_save(store, material.draft("v1"))
    objects = [e._replace(parts=(Part(e.parts[0].size_bytes, "0" * 16),)) for e in mine.objects]
    claim = mine.model_copy(update={"namespace": "blue"} if forged == "tenant" else {"version": "v2"})
    claim = claim.with_objects(mine.objects if forged == "tenant" else objects, sequence=7)
    (folder / "versions" / f"{claim.name}-{7:016x}.json").write_bytes(claim.encode())
    with open_store(folder) as store:
        refused(store.find(claim.namespace, claim.version), "corrupt")
        material.check(store, found(store, "red", "v1"))


def test_open_saves_of_other_handles_count(folder: Path) -> None:
    material = Material()
    drafts = [material.draft(f"v{number}", new=(10_000,)) for number in range(3)]
    each = drafts[0].cost_bytes + 10_000
    with open_store(folder, 2 * each - 10) as left, open_store(folder, 2 * each - 10) as right:
        parent = material.must_save(left, drafts[0])
        child = material.draft("child", shared=parent.objects, new=())
        ticket = left.prepare(child, 0)
        assert isinstance(ticket, str)
        refused(right.prepare(drafts[1], 10_000), "full")
        material.check(right, found(right, "red", "v0"))
        left.abort(ticket)
        material.must_save(right, drafts[1])


def test_a_save_that_is_published_is_no_open_save_though_its_rest_cannot_be_removed(folder: Path) -> None:
    class NoRemoval(Files):
        def remove_folder(self, path: Path) -> None:
            raise OSError(errno.EIO, "on purpose")

    material = Material()
    with open_store(folder, files=NoRemoval(fsync=False)) as store, open_store(folder) as other:
        manifest = material.must_save(store, material.draft("v1"))
        material.must_save(other, material.draft("v2"))
        assert other.stats()[0]["reserved_bytes"] == 0
        material.check(other, manifest)


def test_payloads_of_a_save_that_came_too_late_are_removed(folder: Path) -> None:
    material = Material()
    with open_store(folder) as store:
        late = material.draft("v1")
        ticket = store.prepare(late, material.reserve(late))
        assert isinstance(ticket, str)
        assert material.put(store, ticket, late) is None
        material.must_save(store, material.draft("v1"))
        refused(store.complete(ticket), "exists")
        assert len([*(folder / "payloads").iterdir()]) == 2
        store.abort(ticket)
        assert len([*(folder / "payloads").iterdir()]) == 1


def test_gc_leaves_the_payloads_of_a_save_that_is_about_to_be_published(folder: Path) -> None:
    files = FailingFiles()
    material = Material()
    with open_store(folder, files=files) as store, open_store(folder) as other:
        draft = material.draft("v1")
        ticket = store.prepare(draft, material.reserve(draft))
        assert isinstance(ticket, str)
        assert material.put(store, ticket, draft) is None
        with files.failing(errno.ENOSPC, after=2):  # the payloads are moved, the manifest cannot be written
            refused(store.complete(ticket), "unavailable")
        assert len([*(folder / "payloads").iterdir()]) == 1
        report = other.gc()
        assert not isinstance(report, Refused)
        assert report.payloads == 0
        made = store.complete(ticket)
        assert isinstance(made, Manifest)
        material.check(store, made)


def test_a_handle_that_closes_ends_its_saves(folder: Path) -> None:
    material = Material()
    draft = material.draft("v1")
    store = open_store(folder)
    ticket = store.prepare(draft, material.reserve(draft))
    assert isinstance(ticket, str)
    first = draft.objects[0].key
    store.put(ticket, first, 0, material.blobs[first, 0])
    before = len(os.listdir("/proc/self/fd"))
    store.close()
    store.close()
    assert len(os.listdir("/proc/self/fd")) < before
    assert [*(folder / "staging").iterdir()] == []
    assert [*(folder / "owners").iterdir()] == []


def test_a_rank_whose_save_another_process_ended_gives_back_its_file(folder: Path) -> None:
    material = Material()
    with open_store(folder) as scheduler, open_store(folder) as worker:
        for number in range(5):
            draft = material.draft(f"v{number}")
            ticket = scheduler.prepare(draft, material.reserve(draft))
            assert isinstance(ticket, str)
            first = draft.objects[0].key
            worker.put(ticket, first, 0, material.blobs[first, 0])
            scheduler.abort(ticket)
        open_parts = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
        assert sum(".part" in name for name in open_parts) == 1


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_many_handles_may_make_the_folder_at_once(folder: Path) -> None:
    faults: list[BaseException] = []

    def make() -> None:
        try:
            open_store(folder).close()
        except StoreError as error:
            faults.append(error)

    threads = [threading.Thread(target=make) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
