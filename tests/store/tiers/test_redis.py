"""The Redis tier beyond the conformance suite: a server that dies, asks for a password, or holds nonsense."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from agentcache.errors import ConfigError
from agentcache.store.tiers import Lost, Manifest, Miss, Refused, open_store
from agentcache.store.tiers.conformance_kit import Material, found, refused
from agentcache.store.tiers.redis import RedisStore
from agentcache.store.tiers.redis_server import Breaker
from tests.store.tiers.redis_process import RedisProcess, free_port

ROOM = 1 << 30


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    """A server of this test alone, which writes every change to its disk."""
    process = RedisProcess("--save", "", "--appendonly", "yes", "--appendfsync", "always")
    yield process
    process.close()


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator[redis.Redis]:
    redis_server.flush()
    with redis.Redis(port=redis_server.port) as made:
        yield made


def open_redis(process: RedisProcess, **options: object) -> RedisStore:
    return RedisStore(process.url, ROOM, **({"retry_s": 0} | options))  # type: ignore[arg-type]


def test_a_server_killed_before_during_and_after_a_save_and_a_load_comes_back(server: RedisProcess) -> None:
    material = Material()
    with open_redis(server) as store:
        first = material.must_save(store, material.draft("v1"))

        server.kill()  # before a save and a load
        refused(store.prepare(material.draft("v2"), 1000), "unavailable")
        refused(store.find("red", "v1"), "unavailable")
        lost = store.fetch([e.key for e in first.objects], 0)
        assert all(isinstance(blob, Lost) and blob.kind == "unavailable" for blob in lost.values())
        refused(store.versions(), "unavailable")
        refused(store.delete("red", "v1"), "unavailable")
        refused(store.verify(), "unavailable")
        refused(store.gc(), "unavailable")
        assert store.hint("red", "v1") is False
        assert store.has("red", "v1") is False
        assert store.holds([first.objects[0].key]) == frozenset()
        assert store.stats()[0]["used_bytes"] == 0
        server.start()
        material.check(store, found(store, "red", "v1"))

        second = material.draft("v2", shared=first.objects)  # during a save
        ticket = store.prepare(second, material.reserve(second))
        assert isinstance(ticket, str)
        server.kill()
        made = material.put(store, ticket, second)
        refused(made, "unavailable")
        refused(store.complete(ticket), "unavailable")
        server.start()
        assert isinstance(store.find("red", "v2"), Miss)
        assert material.put(store, ticket, second) is None, "the save is still open"
        assert isinstance(store.complete(ticket), Manifest)

        manifest = found(store, "red", "v2")  # during a load
        server.kill()
        assert all(isinstance(b, Lost) for b in store.fetch([e.key for e in manifest.objects], 0).values())
        server.start()
        material.check(store, manifest)

        server.kill()  # after a save
        server.start()
        material.check(store, found(store, "red", "v2"))
        store.check_integrity()


def test_a_server_that_lost_everything_is_an_empty_store(redis_server: RedisProcess, client: redis.Redis) -> None:
    material = Material()
    with open_redis(redis_server) as store:
        first = material.must_save(store, material.draft("v1"))
        client.flushall()
        client.script_flush()
        assert isinstance(store.find("red", "v1"), Miss)
        refused(store.prepare(material.draft("v2", shared=first.objects), 1000), "gone")
        material.must_save(store, material.draft("v1"))
        store.check_integrity()


def test_a_frozen_server_costs_one_timeout_and_then_nothing(server: RedisProcess) -> None:
    material = Material()
    with open_redis(server, timeout_s=1.0, retry_s=3600) as store:
        material.must_save(store, material.draft("v1"))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            refused(store.find("red", "v1"), "unavailable")
            for _ in range(100):  # with a timeout each this would be a hundred seconds
                made = store.find("red", "v1")
                assert "asked again in" in str(made)
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_breaker_lets_one_caller_try_when_its_pause_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    breaker = Breaker(2.0)
    assert breaker.wait_s() == 0
    breaker.failed()
    assert breaker.wait_s() == 2.0
    now[0] = 102.5
    assert breaker.wait_s() == 0
    assert breaker.wait_s() == 2.0
    breaker.answered()
    assert breaker.wait_s() == 0


def test_no_server_is_no_error_until_it_is_asked() -> None:
    with RedisStore(f"redis://127.0.0.1:{free_port()}/0", ROOM) as store:
        refused(store.find("red", "v1"), "unavailable")


def test_tls_and_a_password_come_with_the_url(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.fail("openssl is not installed: apt-get install -y openssl (Debian, Ubuntu)")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *request.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    options = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate))
    process = RedisProcess(*options, "--tls-auth-clients", "no", scheme="rediss", password="se+cret%2F1")
    try:
        material = Material()
        with open_store(f"{process.url}?bytes=1GiB&ssl_ca_certs={certificate}") as store:
            material.check(store, material.must_save(store, material.draft("v1", new=(5_000_000,))))
        with open_store(f"{process.url}?bytes=1GiB") as store:
            made = store.find("red", "v1")
            refused(made, "unavailable")
            assert "certificate" in str(made).lower()
        with open_store(f"{process.url.replace('se%2Bcret', 'wrong')}?ssl_ca_certs={certificate}") as store:
            made = store.find("red", "v1")
            refused(made, "unavailable")
            assert "password" in str(made).lower()
            assert "wrong" not in str(made)
    finally:
        process.close()


def test_payloads_of_open_saves_expire_and_those_of_versions_do_not(
    redis_server: RedisProcess, client: redis.Redis
) -> None:
    material = Material()
    with open_redis(redis_server, save_s=100) as store:
        draft = material.draft("v1")
        ticket = store.prepare(draft, material.reserve(draft))
        assert isinstance(ticket, str)
        material.put(store, ticket, draft)
        names = client.keys("*b:*")
        assert len(names) == 2
        assert all(0 < client.ttl(name) <= 100 for name in names)
        assert isinstance(store.complete(ticket), Manifest)
        assert all(client.ttl(name) == -1 for name in names)


def test_a_save_whose_process_died_is_ended_after_its_time(redis_server: RedisProcess, client: redis.Redis) -> None:
    material = Material()
    with open_redis(redis_server) as store, open_redis(redis_server) as dead:
        parent = material.must_save(store, material.draft("v1"))
        before = store.stats()[0]["used_bytes"]
        draft = material.draft("v2", shared=parent.objects[:1])
        ticket = dead.prepare(draft, material.reserve(draft))
        assert isinstance(ticket, str)
        material.put(dead, ticket, draft)
        assert store.stats()[0]["used_bytes"] > before
        client.zadd("{agentcache:1}:tickets", {ticket: 1})  # long ago
        report = store.gc()
        assert not isinstance(report, Refused)
        assert report.saves == 1
        assert store.stats()[0]["used_bytes"] == before
        refused(dead.complete(ticket), "invalid")
        store.check_integrity()


def test_a_dead_processes_reservation_makes_room_for_the_next_save(
    redis_server: RedisProcess, client: redis.Redis
) -> None:
    material = Material()
    draft = material.draft("v1", new=(10_000,))
    budget = draft.cost_bytes + 15_000
    with RedisStore(redis_server.url, budget) as store, RedisStore(redis_server.url, budget) as dead:
        ticket = dead.prepare(material.draft("v0"), 10_000)
        assert isinstance(ticket, str)
        refused(store.prepare(draft, 10_000), "full")
        client.zadd("{agentcache:1}:tickets", {ticket: 1})
        material.must_save(store, draft)


def test_another_versions_manifest_in_its_place_is_refused(redis_server: RedisProcess, client: redis.Redis) -> None:
    material = Material()
    with open_redis(redis_server) as store:
        one, two = (material.must_save(store, material.draft(name)) for name in ("v1", "v2"))
        raw = client.hget(f"{{agentcache:1}}:v:{one.name}", "manifest")
        assert raw is not None
        client.hset(f"{{agentcache:1}}:v:{two.name}", "manifest", raw)
        refused(store.find("red", "v2"), "corrupt")
        report = store.verify()
        assert not isinstance(report, Refused)
        assert two.name in report.faults[0]


def test_damaged_and_stray_values_are_refused_and_cleared(redis_server: RedisProcess, client: redis.Redis) -> None:
    material = Material()
    with open_redis(redis_server) as store:
        kept = material.must_save(store, material.draft("kept"))
        bad = material.must_save(store, material.draft("bad"))
        [name] = client.keys(f"*v:{bad.name}")
        raw = bytearray(client.hget(name, "manifest") or b"")
        raw[50] ^= 1
        client.hset(name, "manifest", bytes(raw))
        client.set("{agentcache:1}:b:" + "0" * 32 + ":0", "stray", ex=1000)
        client.hset("{agentcache:1}:b:" + "1" * 32 + ":0", mapping={"b": "stray", "c": "0"})
        refused(store.find("red", "bad"), "corrupt")
        report = store.verify()
        assert not isinstance(report, Refused)
        assert [bad.name in fault for fault in report.faults] == [True]
        cleared = store.gc()
        assert not isinstance(cleared, Refused)
        assert (cleared.saves, cleared.manifests, cleared.payloads) == (0, 1, 1)
        assert isinstance(store.find("red", "bad"), Miss)
        material.check(store, kept)
        store.check_integrity()


def test_nonsense_under_our_names_is_an_answer(redis_server: RedisProcess, client: redis.Redis) -> None:
    material = Material()
    for kind in ("sums", "tags", "score", "order", "tickets", "clock", "seq"):
        client.flushall()
        with open_redis(redis_server) as store:
            first = material.must_save(store, material.draft("v1"))
            client.delete(f"{{agentcache:1}}:{kind}")
            client.set(f"{{agentcache:1}}:{kind}", "nonsense")
            made = material.save(store, material.draft("v2"))
            assert isinstance(made, Manifest | Refused)
            assert isinstance(store.find("red", "v1"), Manifest | Refused)
            material.check(store, first)
            store.stats()
            store.versions()
            store.gc()
            store.hint("red", "v1")
            store.delete("red", "v1")


def test_what_the_server_evicts_by_itself_is_a_miss_or_lost(redis_server: RedisProcess, client: redis.Redis) -> None:
    material = Material()
    with open_redis(redis_server) as store:
        made = {n: material.must_save(store, material.draft(n)) for n in ("v1", "v2", "v3")}
        for name in (
            f"v:{made['v1'].name}",
            f"b:{made['v2'].objects[0].key}:0",
            f"o:{made['v3'].objects[0].key}",
        ):
            assert client.delete("{agentcache:1}:" + name) == 1
        assert isinstance(store.find("red", "v1"), Miss)
        for version in ("v2", "v3"):
            manifest = found(store, "red", version)
            material.check(store, manifest, lost=[manifest.objects[0].key])
        report = store.verify()
        assert not isinstance(report, Refused)
        assert len(report.faults) == 2
        for version in ("v2", "v3"):
            assert store.delete("red", version) is True
        material.must_save(store, material.draft("v1"))


def test_prefixes_are_stores_of_their_own(redis_server: RedisProcess, client: redis.Redis) -> None:
    material = Material()
    with open_redis(redis_server, prefix="a[*]:") as one, open_redis(redis_server, prefix="b") as two:
        material.must_save(one, material.draft("v1"))
        assert isinstance(two.find("red", "v1"), Miss)
        client.hset("a[*]:b:" + "1" * 32 + ":0", mapping={"b": "stray"})
        cleared = two.gc()
        assert not isinstance(cleared, Refused)
        assert cleared.payloads == 0
        cleared = one.gc()
        assert not isinstance(cleared, Refused)
        assert cleared.payloads == 1
        one.check_integrity()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("http://x", {}),
        ("redis://127.0.0.1:99999/0", {}),
        ("redis://127.0.0.1/main", {}),
        ("redis://127.0.0.1/0", {"timeout_s": 0}),
        ("redis://127.0.0.1/0", {"retry_s": -1}),
        ("redis://127.0.0.1/0", {"save_s": 0}),
        ("redis://127.0.0.1/0", {"policy": "mru"}),
    ],
)
def test_settings_that_make_no_sense_are_errors(url: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RedisStore(url, ROOM, **options)  # type: ignore[arg-type]
