"""The server behind the Redis tier: one client, quick refusals while it is down, and batches of reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from agentcache.errors import ConfigError
from agentcache.store.tiers.outcomes import Refused

__all__ = ["Breaker", "Server"]

T = TypeVar("T")
_MANY = 512  # small values a round trip


class Breaker:
    """Says whether a server may be asked: not for `pause_s` after it failed, and then by one caller first."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._until = 0.0
        self._open = False

    def wait_s(self) -> float:
        """Returns 0 when the caller may ask, else for how long nobody may."""
        with self._lock:
            if not self._open:
                return 0.0
            now = time.monotonic()
            if now >= self._until:
                self._until = now + self._pause_s  # the others wait for this one's answer
                return 0.0
            return self._until - now

    def answered(self) -> None:
        """Lets everybody ask."""
        with self._lock:
            self._open = False

    def failed(self) -> None:
        """Starts a pause."""
        with self._lock:
            self._open, self._until = True, time.monotonic() + self._pause_s


class Server:
    """A Redis server, and the keys of one store on it.

    Attributes:
        where: Host and port, for reasons; never the password.
        client: redis-py's. Its own types are unions of everything, hence Any.

    Raises:
        ConfigError: The URL is none.
    """

    def __init__(self, url: str, prefix: str, timeout_s: float, retry_s: float) -> None:
        self.prefix = prefix
        self._breaker = Breaker(retry_s)
        try:
            parts = urlsplit(url)
            self.where = (
                f"{parts.hostname or 'localhost'}:{parts.port or 6379}" if parts.scheme != "unix" else parts.path
            )
            if parts.scheme != "unix" and parts.path.strip("/"):
                int(parts.path.strip("/"))
            self.client: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"this is no Redis URL: {error}; write redis://user:password@host:port/db") from error
        self._scripts: dict[str, Any] = {}

    def run(self, script: str, *args: Any) -> Any:
        """Returns a script's answer, or a refusal."""
        if script not in self._scripts:
            self._scripts[script] = self.client.register_script(script)
        return self.ask(lambda: self._scripts[script](keys=[self.prefix], args=args))

    def ask(self, action: Callable[[], T]) -> T | Refused:
        """Returns what an action that asks the server gives, or a refusal when it fails or failed a moment ago."""
        wait = self._breaker.wait_s()
        if wait:
            return Refused(f"the server at {self.where} failed; it is asked again in {wait:.1f} s", "unavailable")
        try:
            made = action()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            self._breaker.failed()
            return Refused(f"the server at {self.where} failed: {error}", "unavailable")
        except redis.RedisError as error:
            self._breaker.answered()
            return Refused(f"the server at {self.where} refused: {error}", "unavailable")
        except ValueError as error:  # something else has been at our keys
            self._breaker.answered()
            return Refused(f"the server at {self.where} gives nonsense: {error}", "unavailable")
        self._breaker.answered()
        return made

    def name(self, kind: str, what: str) -> str:
        """Returns the key of a version, an object or an open save."""
        return f"{self.prefix}{kind}:{what}"

    def get_many(self, kind: str, names: Sequence[str], field: str) -> list[Any]:
        """Returns one field of many hashes; to be called inside `ask`."""
        out: list[Any] = []
        for at in range(0, len(names), _MANY):
            with self.client.pipeline(transaction=False) as pipe:
                for name in names[at : at + _MANY]:
                    pipe.hget(self.name(kind, name), field)
                out += pipe.execute()
        return out

    def each_version(self, field: str) -> list[tuple[str, bytes | None]]:
        """Returns a field of every version, by creation; to be called inside `ask`."""
        names = [name.decode("ascii", "replace") for name in self.client.zrange(f"{self.prefix}order", 0, -1)]
        return [*zip(names, self.get_many("v", names, field), strict=True)]
