"""The worker's half of the block store: immutable packed KV by object id, each with a checksum. It follows orders only.

Which objects exist, who refers to them and what is evicted is the scheduler half's business (`store.index`).
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from agentcache.kernels import PackedRun

__all__ = ["Payload", "PayloadStore"]


@dataclass(frozen=True, slots=True)
class Payload:
    """One object.

    Attributes:
        run: Its rows, packed, on the host: keys as embedded at their source position.
        checksum: xxh3-64 of the bytes.
    """

    run: PackedRun
    checksum: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows."""
        return int(self.run.data.numel())


def _checksum(run: PackedRun) -> int:
    return int(xxhash.xxh3_64_intdigest(run.data.numpy()))


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

    def put(self, object_id: int, run: PackedRun) -> None:
        """Adds one object; its bytes are kept as they are and must not change afterwards."""
        assert object_id not in self._objects, f"object {object_id} is immutable"
        payload = Payload(run, _checksum(run) if self.verify else 0)
        self._objects[object_id] = payload
        self.size_bytes += payload.size_bytes

    def get(self, object_id: int) -> PackedRun | None:
        """Returns an object's rows, or None when it is absent."""
        payload = self._objects.get(object_id)
        return None if payload is None else payload.run

    def intact(self, object_id: int) -> bool:
        """Whether the object is there and its bytes are those that were put."""
        payload = self._objects.get(object_id)
        return payload is not None and (not self.verify or _checksum(payload.run) == payload.checksum)

    def drop(self, object_id: int) -> None:
        """Forgets one object; one that is absent is ignored (it may have been lost before)."""
        payload = self._objects.pop(object_id, None)
        if payload is not None:
            self.size_bytes -= payload.size_bytes

    def clear(self) -> None:
        """Forgets every object."""
        self._objects.clear()
        self.size_bytes = 0
