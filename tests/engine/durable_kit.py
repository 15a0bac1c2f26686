"""An engine over a store that a test breaks, and what must hold of it afterwards."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from agentcache.engine.wire import ResumeParams
from agentcache.store.tiers import KVStore, Manifest, Refused
from tests.engine.harness import Engine, Reference, assert_exact, edit, first_version, text

__all__ = [
    "assert_healthy",
    "assert_idle",
    "clear_store",
    "flip",
    "forget_memory",
    "manifest_file",
    "payload_file",
    "put_down",
    "stores",
]

_fresh = count(1)


def stores(engine: Engine) -> tuple[Any, Any]:
    """Returns the two handles of an engine: the scheduler half's and the worker half's."""
    assert engine.half.tier is not None
    assert engine.worker.tier is not None
    return engine.half.tier.store, engine.worker.tier.store


def clear_store(store: KVStore) -> None:
    """Removes all versions."""
    listed = store.versions()
    assert not isinstance(listed, Refused), listed
    for info in listed:
        assert store.delete(info.namespace, info.version) is True


def forget_memory(engine: Engine) -> None:
    """Empties the engine's own prefix cache and the checkpoints in memory, as a restart does."""
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.ask([5, 6, 7], n=1)  # the step in which the worker half hears of it
    engine.forget_local()
    assert not engine.worker.store._objects


def put_down(engine: Engine, name: str = "v1", **more: Any) -> Manifest:
    """Saves OLD as a version, which is in the store alone afterwards; returns its manifest."""
    first_version(engine, name, **more)
    found = stores(engine)[0].find("default", name)
    assert isinstance(found, Manifest), found
    forget_memory(engine)
    return found


def flip(path: Path, at: int, bit: int = 4) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    with path.open("r+b") as file:  # in place: the file keeps its modification time's meaning and its name
        file.write(data)


def manifest_file(folder: Path, manifest: Manifest) -> Path:
    """Returns the file of a version."""
    (path,) = (folder / "versions").glob(f"{manifest.name}-*.json")
    return path


def payload_file(folder: Path, manifest: Manifest, index: int = 0) -> tuple[Path, int, int]:
    """Returns the file of one of a version's objects, in the order of its rows, where it begins and how long it is."""
    key = manifest.extents[index].key
    (entry,) = (entry for entry in manifest.objects if entry.key == key)
    save, _, offsets = entry.place.partition(":")
    return folder / "payloads" / f"{save}.0.safetensors", int(offsets), entry.size_bytes


def assert_idle(engine: Engine) -> None:
    """Asserts that nothing is left of whatever went wrong: no pin, ticket, reservation, order or payload."""
    engine.drain()
    engine.check()
    tier, worker = engine.half.tier, engine.worker.tier
    assert tier is not None
    assert worker is not None
    assert not (tier.open_saves or tier._seeks or tier._stagings)
    assert not (worker.pending or worker._staged or worker._demoted)
    for store in stores(engine):
        for stats in store.stats():
            assert stats["reserved_bytes"] == 0, stats


def assert_healthy(engine: Engine, reference: Reference) -> None:
    """Asserts that the engine and its store serve as if nothing had happened."""
    number = next(_fresh)
    ids = text(200, seed=10_000 + number)
    name = f"healthy{number}"
    first_version(engine, name, ids)
    assert isinstance(stores(engine)[0].find("default", name), Manifest)
    forget_memory(engine)
    edited = edit(ids, 90, 5, text(7, seed=20_000 + number))
    exact = engine.ask(edited, ResumeParams(version=f"{name}e", parent=name))
    assert (exact.recovery.tier, exact.recovery.reason) == ("store", None)
    assert exact.recovery.restored_tokens == 90
    engine.forget_local()
    reused = engine.ask(edited, ResumeParams(version=f"{name}r", parent=name, policy="edit_local"))
    assert reused.recovery.reason is None
    assert reused.recovery.reused_tokens > 50
    assert_exact(reference, exact, engine.ask(edited))
    assert_idle(engine)
