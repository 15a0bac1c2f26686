"""What keeps a Redis store whole: reading everything once, clearing away, and recounting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from agentcache.store.tiers import redis_scripts as scripts
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, payload_checksum
from agentcache.store.tiers.outcomes import GcReport, Lost, Refused, VerifyReport
from agentcache.store.tiers.redis_server import Server
from agentcache.store.tiers.tier import Claimed, Sizes

__all__ = ["check_server", "collect_server", "verify_server"]


def verify_server(
    server: Server,
    fetch: Callable[[Collection[str], int], Mapping[str, Claimed | Lost]],
    holds: Callable[[Collection[str]], frozenset[str]],
) -> VerifyReport | Refused:
    """Returns what reading every manifest and every payload found.

    Args:
        server: The server.
        fetch: Returns one rank's payloads.
        holds: Says which objects are still there.
    """
    rows = server.ask(lambda: server.each_version("manifest"))
    if isinstance(rows, Refused):
        return rows
    faults: list[str] = []
    entries: dict[str, ObjectEntry] = {}
    versions = 0
    for name, raw in rows:
        made = Manifest.decode(raw or b"")
        if isinstance(made, Refused) or made.name != name:
            faults.append(f"version {name}: {made.reason if isinstance(made, Refused) else 'it is another version'}")
        else:
            versions += 1
            entries.update({entry.key: entry for entry in made.objects})
    for key, entry in entries.items():
        for rank, part in enumerate(entry.parts):
            found = fetch([key], rank).get(key)
            if isinstance(found, Claimed) and payload_checksum(key, rank, found.blob) == part.checksum:
                continue
            if key in holds([key]):  # else it was evicted while we read
                reason = found.reason if isinstance(found, Lost) else "it is not there, or its checksum does not match"
                faults.append(f"object {key} of rank {rank}: {reason}")
    return VerifyReport(versions, len(entries), sum(entry.size_bytes for entry in entries.values()), tuple(faults))


def collect_server(server: Server) -> GcReport | Refused:
    """Ends overdue saves, removes damaged versions, and payloads that no object names and that do not expire."""
    saves = server.run(scripts.REAP)
    if isinstance(saves, Refused):
        return saves

    def collect() -> GcReport:
        manifests = payloads = freed = 0
        for name, raw in server.each_version("manifest"):
            made = Manifest.decode(raw or b"")
            if isinstance(made, Refused) and made.kind == "corrupt":
                server.client.register_script(scripts.DELETE)(keys=[server.prefix], args=[name])
                server.client.zrem(f"{server.prefix}order", name)
                server.client.zrem(f"{server.prefix}score", name)
                manifests += 1
                freed += len(raw or b"")
        start = len(server.name("b", ""))
        for value in server.client.scan_iter(match=f"{_literal(server.prefix)}b:*", count=512):
            key = value.decode("ascii", "replace")[start:].partition(":")[0]
            if not server.client.exists(server.name("o", key)) and server.client.ttl(value) == -1:
                payloads += 1
                freed += server.client.hstrlen(value, "b")
                server.client.unlink(value)
        return GcReport(int(saves), manifests, payloads, freed)

    return server.ask(collect)


def check_server(server: Server, sizes: Sizes) -> None:
    """Recounts holders and bytes and compares; raises AssertionError."""

    def check() -> None:
        versions = [name for name, _ in server.each_version("cost")]
        tickets = [ticket.decode() for ticket in server.client.zrange(f"{server.prefix}tickets", 0, -1)]
        kept = server.get_many("v", versions, "keys") + server.get_many("t", tickets, "keep")
        holders = Counter(key for text in kept for key in text.decode().split())
        counted = server.get_many("o", [*holders], "holders")
        assert [int(n or 0) for n in counted] == [*holders.values()], "wrong references"
        payloads = sum(map(int, server.get_many("o", [*holders], "bytes")))
        own = sum(map(int, server.get_many("t", tickets, "own")))
        costs = sum(map(int, server.get_many("v", versions, "cost")))
        assert (sizes.used_bytes, sizes.reserved_bytes) == (payloads + own + costs, own), "wrong sums"
        assert (sizes.versions, sizes.objects) == (len(versions), len(holders)), "wrong counts"
        assert sum(sizes.bytes_by_tag.values()) == payloads, "wrong bytes by tag"

    done = server.ask(check)
    assert not isinstance(done, Refused), done.reason


def _literal(text: str) -> str:
    """Returns a pattern that matches a text and nothing else."""
    return "".join(f"\\{c}" if c in "*?[]^-\\" else c for c in text)
