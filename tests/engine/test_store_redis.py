"""A Redis server below the engine that dies, hangs, forgets or holds nonsense: exact answers, and steps that go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

import redis

from agentcache.engine.wire import ResumeParams
from agentcache.store.tiers import Manifest, Miss, Refused
from tests.engine.durable_kit import assert_healthy, assert_idle, clear_store, forget_memory, put_down, stores
from tests.engine.harness import NEW, Engine, assert_exact, edit, first_version, lossy, text
from tests.store.tiers.redis_process import RedisProcess

pytestmark = pytest.mark.engine

PREFIX = "{agentcache:1}:"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisProcess]:
    """A server that writes every change to its disk, so that it has it again after it was killed."""
    process = RedisProcess("--save", "", "--appendonly", "yes", "--appendfsync", "always")
    yield process
    process.close()


@pytest.fixture
def client(server) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as made:
        yield made


@pytest.fixture
def engine(start_engine, tiny, server) -> Iterator[Engine]:
    """Returns an engine over an empty server; one for all tests of this module."""
    engine = start_engine(tiny("llama"), extra={"store": f"{server.url}?timeout_s=1.5&retry_s=0"})
    clear_store(stores(engine)[0])
    yield engine
    assert_idle(engine)


def revive(server: RedisProcess) -> None:
    """Starts a server again, and waits until it has read what it had written."""
    server.start()
    with redis.Redis(port=server.port) as client:
        while True:
            try:
                client.ping()
                return
            except redis.BusyLoadingError:
                time.sleep(0.01)


def before(monkeypatch, store, name, action):
    """Does something just before a store's first call of a method."""
    original, left = getattr(store, name), [action]

    def call(*args):
        while left:
            left.pop()()
        return original(*args)

    monkeypatch.setattr(store, name, call)


def after(monkeypatch, store, name, action):
    """Does something just after a store's first call of a method."""
    original, left = getattr(store, name), [action]

    def call(*args):
        made = original(*args)
        while left:
            left.pop()()
        return made

    monkeypatch.setattr(store, name, call)


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [before, after], ids=["before", "after"])
@pytest.mark.parametrize("name", ["holds", "_prepare", "_put", "_complete"])
def test_a_server_killed_at_a_save_and_back_gets_the_version_later(engine, reference, server, monkeypatch, when, name):
    scheduler, worker = stores(engine)
    with monkeypatch.context() as patch:
        when(patch, worker if name == "_put" else scheduler, name, server.kill)
        first_version(engine)
    assert engine.half.tier.open_saves == 0
    engine.check()
    engine.forget_local()
    child = engine.ask(NEW, lossy("v2"))
    assert (child.recovery.tier, child.recovery.reason) == ("memory", None)
    unknown = engine.ask(NEW[:150], lossy("v3", "never"))
    assert "cannot be restored: the server at" in unknown.recovery.reason
    assert_exact(reference, unknown, engine.ask(NEW))
    revive(server)
    assert_healthy(engine, reference)  # with the next save that goes through, the server is offered what it missed
    assert isinstance(scheduler.find("default", "v2"), Manifest)
    late = engine.ask(NEW, lossy("v4"))
    assert (late.recovery.tier, late.recovery.reason) == ("store", None)
    assert_exact(reference, engine.ask(NEW))


def test_an_answer_that_is_lost_after_a_save_was_completed(engine, reference, monkeypatch):
    """The version is below, and nobody above knows it; its children are stored nevertheless."""
    scheduler, _ = stores(engine)
    complete = scheduler._complete

    def lost(ticket):
        assert isinstance(complete(ticket), Manifest)
        return Refused("the server failed", "unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_complete", lost)
        first_version(engine)
    engine.forget_local()
    child = engine.ask(NEW, lossy("v2"))
    assert child.recovery.reason is None
    first_version(engine, "other", text(60, seed=4))
    assert_idle(engine)
    assert isinstance(scheduler.find("default", "v1"), Manifest)
    assert isinstance(scheduler.find("default", "v2"), Manifest)
    scheduler.check_integrity()
    assert_healthy(engine, reference)


@pytest.mark.parametrize("policy", ["prefix_cache", "edit_local"])
@pytest.mark.parametrize("when", [before, after], ids=["before", "after"])
@pytest.mark.parametrize("name", ["_find", "_fetch"])
def test_a_server_killed_at_a_load_and_back_gives_the_version_then(
    engine, reference, server, monkeypatch, when, name, policy
):
    put_down(engine)
    scheduler, worker = stores(engine)
    with monkeypatch.context() as patch:
        when(patch, worker if name == "_fetch" else scheduler, name, server.kill)
        child = engine.ask(NEW, lossy("v2", policy=policy, save=False))
    if name == "_find" and when is before:
        assert "cannot be restored" in child.recovery.reason
    elif name == "_fetch" and when is after:
        assert child.recovery.reason is None
    else:
        assert child.recovery.lost_tokens == (100 if policy == "prefix_cache" else 257)
        assert child.recovery.restored_tokens == 0
    if child.recovery.exact:
        assert_exact(reference, child)
    assert_exact(reference, engine.ask(NEW))
    revive(server)
    forget_memory(engine)
    late = engine.ask(NEW, lossy("v4", policy=policy))
    assert (late.recovery.tier, late.recovery.reason) == ("store", None)
    assert_healthy(engine, reference)


def test_a_server_that_comes_back_empty_is_filled_anew(engine, reference, server, client):
    first_version(engine)
    scheduler, _ = stores(engine)
    assert isinstance(scheduler.find("default", "v1"), Manifest)
    client.flushall()
    server.kill()
    revive(server)
    engine.forget_local()
    child = engine.ask(NEW, lossy("v2"))
    assert child.recovery.tier == "memory"
    found = scheduler.find("default", "v2")
    assert isinstance(found, Manifest), "with the rows of its parent that the server had lost"
    scheduler.check_integrity()
    forget_memory(engine)
    assert isinstance(scheduler.find("default", "v1"), Miss)
    gone = engine.ask(NEW, lossy("v3"))
    assert "unknown or was evicted" in gone.recovery.reason
    assert_exact(reference, gone)
    engine.forget_local()
    late = engine.ask(edit(NEW, 20, 3, [77]), lossy("v4", "v2"))
    assert (late.recovery.tier, late.recovery.reason) == ("store", None)
    assert_healthy(engine, reference)


# -- hanging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", ["put", "find", "fetch"])
def test_requests_decode_on_while_a_server_hangs(engine, reference, server, monkeypatch, hangs):
    """A stopped server accepts connections and answers nothing: only the threads wait for it, and only for its timeout."""
    scheduler, worker = stores(engine)
    put_down(engine)
    stopped_at: list[int] = []
    steps = 0

    def stop():
        os.kill(server.pid, signal.SIGSTOP)
        stopped_at.append(steps)

    with monkeypatch.context() as patch:
        before(patch, scheduler if hangs == "find" else worker, f"_{hangs}", stop)
        try:
            other = engine.add(text(40, seed=50), n=500)
            child = engine.add(NEW, ResumeParams(version="w1") if hangs == "put" else lossy("v2", save=False))
            while not (child.done if hangs != "put" else engine.half.tier._demotions.owed):
                if other.done:
                    other = engine.add(text(40, seed=50), n=500)
                had = len(other.tokens)
                engine.step()
                steps += 1
                assert len(other.tokens) == had + 1, "no step without a token of the request beside it"
                assert steps < 20_000, "the server's timeout does not hold"
                (stats,) = engine.llm.collective_rpc("agentcache_stats")
                assert stats["tier"] is not None
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert steps - stopped_at[0] > 15, "steps have waited for the server"
    if hangs == "find":
        assert "cannot be restored: the server at" in child.recovery.reason
    elif hangs == "fetch":
        assert child.recovery.lost_tokens == 257
    engine.abort(other)
    engine.drain()
    assert_exact(reference, engine.ask(NEW))
    assert_healthy(engine, reference)


# -- damaged -----------------------------------------------------------------------------------------------------------


def flip(value: bytes, at: int) -> bytes:
    out = bytearray(value)
    out[at] ^= 4
    return bytes(out)


@pytest.mark.parametrize("field", ["b", "c", "entry", "no entry", "no payload", "short", "type"])
def test_a_payload_that_is_damaged_on_the_server_joins_the_recomputation(engine, reference, client, field):
    manifest = put_down(engine)
    key = manifest.extents[0].key
    (name, entry) = (f"{PREFIX}b:{key}:0", f"{PREFIX}o:{key}")
    match field:
        case "b":  # a scale or a code, wherever it is
            client.hset(name, "b", flip(client.hget(name, "b"), 16 + 28 + 5))
        case "c":  # only the manifest's and the object's checksums count
            client.hset(name, "c", "0" * 16)
        case "entry":
            client.hset(entry, "entry", flip(client.hget(entry, "entry"), -5))
        case "no entry":
            client.hdel(entry, "entry")
        case "no payload":
            client.delete(name)
        case "short":
            client.hset(name, "b", client.hget(name, "b")[:-1])
        case "type":
            client.delete(name)
            client.set(name, "what is this")
    child = engine.ask(NEW, lossy("v2"))
    if field == "c":
        assert child.recovery.reason is None
    elif field == "type":  # the server refuses the whole round trip
        assert child.recovery.lost_tokens == 257
    else:
        assert child.recovery.lost_tokens == 100 + (256 - 110) - 32
    engine.forget_local()
    exact = engine.ask(NEW, ResumeParams(version="v3", parent="v1"))
    assert_exact(reference, exact, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    client.delete(name)
    assert_healthy(engine, reference)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "type"])
def test_a_manifest_that_is_damaged_on_the_server_means_a_full_prefill(engine, reference, client, damage):
    manifest = put_down(engine)
    name = f"{PREFIX}v:{manifest.name}"
    raw = client.hget(name, "manifest")
    match damage:
        case "flip":
            client.hset(name, "manifest", flip(raw, len(raw) // 3))
        case "cut":
            client.hset(name, "manifest", raw[: len(raw) // 2])
        case "gone":
            client.hdel(name, "manifest")
        case "type":
            client.delete(name)
            client.set(name, "what is this")
    child = engine.ask(NEW, lossy("v2"))
    assert child.recovery.reason is not None
    assert child.recovery.exact
    assert_exact(reference, child)
    client.delete(name)
    client.flushall()
    assert_healthy(engine, reference)


def test_a_server_without_memory_refuses_saves_and_still_gives(engine, reference, client):
    put_down(engine)
    client.config_set("maxmemory", "1")
    try:
        child = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
        assert_exact(reference, child, engine.ask(NEW))
        assert isinstance(stores(engine)[0].find("default", "v2"), Miss | Refused)
    finally:
        client.config_set("maxmemory", "0")
    assert_healthy(engine, reference)
    assert isinstance(stores(engine)[0].find("default", "v2"), Manifest)


def test_a_save_that_the_servers_clock_ends_is_made_once_more(engine, reference, client, monkeypatch):
    """The server's clock jumped ahead: it believes that whoever opened the save is gone."""
    _, worker = stores(engine)

    def expire():
        (ticket,) = client.zrange(f"{PREFIX}tickets", 0, -1)
        client.zadd(f"{PREFIX}tickets", {ticket: 1})
        scheduler = stores(engine)[0]
        assert scheduler.gc().saves == 1

    with monkeypatch.context() as patch:
        before(patch, worker, "_put", expire)
        first_version(engine)
    assert_healthy(engine, reference)
    assert isinstance(stores(engine)[0].find("default", "v1"), Manifest)
