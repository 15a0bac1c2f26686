"""The worker's half of the block store: immutable packed KV by object id, each with a checksum. It follows orders only.

Which objects exist, who refers to them and what is evicted is the scheduler half's business (`store.index`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from agentcache.kernels import PackedRun, Tag

__all__ = ["Payload", "PayloadStore"]


@dataclass(frozen=True, slots=True)
class Payload:
    """One object: its rows as consecutive packed runs, each of one precision, on the host.

    Attributes:
        runs: Keys stand as embedded at their source position.
        checksum: xxh3-64 of all bytes.
    """

    runs: tuple[PackedRun, ...]
    checksum: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(int(run.data.numel()) for run in self.runs)

    @property
    def lossless(self) -> bool:
        """Whether every row is stored bit by bit."""
        return all(run.tag == Tag.EXACT for run in self.runs)


def _checksum(runs: Iterable[PackedRun]) -> int:
    digest = xxhash.xxh3_64()
    for run in runs:
        digest.update(run.data.numpy())
    return int(digest.intdigest())


class PayloadStore:
    """Packed rows by object id.

    Args:
        verify: Whether checksums are made and compared.
    """

    def __init__(self, verify: bool = True) -> None:
        self.verify = verify
        self._objects: dict[int, Payload] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._objects)

    def put(self, object_id: int, runs: Iterable[PackedRun]) -> Payload:
        """Adds one object and returns it; its bytes are kept as they are and must not change afterwards."""
        assert object_id not in self._objects, f"object {object_id} is immutable"
        kept = tuple(runs)
        payload = Payload(kept, _checksum(kept) if self.verify else 0)
        self._objects[object_id] = payload
        self.size_bytes += payload.size_bytes
        return payload

    def get(self, object_id: int) -> Payload | None:
        """Returns an object, or None when it is absent."""
        return self._objects.get(object_id)

    def intact(self, object_id: int) -> bool:
        """Whether the object is there and its bytes are those that were put."""
        payload = self._objects.get(object_id)
        return payload is not None and (not self.verify or _checksum(payload.runs) == payload.checksum)

    def drop(self, object_id: int) -> None:
        """Forgets one object; one that is absent is ignored (it may have been lost before)."""
        payload = self._objects.pop(object_id, None)
        if payload is not None:
            self.size_bytes -= payload.size_bytes

    def clear(self) -> None:
        """Forgets every object."""
        self._objects.clear()
        self.size_bytes = 0
