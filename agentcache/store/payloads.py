"""The worker's half of the block store: immutable K/V rows by object id, each with a checksum. It follows orders only.

Which objects exist, who refers to them and what is evicted is the scheduler half's business (`store.index`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash

__all__ = ["Payload", "PayloadStore"]


@dataclass(frozen=True, slots=True)
class Payload:
    """The rows of one object.

    Attributes:
        rows: `[L, 2, T, H, D]` in the KV dtype, on the host: keys as embedded at their source position, then values.
        checksum: xxh3-64 of the bytes.
    """

    rows: torch.Tensor
    checksum: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel() * self.rows.element_size()


def checksum(rows: torch.Tensor) -> int:
    """Returns the xxh3-64 of a contiguous host tensor's bytes."""
    return int(xxhash.xxh3_64_intdigest(rows.view(-1).view(torch.uint8).numpy()))


class PayloadStore:
    """Rows by object id.

    Args:
        verify: Whether `get` compares the checksum.
    """

    def __init__(self, verify: bool = True) -> None:
        self.verify = verify
        self._objects: dict[int, Payload] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._objects)

    def put(self, object_id: int, rows: torch.Tensor) -> None:
        """Adds one object; `rows` is kept as it is and must not change afterwards."""
        assert object_id not in self._objects, f"object {object_id} is immutable"
        payload = Payload(rows, checksum(rows) if self.verify else 0)
        self._objects[object_id] = payload
        self.size_bytes += payload.size_bytes

    def get(self, object_id: int) -> torch.Tensor | None:
        """Returns the rows of an object, or None when it is absent."""
        payload = self._objects.get(object_id)
        return None if payload is None else payload.rows

    def intact(self, object_id: int) -> bool:
        """Whether the object is there and its bytes are those that were put."""
        payload = self._objects.get(object_id)
        return payload is not None and (not self.verify or checksum(payload.rows) == payload.checksum)

    def drop(self, object_id: int) -> None:
        """Forgets one object; one that is absent is ignored (it may have been lost before)."""
        payload = self._objects.pop(object_id, None)
        if payload is not None:
            self.size_bytes -= payload.size_bytes

    def clear(self) -> None:
        """Forgets every object."""
        self._objects.clear()
        self.size_bytes = 0
