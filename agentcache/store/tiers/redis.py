"""The Redis tier: versions that several engines on several machines share, on a Redis or Valkey server (6.2 or newer).

A server that does not answer costs one short timeout; after that every call is refused at once until a pause is over.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.store.tiers import redis_scripts as scripts
from agentcache.store.tiers.base import Observer
from agentcache.store.tiers.ledger import check_policy_name
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, Part, version_name
from agentcache.store.tiers.outcomes import Blob, GcReport, Lost, Miss, Refused, VerifyReport, VersionInfo
from agentcache.store.tiers.redis_server import Server
from agentcache.store.tiers.redis_upkeep import check_server, collect_server, verify_server
from agentcache.store.tiers.tier import Claimed, Sizes, Tier

__all__ = ["RedisStore"]

_CHUNK = 8  # payloads a round trip
_ZSETS = {"lru": "score", "fifo": "order"}


class RedisStore(Tier):
    """Manifests and payloads on a server. Any number of processes and machines may open the same one.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, with user and password; `ssl_*` settings of redis-py as query.
        budget_bytes: Most bytes of payloads, manifests and reservations under the prefix, of all clients.
        policy: Name of the eviction policy, see `ledger.POLICIES`.
        timeout_s: How long the server may take to accept a connection, and to answer.
        retry_s: For how long a server that failed is not asked again.
        save_s: For how long an open save is kept whose process is gone.
        prefix: Of every key on the server.
        fingerprint: See `Tier`.
        observer: See `Tier`.

    Raises:
        ConfigError: The URL, the policy or a number is not allowed. A server that does not answer is no error.
    """

    tier: ClassVar[str] = "redis"
    durable: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        budget_bytes: int,
        *,
        policy: str = "lru",
        timeout_s: float = 1.0,
        retry_s: float = 2.0,
        save_s: int = 600,
        prefix: str = "{agentcache:1}:",
        fingerprint: Mapping[str, str] | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(budget_bytes, fingerprint=fingerprint, observer=observer)
        check_policy_name(policy)
        if not (timeout_s > 0 and retry_s >= 0 and save_s >= 1):
            raise ConfigError(f"timeout_s={timeout_s}, retry_s={retry_s}, save_s={save_s}: these must be positive")
        self.policy = policy
        self.save_s = save_s
        self._server = Server(url, prefix, timeout_s, retry_s)
        self._own: set[str] = set()
        self._doomed: set[str] = set()  # saves that are over, as the server has yet to hear

    # -- saving --------------------------------------------------------------------------------------------------------

    def _prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        self._end_doomed()
        ticket = f"redis-{secrets.token_hex(16)}"
        kept = [entry for entry in manifest.objects if entry.parts]
        made = self._server.run(
            scripts.PREPARE,
            manifest.name,
            ticket,
            manifest.encode(),
            manifest.cost_bytes + reserve_bytes,
            self.budget_bytes,
            self.save_s,
            _ZSETS[self.policy],
            _owner(manifest.namespace),
            manifest.ranks,
            reserve_bytes,
            " ".join(entry.key for entry in manifest.new_objects),
            " ".join(entry.key for entry in kept),
            " ".join(map(_entry_text, kept)),
        )
        if isinstance(made, Refused):
            self._doomed.add(ticket)  # it may be open: an answer can be lost after it was given
            return made
        fault = self._answer(made, manifest)
        if fault is None:
            self._own.add(ticket)
        return fault or ticket

    def _put(self, ticket: str, key: str, rank: int, blob: Blob, checksum: str) -> Refused | None:
        said = self._server.run(scripts.ADMIT, ticket, key, rank, len(blob), checksum)
        if isinstance(said, Refused):
            return said
        fault = {
            b"closed": Refused("there is no such open save", "invalid"),
            b"stray": Refused(f"object {key} of rank {rank} is none that this save stores", "invalid"),
            b"other": Refused(f"object {key} was stored with other bytes", "invalid"),
            b"full": Refused(f"{len(blob)} bytes are more than the save has reserved", "full"),
        }.get(said)
        if fault is not None:
            return fault

        def send() -> None:
            name = f"{self._server.prefix}b:{key}:{rank}"
            with self._server.client.pipeline(transaction=True) as pipe:
                pipe.hset(name, mapping={"c": checksum, "b": blob.data})
                pipe.expire(name, self.save_s)
                pipe.execute()

        sent = self._server.ask(send)
        return sent if isinstance(sent, Refused) else None

    def _complete(self, ticket: str) -> Manifest | Refused:
        raw = self._server.ask(lambda: self._server.client.hget(f"{self._server.prefix}t:{ticket}", "draft"))
        if isinstance(raw, Refused):
            return raw
        draft = Manifest.decode(raw) if isinstance(raw, bytes) else Refused("there is no such open save", "invalid")
        if isinstance(draft, Refused):
            return draft
        stored = self._stored_parts(draft)
        if isinstance(stored, Refused):
            return stored
        sequence = self._server.ask(lambda: self._server.client.incr(f"{self._server.prefix}seq"))
        if isinstance(sequence, Refused):
            return sequence
        sealed = draft.with_objects(
            (e if e.parts else e._replace(parts=stored[e.key]) for e in draft.objects), sequence
        )
        fresh: list[Any] = []
        for entry in sealed.objects:
            if entry.key in stored:
                checksums = " ".join(part.checksum for part in entry.parts)
                fresh += [entry.key, entry.size_bytes, entry.tag, sealed.ranks, _entry_text(entry), checksums]
        made = self._server.run(
            scripts.COMPLETE,
            ticket,
            sealed.name,
            sealed.encode(),
            json.dumps(_info_fields(sealed.info())),
            sealed.cost_bytes,
            sequence,
            _owner(sealed.namespace),
            " ".join(entry.key for entry in sealed.objects),
            *fresh,
        )
        if isinstance(made, Refused):
            return made
        fault = self._answer(made, sealed)
        if fault is None:
            self._own.discard(ticket)
        return fault or sealed

    def _stored_parts(self, draft: Manifest) -> dict[str, tuple[Part, ...]] | Refused:
        """Returns what the ranks have put of each new object."""
        keys = [entry.key for entry in draft.new_objects]
        names = [f"{self._server.prefix}b:{key}:{rank}" for key in keys for rank in range(draft.ranks)]

        def read() -> list[Any]:
            with self._server.client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(name, "c")
                    pipe.hstrlen(name, "b")
                return list(pipe.execute())

        found = self._server.ask(read)
        if isinstance(found, Refused):
            return found
        parts = []
        for checksum, size in zip(found[::2], found[1::2], strict=True):
            if checksum is None or not size:
                return Refused("the ranks have not stored all payloads yet", "invalid")
            parts.append(Part(size, checksum.decode("ascii", "replace")))
        return {key: tuple(parts[i * draft.ranks : (i + 1) * draft.ranks]) for i, key in enumerate(keys)}

    def _abort(self, ticket: str) -> None:
        self._own.discard(ticket)
        self._doomed.add(ticket)
        self._end_doomed()

    def _end_doomed(self) -> None:
        """Ends saves that are over; what a server does not hear now it hears before the next save, or ends after `save_s`."""
        for ticket in [*self._doomed]:
            if isinstance(self._server.run(scripts.ABORT, ticket), Refused):
                return
            self._doomed.discard(ticket)

    def _answer(self, made: Any, manifest: Manifest) -> Refused | None:
        """Returns what a script's answer means."""
        status, detail = made[0].decode(), made[1].decode()
        if status == "ok":
            return None
        if status == "full":
            return Refused(f"it does not fit into the store: open saves use {detail} of {self.budget_bytes}", "full")
        if status == "exists":
            return Refused(f"version {manifest.version!r} exists already", "exists")
        reasons = {
            "closed": "there is no such open save",
            "used": f"object {detail} is stored already; keys are used once",
            "gone": f"object {detail}, which it shares, is not stored any more",
            "other": f"object {detail}, which it shares, is stored with other contents",
            "missing": f"object {detail} is not stored on all ranks any more",
        }
        return Refused(reasons[status], "gone" if status == "gone" else "invalid")

    # -- loading -------------------------------------------------------------------------------------------------------

    def _find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        raw = self._server.run(scripts.FIND, version_name(namespace, version))
        if raw is None:
            return Miss()
        return raw if isinstance(raw, Refused) else Manifest.decode(raw)

    def _fetch(self, keys: Collection[str], rank: int) -> Mapping[str, Claimed | Lost]:
        out: dict[str, Claimed | Lost] = {}
        wanted = [*keys]
        for at in range(0, len(wanted), _CHUNK):
            part = wanted[at : at + _CHUNK]

            def read(part: Sequence[str] = part) -> list[Any]:
                with self._server.client.pipeline(transaction=False) as pipe:
                    for key in part:
                        pipe.hget(f"{self._server.prefix}o:{key}", "entry")
                        pipe.hget(f"{self._server.prefix}b:{key}:{rank}", "b")
                    return list(pipe.execute())

            found = self._server.ask(read)
            if isinstance(found, Refused):
                out.update(dict.fromkeys(wanted[at:], Lost(found.reason, "unavailable")))
                break
            for key, text, blob in zip(part, found[::2], found[1::2], strict=True):
                checksum = _checksum_of(text, rank)
                if checksum is not None and blob is not None:
                    out[key] = Claimed(np.frombuffer(blob, dtype=np.uint8).copy(), checksum)
        return out

    def _hint(self, namespace: str, version: str, uses: int) -> bool:
        return bool(self._server.run(scripts.HINT, version_name(namespace, version), uses) == 1)

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _delete(self, namespace: str, version: str) -> bool | Refused:
        done = self._server.run(scripts.DELETE, version_name(namespace, version))
        return done if isinstance(done, Refused) else bool(done)

    def versions(self, namespace: str | None = None) -> tuple[VersionInfo, ...] | Refused:
        """See `KVStore`."""
        rows = self._server.ask(lambda: [json.loads(raw) for _, raw in self._server.each_version("info") if raw])
        if isinstance(rows, Refused):
            return rows
        infos = [VersionInfo(*row) for row in rows if isinstance(row, list) and len(row) == len(VersionInfo.__slots__)]
        return tuple(info for info in infos if namespace is None or info.namespace == namespace)

    def has(self, namespace: str, version: str) -> bool:
        """See `KVStore`."""
        name = self._server.name("v", version_name(namespace, version))
        return self._server.ask(lambda: self._server.client.exists(name)) == 1

    def holds(self, keys: Collection[str]) -> frozenset[str]:
        """See `KVStore`."""
        wanted = [*keys]
        found = self._server.ask(lambda: self._server.get_many("o", wanted, "holders"))
        if isinstance(found, Refused):
            return frozenset()
        return frozenset(key for key, holders in zip(wanted, found, strict=True) if holders is not None)

    def verify(self) -> VerifyReport | Refused:
        """See `KVStore`."""
        return verify_server(self._server, self._fetch, self.holds)

    def gc(self) -> GcReport | Refused:
        """See `KVStore`. Payloads of saves that were cut off expire on the server by themselves."""
        return collect_server(self._server)

    def check_integrity(self) -> None:
        """See `KVStore`."""
        check_server(self._server, self._sizes())

    def close(self) -> None:
        """See `KVStore`."""
        for ticket in [*self._own]:
            self.abort(ticket)
        self._server.client.close()

    def _sizes(self) -> Sizes:
        def read() -> Sizes:
            with self._server.client.pipeline(transaction=True) as pipe:
                pipe.zcard(f"{self._server.prefix}order")
                pipe.hgetall(f"{self._server.prefix}sums")
                pipe.hgetall(f"{self._server.prefix}tags")
                versions, *hashes = pipe.execute()
            sums, tags = ({name.decode(): int(value) for name, value in h.items()} for h in hashes)
            objects, used, reserved, evictions = (sums.get(n, 0) for n in ("objects", "used", "reserved", "evictions"))
            return Sizes(versions, objects, used, reserved, evictions, tags)

        found = self._server.ask(read)
        return Sizes() if isinstance(found, Refused) else found


def _owner(namespace: str) -> str:
    return version_name(namespace, "")


def _entry_text(entry: ObjectEntry) -> str:
    return json.dumps(entry._replace(place=""), separators=(",", ":"))


def _checksum_of(text: bytes | None, rank: int) -> str | None:
    """Returns the checksum that a rank's part has by its object's entry, or None when there is no such part."""
    try:
        parts = json.loads(text or b"null")[5]
        return str(parts[rank][1]) if 0 <= rank < len(parts) else None
    except (ValueError, TypeError, IndexError, KeyError):
        return None


def _info_fields(info: VersionInfo) -> list[Any]:
    return [getattr(info, name) for name in VersionInfo.__slots__]
