"""What goes wrong with a disk below the engine: every answer is exact or recovered from intact rows, and the engine lives."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from agentcache.store.tiers import Manifest, Miss
from tests.engine.durable_kit import (
    assert_healthy,
    assert_idle,
    clear_store,
    flip,
    forget_memory,
    manifest_file,
    payload_file,
    put_down,
    stores,
)
from tests.engine.harness import NEW, OLD, Engine, assert_exact, first_version, lossy, text

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults") / "store"


@pytest.fixture
def engine(start_engine, tiny, folder) -> Iterator[Engine]:
    """Returns an engine over an empty folder; one for all tests of this module."""
    engine = start_engine(tiny("llama"), extra={"store": f"disk://{folder}?fsync=false"})
    clear_store(stores(engine)[0])
    yield engine
    assert_idle(engine)


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["exact", "k8v4"])
@pytest.mark.parametrize("where", ["head", "scales", "codes", "end"])
def test_a_flipped_bit_of_a_payload_moves_its_rows_into_the_recomputation(engine, reference, folder, precision, where):
    manifest = put_down(engine, precision=precision)
    path, start, size = payload_file(folder, manifest)
    flip(path, start + {"head": 5, "scales": 16 + 28 + 3, "codes": size // 2, "end": size - 1}[where])
    child = engine.ask(NEW, lossy("v2"))
    # The first object holds rows 0 to 255 of OLD; 32 of S were to be computed anyway.
    assert child.recovery.lost_tokens == 100 + (256 - 110) - 32
    assert child.recovery.restored_tokens == 309 - 266
    assert "lost or corrupt" in child.recovery.reason
    engine.forget_local()
    exact = engine.ask(NEW, ResumeParams(version="v3", parent="v1"))
    assert exact.recovery.exact
    assert_exact(reference, exact, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    version = engine.version("v2")
    assert engine.stored_error(version, version.exact_end) < 1e-3
    assert_healthy(engine, reference)


@pytest.mark.parametrize("precision", ["exact", "k8v4"])
@pytest.mark.parametrize("at", [3, -3], ids=["scales", "codes"])
def test_a_flipped_bit_in_memory_is_noticed_before_it_is_restored_or_stored(
    engine, reference, precision, at, monkeypatch
):
    """As `test_faults` flips it, and here before the copy below is made, too."""
    demote = engine.worker.tier.demote

    def damaged(order, payloads):
        payloads.get(order.objects[0][0]).runs[0].data.numpy()[at] ^= 4
        demote(order, payloads)

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker.tier, "demote", damaged)
        first_version(engine, precision=precision)
    assert isinstance(stores(engine)[0].find("default", "v1"), Miss), "damaged rows are not stored"
    assert_idle(engine)
    engine.forget_local()
    child = engine.ask(NEW, lossy("v2"))
    assert child.recovery.lost_tokens > 0
    assert_exact(reference, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    assert_healthy(engine, reference)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_a_flipped_bit_of_a_manifest_means_a_full_prefill(engine, reference, folder, share):
    manifest = put_down(engine)
    path = manifest_file(folder, manifest)
    flip(path, int(share * (path.stat().st_size - 1)))
    child = engine.ask(NEW, lossy("v2"))
    assert "cannot be restored: the manifest's checksum does not match" in child.recovery.reason
    assert child.recovery.exact
    assert_exact(reference, child)
    assert_healthy(engine, reference)
    assert stores(engine)[0].gc().manifests == 1


@pytest.mark.parametrize("name", ["generation", "clock", "lock", "header"])
def test_a_damaged_file_beside_the_rows_costs_nothing(engine, reference, folder, name):
    manifest = put_down(engine)
    path = payload_file(folder, manifest)[0] if name == "header" else folder / name
    path.touch()
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)
    if name == "clock":
        os.utime(path, (2**33, 2**33))
    child = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert child.recovery.reason is None
    assert child.recovery.restored_tokens == 100
    assert_exact(reference, child)
    assert_healthy(engine, reference)


# -- truncated files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 7, 0.5, -1])
@pytest.mark.parametrize("kind", ["payload", "manifest"])
def test_a_truncated_file_is_never_a_wrong_row(engine, reference, folder, kind, kept):
    manifest = put_down(engine)
    path = manifest_file(folder, manifest) if kind == "manifest" else payload_file(folder, manifest)[0]
    size = path.stat().st_size
    os.truncate(path, {0.5: size // 2, -1: size - 1}.get(kept, kept))
    child = engine.ask(NEW, lossy("v2"))
    if kind == "manifest":
        assert "cannot be restored" in child.recovery.reason
        assert_exact(reference, child)
    else:
        assert child.recovery.lost_tokens > 0
    engine.forget_local()
    assert_exact(reference, engine.ask(NEW, ResumeParams(version="v3", parent="v1")), engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    assert_healthy(engine, reference)


def test_a_payload_file_cut_off_while_it_is_fetched(engine, reference, folder, monkeypatch):
    manifest = put_down(engine)
    path = payload_file(folder, manifest)[0]
    preadv = os.preadv

    def cut(fd, buffers, offset):
        os.truncate(path, offset + 10)
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", cut)
        child = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert child.recovery.lost_tokens == 100
    assert_exact(reference, child)
    assert_healthy(engine, reference)


def test_a_folder_in_a_manifests_place_spoils_that_version_alone(engine, reference, folder):
    manifest = put_down(engine)
    put_down(engine, "other")
    path = manifest_file(folder, manifest)
    whole = path.read_bytes()
    path.unlink()
    path.mkdir()
    try:
        (folder / "generation").write_bytes(bytes(8))  # the handles look into the folder again
        child = engine.ask(NEW, lossy("v2"))
        assert child.recovery.exact
        assert_exact(reference, child)
        engine.forget_local()
        assert engine.ask(NEW, lossy("v3", "other")).recovery.reason is None
        assert_healthy(engine, reference)
    finally:
        path.rmdir()
    path.write_bytes(whole)
    assert engine.ask(NEW, lossy("v4")).recovery.reason is None


# -- a disk that is full, or cannot be written -------------------------------------------------------------------------

CHANGES = ("create", "write", "rename", "make_folder", "mark_use", "unlink", "write_whole")


@contextmanager
def failing(store, monkeypatch, number, changes=CHANGES):
    """Makes changes of the file system through a handle fail."""

    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        for name in changes:
            patch.setattr(store._files, name, fail)
        yield


@pytest.mark.parametrize(
    ("handles", "changes"),
    [("sw", CHANGES), ("w", ("write",)), ("s", ("write_whole",)), ("s", ("rename",)), ("s", ("unlink",))],
    ids=["everything", "a payload", "a manifest", "a rename", "a removal"],
)
def test_a_full_disk_costs_the_save_below_and_nothing_else(engine, reference, monkeypatch, handles, changes):
    scheduler, worker = stores(engine)
    with (
        failing(scheduler, monkeypatch, errno.ENOSPC, changes if "s" in handles else ()),
        failing(worker, monkeypatch, errno.ENOSPC, changes if "w" in handles else ()),
    ):
        first_version(engine)
        engine.check()
        assert engine.half.tier.open_saves == 0
        engine.forget_local()
        child = engine.ask(NEW, lossy("v2", save=False))
        assert (child.recovery.tier, child.recovery.reason) == ("memory", None)
        assert_exact(reference, engine.ask(NEW))
    # With the next save that goes through, the disk is offered what it could not take.
    first_version(engine, "v4", text(80, seed=5))
    assert_idle(engine)
    forget_memory(engine)
    child = engine.ask(NEW, lossy("v5"))
    assert (child.recovery.tier, child.recovery.reason) == ("store", None)
    assert_healthy(engine, reference)


@pytest.fixture
def unwritable(folder) -> Iterator[None]:
    """Takes the right to write the folder away, from root too."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    parents = {path: path.stat().st_mode for path in folder.parents if path != Path("/")}
    root = os.geteuid() == 0
    try:
        for path, mode in parents.items():
            if root and os.access(path, os.W_OK):
                path.chmod(mode | stat.S_IXGRP | stat.S_IXOTH)
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in {**modes, **parents}.items():
            if path.exists():
                path.chmod(mode)


def test_a_read_only_folder_is_read(engine, reference, request):
    put_down(engine)
    request.getfixturevalue("unwritable")
    child = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert (child.recovery.tier, child.recovery.reason) == ("store", None)
    assert child.recovery.restored_tokens == 100
    assert child.recovery.saved == "pending"
    again = engine.ask(NEW, lossy("v3", "v2"))
    assert again.recovery.tier == "memory", "what cannot be stored below is still in memory"
    assert isinstance(stores(engine)[0].find("default", "v2"), Miss)
    assert isinstance(stores(engine)[0].find("default", "v1"), Manifest)
    assert_exact(reference, child, engine.ask(NEW))


# -- budgets of nothing ------------------------------------------------------------------------------------------------


def test_a_store_of_no_bytes_refuses_and_memory_goes_on(start_engine, tiny, reference, folder):
    engine = start_engine(tiny("llama"), extra={"store": f"disk://{folder}-none?bytes=0"})
    first_version(engine)
    child = engine.ask(NEW, lossy("v2"))
    assert (child.recovery.tier, child.recovery.reason) == ("memory", None)
    forget_memory(engine)
    lost = engine.ask(NEW, lossy("v3"))
    assert "unknown" in lost.recovery.reason
    assert_exact(reference, lost, engine.ask(NEW))
    assert stores(engine)[0].stats()[0]["refusals"]["full"] >= 2
    assert_idle(engine)


def test_no_memory_over_a_store_means_exact_answers(start_engine, tiny, reference, folder):
    """What does not fit into memory is neither saved nor brought up."""
    engine = start_engine(tiny("llama"), extra={"store": f"disk://{folder}-below?fsync=false"})
    put_down(engine)
    engine = start_engine(tiny("llama"), extra={"store": f"disk://{folder}-below?fsync=false", "host_bytes": 0})
    answer = engine.ask(OLD, ResumeParams(version="w1"))
    assert answer.recovery.saved == "refused"
    child = engine.ask(NEW, lossy("v2"))
    assert "do not fit into memory" in child.recovery.reason
    engine.llm.collective_rpc("agentcache_hint", args=("default", "v1"))
    engine.worker.tier._up.flush()
    assert not engine.worker.tier._warm
    assert_exact(reference, answer, child, engine.ask(NEW))
    assert_idle(engine)


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["time", "monotonic"])
@pytest.mark.parametrize("jump", [10**8, -(10**8)], ids=["forward", "back"])
def test_a_clock_that_jumps_changes_nothing(engine, reference, monkeypatch, clock, jump):
    now = getattr(time, clock)
    first_version(engine)
    with monkeypatch.context() as patch:
        patch.setattr(time, clock, lambda: now() + jump)
        first_version(engine, "w1", text(150, seed=6))
        forget_memory(engine)
        assert stores(engine)[0].hint("default", "v1")
        engine.llm.collective_rpc("agentcache_hint", args=("default", "v1"))
        child = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
        assert (child.recovery.tier, child.recovery.reason) == ("store", None)
    forget_memory(engine)
    again = engine.ask(NEW, ResumeParams(version="v3", parent="v2", policy="edit_local"))
    assert (again.recovery.tier, again.recovery.reason) == ("store", None)
    assert_exact(reference, child)
    assert_healthy(engine, reference)


def test_a_clock_that_jumps_while_requests_wait(engine, reference, monkeypatch):
    put_down(engine)
    now, steps = {name: getattr(time, name) for name in ("time", "monotonic")}, iter(range(10**6))
    for name in now:
        monkeypatch.setattr(time, name, lambda name=name: now[name]() + (-1) ** next(steps) * 10**6)
    children = [engine.add(NEW, ResumeParams(version=f"c{i}", parent="v1"), n=20) for i in range(3)]
    engine.run()
    engine.drain()
    assert [child.recovery.reason for child in children] == [None] * 3
    monkeypatch.undo()
    assert_exact(reference, *children)
    assert_healthy(engine, reference)
