"""Stores by URL: our own, registered ones, and those that installed packages offer as entry points.

```
memory://?bytes=4GiB&policy=lru
disk:///var/lib/agentcache?bytes=100GiB&fsync=true&lock_timeout_s=5
redis://user:password@host:6379/0?bytes=16GiB&timeout_s=1&retry_s=2       rediss:// for TLS, with ssl_ca_certs=/path
tiered:memory?bytes=4GiB&mode=behind+disk:///var/lib/agentcache           memory over any durable store
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from agentcache.errors import ConfigError
from agentcache.store.tiers.base import KVStore, Observer
from agentcache.store.tiers.memory import MemoryStore

__all__ = [
    "ENTRY_POINT_GROUP",
    "Opener",
    "StoreSpec",
    "open_store",
    "parse_size",
    "parse_store_url",
    "register_store",
    "store_names",
]

ENTRY_POINT_GROUP = "agentcache.stores"
"""Each entry point is named as its URL scheme and points at an `Opener`."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?\s*([A-Za-z]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store's URL in parts.

    Attributes:
        scheme: Which back end.
        address: The URL without its options.
        path: Its path, decoded.
        options: As they were written.
        lower: The durable tier below, when the scheme is `tiered`; the rest is the memory tier's.
    """

    scheme: str
    address: str
    path: str
    options: Mapping[str, str]
    lower: StoreSpec | None = None

    def take(self, types: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
        """Returns the options as values.

        Raises:
            ConfigError: An option is unknown, or its value is not allowed.
        """
        out = {}
        for name, text in self.options.items():
            if name not in types:
                raise ConfigError(f"a {self.scheme} store has no option {name!r}; its options are: {', '.join(types)}")
            try:
                out[name] = types[name](text)
            except ValueError as error:
                raise ConfigError(f"{self.scheme} store: {name}={text!r} is not allowed: {error}") from error
        return out


Opener = Callable[[StoreSpec, Mapping[str, str] | None, Observer | None], KVStore]
_OPENERS: dict[str, Opener] = {}


def register_store(scheme: str) -> Callable[[Opener], Opener]:
    """Returns a decorator that adds an opener for URLs of a scheme.

    Raises:
        ConfigError: The scheme is taken.
    """

    def add(opener: Opener) -> Opener:
        if _OPENERS.setdefault(scheme, opener) is not opener:
            raise ConfigError(f"store scheme {scheme!r} is taken; choose another")
        return opener

    return add


def store_names() -> tuple[str, ...]:
    """Returns the schemes that `open_store` knows, sorted. Imports no installed package."""
    return tuple(sorted({*_OPENERS, *_plugins(), "tiered"}))


def open_store(url: str, *, fingerprint: Mapping[str, str] | None = None, observer: Observer | None = None) -> KVStore:
    """Returns the store of a URL.

    Args:
        url: See the head of this module.
        fingerprint: What this engine's payloads are made for; versions of others are refused. None is for tools.
        observer: Is told how long saves and restores took.

    Raises:
        ConfigError: The URL, its scheme or an option is not allowed.
        StoreError: The store cannot be opened.
    """
    return _open(parse_store_url(url), fingerprint, observer)


def parse_store_url(url: str) -> StoreSpec:
    """Returns the parts of a store's URL, so that an engine can see what a `tiered` one asks of its own memory.

    Raises:
        ConfigError: It is no store URL.
    """
    scheme, colon, rest = url.partition(":")
    if scheme == "tiered" and colon:
        above, plus, below = rest.partition("+")
        upper = parse_store_url(above if ":" in above else _with_colon(above))
        if not plus or upper.scheme != "memory":
            raise ConfigError(f"{_safe(url)!r}: write tiered:memory+disk:///path, memory over a durable store")
        lower = parse_store_url(below)
        if lower.scheme in ("memory", "tiered"):
            raise ConfigError(f"{_safe(url)!r}: below memory stands a durable store, not {lower.scheme!r}")
        return StoreSpec("tiered", upper.address, upper.path, upper.options, lower)
    if not colon:
        raise ConfigError(f"{_safe(url)!r} is no store URL; known: {', '.join(f'{n}:' for n in store_names())}")
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"{_safe(url)!r} is no URL: {error}") from error
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(f"{_safe(url)!r} gives an option twice")
    if parts.fragment:
        raise ConfigError(f"{_safe(url)!r} has a '#'; write it as %23")
    return StoreSpec(scheme, url.partition("?")[0], unquote(parts.path), options)


def parse_size(text: str) -> int:
    """Returns bytes: `4GiB`, `1.5TB`, `0`.

    Raises:
        ValueError: It is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[3] not in _UNITS:
        raise ValueError(f"write a number and one of {', '.join(u for u in _UNITS if u)}, e.g. 4GiB")
    return int(float(f"{found[1]}.{found[2]}") * _UNITS[found[3]]) if found[2] else int(found[1]) * _UNITS[found[3]]


def _open(spec: StoreSpec, fingerprint: Mapping[str, str] | None, observer: Observer | None) -> KVStore:
    if spec.lower is None:
        return _opener(spec.scheme)(spec, fingerprint, observer)
    from agentcache.store.tiers.tiered import TieredStore

    given = spec.take({**_MEMORY_OPTIONS, "mode": _one_of("behind", "through")})
    mode = given.pop("mode", "behind")
    upper = MemoryStore(given.pop("bytes", _DEFAULT_BYTES), **given, fingerprint=fingerprint)
    # The tiers are not observed themselves: copies between them are nobody's saves.
    return TieredStore(upper, _open(spec.lower, fingerprint, None), mode=mode, observer=observer)


def _opener(scheme: str) -> Opener:
    if scheme not in _OPENERS:
        point = _plugins().get(scheme)
        if point is None:
            raise ConfigError(
                f"unknown store scheme {scheme!r}; known: {', '.join(store_names())}. "
                f"Add your own with @register_store or the entry point group {ENTRY_POINT_GROUP!r}"
            )
        register_store(scheme)(point.load())
    return _OPENERS[scheme]


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _with_colon(text: str) -> str:
    name, question, options = text.partition("?")
    return f"{name}:{question}{options}"


def _safe(url: str) -> str:
    """Returns a URL without its password."""
    return re.sub(r"//[^/@]*@", "//…@", url)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"allowed are: {', '.join(allowed)}")
        return text

    return check


def _flag(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


# -- our own -----------------------------------------------------------------------------------------------------------

_DEFAULT_BYTES = 4 << 30
_DEFAULT_DISK_BYTES = 64 << 30
_MEMORY_OPTIONS: dict[str, Callable[[str], Any]] = {"bytes": parse_size, "policy": str}
_SSL_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")


@register_store("memory")
def _memory(spec: StoreSpec, fingerprint: Mapping[str, str] | None, observer: Observer | None) -> KVStore:
    if spec.address.partition(":")[2].strip("/"):
        raise ConfigError(f"{spec.address!r}: memory has no address; write memory://?bytes=4GiB")
    given = spec.take(_MEMORY_OPTIONS)
    return MemoryStore(given.pop("bytes", _DEFAULT_BYTES), **given, fingerprint=fingerprint, observer=observer)


@register_store("disk")
def _disk(spec: StoreSpec, fingerprint: Mapping[str, str] | None, observer: Observer | None) -> KVStore:
    from agentcache.store.tiers.disk import DiskStore

    if not spec.path or urlsplit(spec.address).netloc:
        raise ConfigError(f"{spec.address!r} names no folder; write disk:///absolute/path or disk:relative/path")
    given = spec.take({"bytes": parse_size, "policy": str, "fsync": _flag, "lock_timeout_s": float})
    budget = given.pop("bytes", _DEFAULT_DISK_BYTES)
    return DiskStore(spec.path, budget, **given, fingerprint=fingerprint, observer=observer)


def _redis(spec: StoreSpec, fingerprint: Mapping[str, str] | None, observer: Observer | None) -> KVStore:
    from agentcache.store.tiers.redis import RedisStore

    own: dict[str, Callable[[str], Any]] = {
        "bytes": parse_size,
        "policy": str,
        "timeout_s": float,
        "retry_s": float,
        "save_s": int,
        "prefix": str,
    }
    given = spec.take({**own, **dict.fromkeys(_SSL_OPTIONS, str)})
    ssl = {name: given.pop(name) for name in _SSL_OPTIONS if name in given}
    url = f"{spec.address}?{urlencode(ssl)}" if ssl else spec.address
    return RedisStore(url, given.pop("bytes", _DEFAULT_BYTES), **given, fingerprint=fingerprint, observer=observer)


for _scheme in ("redis", "rediss", "unix"):
    register_store(_scheme)(_redis)
