"""Stores by URL."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from agentcache.errors import ConfigError
from agentcache.store.tiers import KVStore, open_store, parse_store_url, registry, store_names
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.memory import MemoryStore
from agentcache.store.tiers.redis import RedisStore
from agentcache.store.tiers.registry import StoreSpec, parse_size, register_store
from agentcache.store.tiers.tiered import TieredStore


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("7B", 7),
        ("4KiB", 4096),
        ("4 GiB", 4 << 30),
        ("1.5TB", 1_500_000_000_000),
        ("0.5MiB", 1 << 19),
        ("2KB", 2000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 gigs", "1.2.3", "٣", "1 GiBs", "9" * 16])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write a number"):
        parse_size(text)


@pytest.mark.parametrize("url", ["memory:", "memory://", "memory://?bytes=1MiB&policy=fifo", "memory:?bytes=1MiB"])
def test_memory(url: str) -> None:
    with open_store(url) as store:
        assert isinstance(store, MemoryStore)
        assert store.budget_bytes == (1 << 20 if "1MiB" in url else 4 << 30)


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"disk://{tmp_path}/a%20b%3Fc?bytes=2GB&fsync=false&lock_timeout_s=0.5&policy=lru"
    with open_store(url, fingerprint={"model": "m"}) as store:
        assert isinstance(store, DiskStore)
        assert store.budget_bytes == 2_000_000_000
        assert store.fingerprint == {"model": "m"}
    assert (tmp_path / "a b?c" / "agentcache-store.json").is_file()
    monkeypatch.chdir(tmp_path)
    open_store("disk:relative/path").close()
    assert (tmp_path / "relative" / "path" / "versions").is_dir()


def test_redis() -> None:
    with open_store("redis://user:secret@host:7000/3?bytes=1GiB&timeout_s=0.25&retry_s=9&save_s=7&prefix=x") as store:
        assert isinstance(store, RedisStore)
        assert store.budget_bytes == 1 << 30
        assert (store._server.where, store._server.prefix, store.save_s) == ("host:7000", "x", 7)
        settings = store._server.client.connection_pool.connection_kwargs
        assert (settings["username"], settings["password"], settings["db"]) == ("user", "secret", 3)
        assert settings["socket_timeout"] == 0.25


def test_tiered(tmp_path: Path) -> None:
    with open_store(f"tiered:memory?bytes=1MiB&mode=through+disk://{tmp_path}/s?bytes=1GiB&fsync=false") as store:
        assert isinstance(store, TieredStore)
        assert store.mode == "through"
        assert store.upper.budget_bytes == 1 << 20
        assert isinstance(store.lower, DiskStore)
        assert store.lower.budget_bytes == 1 << 30
    with open_store("tiered:memory+redis://:a+b@host:1/0") as store:
        assert isinstance(store, TieredStore)
        assert store.mode == "behind"
        assert isinstance(store.lower, RedisStore)
        assert store.lower._server.client.connection_pool.connection_kwargs["password"] == "a+b"


def test_the_parts_of_a_tiered_url_can_be_seen() -> None:
    spec = parse_store_url("tiered:memory://?bytes=3GiB+disk:///var/x?bytes=9GiB")
    assert (spec.scheme, dict(spec.options)) == ("tiered", {"bytes": "3GiB"})
    assert spec.lower is not None
    assert (spec.lower.scheme, spec.lower.path, dict(spec.lower.options)) == ("disk", "/var/x", {"bytes": "9GiB"})


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("", "no store URL; known: disk:, memory:, redis:, rediss:, tiered:, unix:"),
        ("/var/lib/x", "no store URL"),
        ("s3://bucket", "unknown store scheme 's3'; known: disk, memory"),
        ("memory://host", "memory has no address"),
        ("memory://?bytes=lots", "bytes='lots' is not allowed: write a number and one of B, KB"),
        ("memory://?size=1", "no option 'size'; its options are: bytes, policy"),
        ("memory://?policy=mru", "unknown eviction policy 'mru'; known: lru, fifo"),
        ("memory://?bytes=1&bytes=2", "an option twice"),
        ("memory://?bytes", "is no URL"),
        ("disk://var/x", "disk:///absolute/path"),
        ("disk://", "names no folder"),
        ("disk:///x#y", "write it as %23"),
        ("disk:///x?fsync=maybe", "allowed are: true, false"),
        ("redis://h/x", "no Redis URL"),
        ("redis://h:x/0", "no Redis URL"),
        ("redis://h/0?timeout_s=soon", "timeout_s='soon' is not allowed"),
        ("tiered:memory", "memory over a durable store"),
        ("tiered:disk:///x+disk:///y", "memory over a durable store"),
        ("tiered:memory+memory:", "stands a durable store, not 'memory'"),
        ("tiered:memory?mode=up+disk:///x", "mode='up' is not allowed: allowed are: behind, through"),
        ("tiered:memory+nowhere", "no store URL"),
        ("disk://[::1/x", "is no URL"),
    ],
)
def test_what_is_not_allowed_is_an_error_that_says_what_is(url: str, match: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_store(url)
    assert match in str(error.value)


@pytest.mark.parametrize("url", ["redis://me:secret@h:x/0?a", "tiered:nothing+redis://me:secret@h/0", "me:secret@h"])
def test_an_error_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_store(url)
    assert "//me:secret@" not in str(error.value)


def test_a_registered_scheme_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPENERS", dict(registry._OPENERS))

    @register_store("null")
    def open_null(spec: StoreSpec, fingerprint: object, observer: object) -> KVStore:
        assert spec.take({"level": int}) == {"level": 3}
        return MemoryStore(0)

    assert "null" in store_names()
    assert isinstance(open_store("null://?level=3"), MemoryStore)
    with pytest.raises(ConfigError, match="taken"):
        register_store("memory")(open_null)


def test_an_installed_package_offers_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPENERS", dict(registry._OPENERS))
    point = importlib.metadata.EntryPoint("spare", f"{__name__}:open_spare", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_plugins", lambda: {"spare": point})
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert "spare" in store_names()
    assert isinstance(open_store("spare:"), MemoryStore)


def open_spare(spec: StoreSpec, fingerprint: object, observer: object) -> KVStore:
    return MemoryStore(1)


def test_opening_memory_or_disk_imports_no_client_and_no_torch() -> None:
    code = "import sys, agentcache.store.tiers as t; t.open_store('memory:'); print({'redis', 'torch', 'vllm'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
