"""The worker's half of the block store: immutable packed KV by object id, each with a checksum. It follows orders only.

Which objects exist, who refers to them and what is evicted is the scheduler half's business (`store.index`). A tier below
keeps an object as one string of bytes, see `docs/checkpoint-format.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

from agentcache.kernels import PackedRun, Tag
from agentcache.store.scores import Codes

__all__ = ["BLOB_VERSION", "Payload", "PayloadStore", "decode_payload", "encode_payload", "is_intact"]

BLOB_VERSION = 1
_MAGIC = b"ACKV"
_HEAD = struct.Struct("<4sHHII")  # magic, version, flags, rows, runs
_RUN = struct.Struct("<16sIQ")  # tag, rows, bytes
_RESIDUAL = 1


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """One object: its rows as consecutive packed runs, each of one precision, on the host.

    Attributes:
        runs: Keys stand as embedded at their source position.
        checksum: xxh3-64 of all bytes; 0 when none was made.
        residual: How much each row's value would lose in 4 bits, see `store.scores`; None when that was not measured.
    """

    runs: tuple[PackedRun, ...]
    checksum: int = 0
    residual: Codes | None = None

    @property
    def tokens(self) -> int:
        """Rows."""
        return sum(run.tokens for run in self.runs)

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows and of their residuals."""
        residual = 0 if self.residual is None else len(self.residual)
        return residual + sum(int(run.data.numel()) for run in self.runs)

    @property
    def tag(self) -> str:
        """The precision of all rows, or `mixed`."""
        tags = {str(run.tag) for run in self.runs}
        return tags.pop() if len(tags) == 1 else "mixed"

    @property
    def lossless(self) -> bool:
        """Whether every row is stored bit by bit."""
        return all(run.tag == Tag.EXACT for run in self.runs)


def _checksum(payload: Payload) -> int:
    digest = xxhash.xxh3_64()
    for run in payload.runs:
        digest.update(run.data.numpy())
    if payload.residual is not None:
        digest.update(payload.residual.data)
    return int(digest.intdigest())


def is_intact(payload: Payload) -> bool:
    """Whether a payload's bytes are those that its checksum was made of."""
    return _checksum(payload) == payload.checksum


def encode_payload(payload: Payload) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Returns a payload as bytes, `[bytes]` uint8, for a tier."""
    flags = _RESIDUAL if payload.residual is not None else 0
    head = _HEAD.pack(_MAGIC, BLOB_VERSION, flags, payload.tokens, len(payload.runs))
    head += b"".join(_RUN.pack(str(r.tag).encode("ascii"), r.tokens, r.data.numel()) for r in payload.runs)
    residual = [] if payload.residual is None else [payload.residual]
    return np.concatenate([np.frombuffer(head, dtype=np.uint8), *residual, *(run.data.numpy() for run in payload.runs)])


def decode_payload(blob: np.ndarray[tuple[int], np.dtype[np.uint8]], *, verify: bool = True) -> Payload:
    """Returns the payload of bytes that `encode_payload` made; it shares no memory with them.

    Args:
        blob: `[bytes]` uint8.
        verify: Whether the payload gets a checksum.

    Raises:
        ValueError: They are not such bytes, or of another version.
    """
    data = blob.data
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are no payload")
    magic, version, flags, tokens, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != BLOB_VERSION or flags & ~_RESIDUAL:
        raise ValueError(f"the payload's head is {bytes(data[: _HEAD.size])!r}, not of version {BLOB_VERSION}")
    at = _HEAD.size + count * _RUN.size
    if at > len(data):
        raise ValueError(f"the payload ends inside the table of its {count} runs")
    table = [_RUN.unpack_from(data, _HEAD.size + i * _RUN.size) for i in range(count)]
    scores = tokens if flags & _RESIDUAL else 0
    if sum(rows for _, rows, _ in table) != tokens or at + scores + sum(size for *_, size in table) != len(data):
        raise ValueError("the payload's table does not fit its bytes")
    residual = blob[at : at + scores].copy() if flags & _RESIDUAL else None
    at += scores
    runs = []
    for name, rows, size in table:
        # Copied: a tier may map a file that another process cuts off, and kernels read 2-byte words.
        packed = torch.empty(size, dtype=torch.uint8)
        np.copyto(packed.numpy(), blob[at : at + size])
        runs.append(PackedRun(name.rstrip(b"\0").decode("ascii"), rows, packed))
        at += size
    return _sealed(Payload(tuple(runs), 0, residual), verify)


def _sealed(payload: Payload, verify: bool) -> Payload:
    return replace(payload, checksum=_checksum(payload)) if verify else payload


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

    def put(self, object_id: int, runs: Iterable[PackedRun], residual: Codes | None = None) -> Payload:
        """Adds one object and returns it; its bytes are kept as they are and must not change afterwards."""
        return self.add(object_id, _sealed(Payload(tuple(runs), 0, residual), self.verify))

    def add(self, object_id: int, payload: Payload) -> Payload:
        """Adds one object that has its checksum already, e.g. from a tier; returns it."""
        assert object_id not in self._objects, f"object {object_id} is immutable"
        self._objects[object_id] = payload
        self.size_bytes += payload.size_bytes
        return payload

    def get(self, object_id: int) -> Payload | None:
        """Returns an object, or None when it is absent."""
        return self._objects.get(object_id)

    def intact(self, object_id: int) -> bool:
        """Whether the object is there and its bytes are those that were put."""
        payload = self._objects.get(object_id)
        return payload is not None and (not self.verify or is_intact(payload))

    def drop(self, object_id: int) -> None:
        """Forgets one object; one that is absent is ignored (it may have been lost before)."""
        payload = self._objects.pop(object_id, None)
        if payload is not None:
            self.size_bytes -= payload.size_bytes

    def clear(self) -> None:
        """Forgets every object."""
        self._objects.clear()
        self.size_bytes = 0

    def tag_bytes(self) -> dict[str, int]:
        """Returns bytes of rows by precision."""
        out: dict[str, int] = {}
        for payload in self._objects.values():
            for run in payload.runs:
                out[str(run.tag)] = out.get(str(run.tag), 0) + int(run.data.numel())
        return out
