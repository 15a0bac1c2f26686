"""What can go wrong with a disk and with the processes on it: answers, never wrong bytes, nothing half there."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agentcache.store.tiers import GcReport, Lost, Manifest, Miss, Refused
from agentcache.store.tiers.conformance_kit import Material, found, refused
from agentcache.store.tiers.disk import DiskStore
from tests.store.tiers.backends import FailingFiles, flip

HERE = Path(__file__).parent
ROOM = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def filled(folder: Path) -> tuple[Path, Material, Manifest]:
    """A folder with a version of three objects on two ranks."""
    material = Material()
    with DiskStore(folder, ROOM, fsync=False) as store:
        manifest = material.must_save(store, material.draft("v1", ranks=2, new=(300, 5000, 200)))
    return folder, material, manifest


def test_a_failure_of_any_one_change_refuses_the_save_and_leaves_nothing(folder: Path) -> None:
    files = FailingFiles()
    with DiskStore(folder, ROOM, files=files) as store:
        for number in range(100):
            material = Material(number)
            parent = material.must_save(store, material.draft(f"p{number}"))
            child = material.draft(f"c{number}", shared=parent.objects[:1])
            before = store.stats()[0]["used_bytes"]
            with files.failing(errno.ENOSPC, after=number):
                made = material.save(store, child)
            if isinstance(made, Manifest):
                material.check(store, made)
                assert number > 15, "too few changes were made to fail"
                break
            refused(made, "unavailable")
            assert isinstance(store.find("red", child.version), Miss)
            store.abort("")
            material.must_save(store, material.draft(f"c{number}", shared=parent.objects[:1]))
            assert store.stats()[0]["reserved_bytes"] == 0
            store.check_integrity()
            assert store.delete("red", child.version) is True
            assert store.stats()[0]["used_bytes"] == before
            assert store.delete("red", parent.version) is True
        else:
            pytest.fail("a save is more than 100 changes")
        material.must_save(store, material.draft("last"))
        assert [*(folder / "staging").iterdir()] == []


def test_a_save_can_be_completed_once_more_after_a_failure(folder: Path) -> None:
    files = FailingFiles()
    material = Material()
    with DiskStore(folder, ROOM, files=files) as store:
        draft = material.draft("v1", ranks=2)
        ticket = store.prepare(draft, material.reserve(draft))
        assert isinstance(ticket, str)
        assert material.put(store, ticket, draft) is None
        for number in range(100):
            with files.failing(errno.EIO, after=number):
                made = store.complete(ticket)
            if isinstance(made, Manifest):
                break
            refused(made, "unavailable")
            assert isinstance(store.find("red", "v1"), Miss)
        assert number > 5
        material.check(store, found(store, "red", "v1"))


def test_a_put_can_be_made_once_more_after_a_failure(folder: Path) -> None:
    files = FailingFiles()
    material = Material()
    with DiskStore(folder, ROOM, files=files) as store:
        draft = material.draft("v1", new=(100, 200))
        ticket = store.prepare(draft, material.reserve(draft))
        assert isinstance(ticket, str)
        for number in range(8):
            with files.failing(errno.ENOSPC, after=number):
                material.put(store, ticket, draft)
        assert material.put(store, ticket, draft) is None
        made = store.complete(ticket)
        assert isinstance(made, Manifest)
        material.check(store, made)


def test_renames_come_after_what_they_show_is_on_the_disk(folder: Path) -> None:
    files = FailingFiles(fsync=True)
    material = Material()
    with DiskStore(folder, ROOM, files=files) as store:
        files.changes.clear()
        material.must_save(store, material.draft("v1", ranks=2))
    dirty: set[Path] = set()
    synced_folders = []
    for name, args, file in files.changes:
        if name == "write":
            dirty.add(Path(file))
        elif name == "sync":
            dirty.remove(Path(file))
        elif name == "rename":
            source, target = args
            assert source not in dirty, f"{source.name} was renamed before it was synced"
            if target.parent.name == "versions":
                assert folder / "payloads" in synced_folders, "the payloads' names come first"
        elif name == "sync_folder":
            synced_folders.append(args[0])
    assert {path.name for path in dirty} == {"generation", "draft"}
    assert synced_folders[-1] == folder / "versions"


def test_a_process_killed_at_any_change_leaves_a_whole_version_or_none(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(HERE / "disk_crash.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    killed = [row for row in rows if row["killed"]]
    assert len(killed) > 60
    assert {row["found"]["child"] for row in killed} == {True, False}
    assert {row["found"]["parent"] for row in killed} == {True, False}
    assert any(row["cleared"] for row in killed)


def start_writer(folder: Path, seed: int, count: int, budget: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "disk_writer.py"), str(folder), str(seed), str(count), str(budget)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_share_a_folder_and_its_budget(folder: Path) -> None:
    budget = 60_000
    writers = [start_writer(folder, seed, 60, budget) for seed in (1, 2)]
    results = [writer.communicate(timeout=120) for writer in writers]
    for writer, (_, errors) in zip(writers, results, strict=True):
        assert writer.returncode == 0, errors
    assert sum(json.loads(out.splitlines()[-1])["saved"] for out, _ in results) > 60
    with DiskStore(folder, budget, fsync=False) as store:
        listed = store.versions()
        assert not isinstance(listed, Refused)
        assert len(listed) > 3
        report = store.verify()
        assert not isinstance(report, Refused)
        assert report.faults == ()
        stats = store.stats()[0]
        assert stats["reserved_bytes"] == 0
        assert stats["used_bytes"] <= budget
        store.check_integrity()
        cleared = store.gc()
        assert not isinstance(cleared, Refused)
        assert (cleared.saves, cleared.manifests, cleared.payloads) == (0, 0, 0)


def test_processes_killed_while_they_save_leave_whole_versions(folder: Path) -> None:
    delay = random.Random(3)
    for seed in range(4):
        writer = start_writer(folder, seed, 10_000, ROOM)
        assert writer.stdout is not None
        for _ in range(delay.randrange(1, 40)):
            assert writer.stdout.readline() == "saved\n"
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        with DiskStore(folder, ROOM, fsync=False) as store:
            report = store.verify()
            assert not isinstance(report, Refused)
            assert report.faults == ()
            assert report.versions > 0
            store.check_integrity()
            assert store.stats()[0]["reserved_bytes"] == 0, "a dead process holds bytes"
            assert not isinstance(store.gc(), Refused)


# -- damage ------------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def test_a_flipped_bit_anywhere_is_never_a_wrong_byte(filled: tuple[Path, Material, Manifest], tmp_path: Path) -> None:
    folder, material, manifest = filled
    rng = random.Random(1)
    outcomes = set()
    for number in range(150):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        path = rng.choice(files_of(copy))
        if path.name == "agentcache-store.json":
            continue
        flip(path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8))
        with DiskStore(copy, ROOM, fsync=False) as store:
            made = store.find("red", "v1")
            outcomes.add(type(made).__name__)
            if isinstance(made, Manifest):
                assert made == manifest
                for rank in range(2):
                    for key, blob in store.fetch([e.key for e in made.objects], rank).items():
                        outcomes.add(type(blob).__name__)
                        assert isinstance(blob, Lost) or np.array_equal(blob, material.blobs[key, rank])
            report = store.verify()
            assert not isinstance(report, Refused)
            damaged = path.parent.name == "versions"
            assert report.faults or not damaged
            material.must_save(store, material.draft("v2"))
            assert not isinstance(store.gc(), Refused)
            store.check_integrity()
        shutil.rmtree(copy)
    assert outcomes == {"Manifest", "Refused", "Lost", "ndarray"}


@pytest.mark.parametrize("place", ["versions", "payloads"])
def test_a_truncated_file_is_refused_or_lost(
    place: str, filled: tuple[Path, Material, Manifest], tmp_path: Path
) -> None:
    folder, material, manifest = filled
    path = next(iter(sorted((folder / place).iterdir())))
    whole = path.read_bytes()
    kept = set()
    for size in sorted({0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}):
        path.write_bytes(whole[:size])
        with DiskStore(folder, ROOM, fsync=False) as store:
            made = store.find("red", "v1")
            if place == "versions":
                refused(made, "corrupt")
                continue
            assert made == manifest
            for key, blob in store.fetch([e.key for e in manifest.objects], 0).items():
                assert isinstance(blob, Lost) or np.array_equal(blob, material.blobs[key, 0])
                kept.add(isinstance(blob, Lost))
            assert not any(isinstance(b, Lost) for b in store.fetch([e.key for e in manifest.objects], 1).values())
    assert kept == ({True, False} if place == "payloads" else set())


def test_a_file_damaged_while_the_store_is_open_is_noticed(filled: tuple[Path, Material, Manifest]) -> None:
    folder, _, manifest = filled
    with DiskStore(folder, ROOM, fsync=False) as store:
        assert store.find("red", "v1") == manifest
        [path] = (folder / "versions").iterdir()
        flip(path, 200)
        refused(store.find("red", "v1"), "corrupt")
        assert store.stats()[0]["refusals"] == {"corrupt": 1}
        os.truncate(folder / "payloads" / f"{manifest.objects[0].place.partition(':')[0]}.1.safetensors", 40)
        lost = store.fetch([manifest.objects[0].key], 1)[manifest.objects[0].key]
        assert isinstance(lost, Lost)
        assert lost.kind == "corrupt"


def test_another_versions_manifest_in_its_place_is_refused(filled: tuple[Path, Material, Manifest]) -> None:
    folder, material, _ = filled
    with DiskStore(folder, ROOM, fsync=False) as store:
        material.must_save(store, material.draft("v2"))
    one, two = sorted((folder / "versions").iterdir(), key=lambda p: p.stat().st_mtime)
    two.write_bytes(one.read_bytes())
    with DiskStore(folder, ROOM, fsync=False) as store:
        found(store, "red", "v1")
        refused(store.find("red", "v2"), "corrupt")


def test_swapped_payload_files_are_lost(filled: tuple[Path, Material, Manifest]) -> None:
    folder, _, manifest = filled
    left, right = sorted((folder / "payloads").iterdir())
    left.rename(folder / "x")
    right.rename(left)
    (folder / "x").rename(right)
    with DiskStore(folder, ROOM, fsync=False) as store:
        for rank in (0, 1):
            got = store.fetch([e.key for e in manifest.objects], rank)
            assert all(isinstance(blob, Lost) and blob.kind == "corrupt" for blob in got.values())


def test_a_missing_payload_file_is_lost(filled: tuple[Path, Material, Manifest]) -> None:
    folder, _, manifest = filled
    next(iter((folder / "payloads").glob("*.1.safetensors"))).unlink()
    with DiskStore(folder, ROOM, fsync=False) as store:
        got = store.fetch([e.key for e in manifest.objects], 1)
        assert {blob.kind for blob in got.values() if isinstance(blob, Lost)} == {"absent"}
        assert not any(isinstance(blob, Lost) for blob in store.fetch([e.key for e in manifest.objects], 0).values())


def test_a_manifest_that_cannot_be_read_spoils_its_version_alone(filled: tuple[Path, Material, Manifest]) -> None:
    folder, material, manifest = filled
    with DiskStore(folder, ROOM, fsync=False) as store:
        other = material.must_save(store, material.draft("v2"))
    [path] = (folder / "versions").glob(f"{manifest.name}-*")
    path.rename(folder / "aside")
    path.mkdir()
    with DiskStore(folder, ROOM, fsync=False) as store:
        refused(store.find("red", "v1"), "unavailable")
        material.check(store, other)
        refused(store.gc(), "unavailable")  # it cannot be told which payloads it needs
        path.rmdir()
        (folder / "aside").rename(path)
        again = material.must_save(store, material.draft("v3"))
        assert store.find("red", "v1") == manifest
        material.check(store, manifest)
        path.rename(folder / "aside")
        path.mkdir()
    with DiskStore(folder, ROOM, fsync=False) as store:
        newer = material.must_save(store, material.draft("v1"))
        path.rmdir()
        (folder / "aside").rename(path)
        assert isinstance(store.gc(), Refused | GcReport)
        for each in (other, again):
            material.check(store, each)
        assert store.find("red", "v1") in (manifest, newer)
        store.check_integrity()


# -- folders that cannot be written ------------------------------------------------------------------------------------


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Runs as a user whom permissions stop."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def for_everybody(folder: Path, mode: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(mode if path.is_dir() else mode & 0o666)
    for parent in folder.parents:
        if not parent.stat().st_mode & stat.S_IXOTH and os.access(parent, os.W_OK) and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)


def test_a_read_only_folder_can_be_read(
    filled: tuple[Path, Material, Manifest], request: pytest.FixtureRequest
) -> None:
    folder, material, manifest = filled
    for_everybody(folder, 0o555)
    request.getfixturevalue("unprivileged")
    with DiskStore(folder, ROOM) as store:
        assert store.find("red", "v1") == manifest
        material.check(store, manifest)
        assert store.hint("red", "v1") is True
        listed = store.versions()
        assert not isinstance(listed, Refused)
        assert len(listed) == 1
        report = store.verify()
        assert not isinstance(report, Refused)
        assert report.faults == ()
        refused(store.prepare(material.draft("v2"), 1000), "unavailable")
        refused(store.delete("red", "v1"), "unavailable")
        refused(store.gc(), "unavailable")
        assert store.find("red", "v1") == manifest


def test_a_file_that_may_not_grow_refuses_the_save(folder: Path) -> None:
    """As on a full disk, the write itself fails half-way."""
    material = Material()
    with DiskStore(folder, ROOM, fsync=False) as store:
        old = material.must_save(store, material.draft("old"))
        big = material.draft("big", new=(3_000_000,))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            made = material.save(store, big)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        refused(made, "unavailable")
        assert isinstance(store.find("red", "big"), Miss)
        assert [*(folder / "staging").iterdir()] == []
        material.check(store, old)
        material.must_save(store, material.draft("big", new=(3_000_000,)))
