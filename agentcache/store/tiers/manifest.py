"""The manifest of a stored version: which rows of which objects make it up, for whom they are, and proof that it is intact.

It is one JSON object on one line. The last member is the xxh3-128 of the bytes before it, so that a changed byte anywhere
is noticed before anything is believed. A manifest says nothing about where payloads lie, but for `ObjectEntry.place`.
"""

from __future__ import annotations

import base64
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentcache.store.tiers.outcomes import Blob, Refused, VersionInfo

__all__ = [
    "FORMAT",
    "Manifest",
    "ObjectEntry",
    "PackedIds",
    "Part",
    "StoredExtent",
    "fingerprint_fault",
    "new_key",
    "payload_checksum",
    "version_name",
]

FORMAT = 1
MAX_TOKENS = 1 << 24
MAX_BYTES = 64 << 20
MAX_RANKS = 1024
KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)

Name = Annotated[str, Field(min_length=1, max_length=256)]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Positive = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Label = Annotated[str, Field(max_length=1024)]

_TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}')
_TAIL_BYTES = len(',"checksum":""}') + 32


def new_key() -> str:
    """Returns a fresh object key: 128 random bits in hex, never used twice by any process."""
    return secrets.token_hex(16)


def version_name(namespace: str, version: str) -> str:
    """Returns the name that a version has on disk or on a server: 40 hex digits, whatever its ids are."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (namespace, version)]
    return blake2b(struct.pack("<Q", len(parts[0])) + b"".join(parts), digest_size=20).hexdigest()


def payload_checksum(key: str, rank: int, blob: Blob) -> str:
    """Returns the xxh3-64 of a payload in hex, seeded by whose it is: a payload in another's place does not match."""
    seed = int(key[:16], 16) ^ int(key[16:], 16) ^ rank
    return xxhash.xxh3_64_hexdigest(blob.data, seed=seed)


class Part(NamedTuple):
    """One rank's payload of an object."""

    size_bytes: Annotated[int, Field(ge=1, le=1 << 48)]
    checksum: Digest


class ObjectEntry(NamedTuple):
    """One object of a version.

    Attributes:
        key: See `new_key`.
        tokens: Rows.
        source_position: Row j was computed at position `source_position + j`.
        exact: Whether the rows were those of a full prefill.
        tag: Precision of the payload.
        parts: One a rank. Empty in a manifest that is being prepared: the ranks will store it with this save.
        place: Where the store keeps it; the store's own affair.
    """

    key: Key
    tokens: Positive
    source_position: Count
    exact: bool
    tag: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")] = "exact"
    parts: Annotated[tuple[Part, ...], Field(max_length=MAX_RANKS)] = ()
    place: Label = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all ranks' payloads."""
        return sum(part.size_bytes for part in self.parts)


class StoredExtent(NamedTuple):
    """Rows `[offset, offset + length)` of an object are rows `[position, position + length)` of the version."""

    key: Key
    offset: Count
    length: Positive
    position: Count
    generation: Count = 0


class PackedIds(BaseModel):
    """Token ids as base64 of deflated little-endian int32, with their number and the xxh3-64 of the int32 bytes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    length: Count
    data: str
    checksum: Digest

    @classmethod
    def pack(cls, token_ids: ArrayLike) -> Self:
        """Returns ids packed."""
        raw = np.asarray(token_ids).astype("<i4", casting="same_kind").tobytes()
        return cls(
            length=len(raw) // 4,
            data=base64.b64encode(zlib.compress(raw, 6)).decode("ascii"),
            checksum=xxhash.xxh3_64_hexdigest(raw),
        )

    def unpack(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns the ids, `[T]` int32, read-only; raises ValueError when they are not what was packed."""
        inflate = zlib.decompressobj()
        try:
            # Bounded: a few bytes may deflate gigabytes.
            raw = inflate.decompress(base64.b64decode(self.data, validate=True), 4 * self.length + 1)
        except zlib.error as error:
            raise ValueError(f"token ids cannot be inflated: {error}") from error
        if len(raw) != 4 * self.length or not inflate.eof or inflate.unused_data:
            raise ValueError(f"there are not {self.length} token ids")
        if xxhash.xxh3_64_hexdigest(raw) != self.checksum:
            raise ValueError("the checksum of the token ids does not match")
        ids = np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
        if len(ids) and ids.min() < 0:
            raise ValueError("a token id is negative")
        return ids


class Manifest(BaseModel):
    """One version as it is stored.

    Attributes:
        format: Version of this layout.
        fingerprint: What the payloads were made for: model, dtype, heads, rotary and so on; compared as a whole.
        namespace: Tenant.
        version: Unique in its namespace.
        group: The episode.
        parent: The version that it was recovered from; it need not exist any more.
        tokens: Its token ids.
        exact_end: Leading rows whose KV is that of a full prefill.
        salts: `(block index, salt in hex)` of its lineage's block hashes.
        ranks: How many ranks store a part of every object.
        extents: Stored rows, ascending and disjoint.
        objects: What the extents point at, each once.
        attention: How much each row was attended to when it was saved, `[T]` codes of `store.scores` in base64; empty when
            that was not measured.
        created: Wall clock when it was prepared; 0: unknown. Of an episode's oldest version it gives the date that its prompts go on
            to print after a restart.
        sequence: Order of creation, given by the store; 0 before.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    fingerprint: Annotated[dict[Label, Label], Field(max_length=64)]
    namespace: Name
    version: Name
    group: Name
    parent: Name | None = None
    tokens: PackedIds
    exact_end: Count
    salts: tuple[tuple[Count, Annotated[str, Field(pattern=r"^([0-9a-f]{2}){0,64}$")]], ...] = ()
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    extents: tuple[StoredExtent, ...]
    objects: tuple[ObjectEntry, ...]
    attention: Annotated[str, Field(max_length=MAX_TOKENS * 4 // 3 + 4)] = ""
    created: float = 0.0
    sequence: Annotated[int, Field(ge=0, le=1 << 62)] = 0

    @classmethod
    def draft(
        cls,
        *,
        fingerprint: Mapping[str, str],
        namespace: str,
        version: str,
        token_ids: ArrayLike,
        extents: Iterable[StoredExtent],
        objects: Iterable[ObjectEntry],
        group: str | None = None,
        parent: str | None = None,
        exact_end: int = 0,
        salts: Iterable[tuple[int, bytes]] = (),
        ranks: int = 1,
        attention: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
    ) -> Self:
        """Returns a manifest to prepare. Objects without parts are those that the ranks will store; the others are kept.

        Raises:
            pydantic.ValidationError: The arguments contradict each other.
        """
        return cls(
            fingerprint=dict(fingerprint),
            namespace=namespace,
            version=version,
            group=group or version,
            parent=parent,
            tokens=PackedIds.pack(token_ids),
            exact_end=exact_end,
            salts=tuple((index, salt.hex()) for index, salt in salts),
            ranks=ranks,
            extents=tuple(extents),
            objects=tuple(objects),
            attention="" if attention is None else base64.b64encode(attention.tobytes()).decode("ascii"),
            created=time.time(),
        )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        self.tokens.unpack()
        scores = self.attention_codes
        if scores is not None and len(scores) != self.tokens.length:
            raise ValueError(f"there are {len(scores)} attention scores for {self.tokens.length} tokens")
        rows = {entry.key: entry.tokens for entry in self.objects}
        if len(rows) != len(self.objects):
            raise ValueError("an object is listed twice")
        at, used = 0, set()
        for key, offset, length, position, _ in self.extents:
            if offset + length > rows.get(key, -1):
                raise ValueError(f"an extent reaches beyond object {key}")
            if position < at:
                raise ValueError(f"extents are not ascending and disjoint at row {position}")
            at = position + length
            used.add(key)
        if at > self.tokens.length or self.exact_end > self.tokens.length:
            raise ValueError(f"rows reach beyond {self.tokens.length} tokens")
        if len(used) != len(rows):
            raise ValueError("an object is listed that no extent points at")
        if any(len(entry.parts) not in (0, self.ranks) for entry in self.objects):
            raise ValueError(f"an object has not {self.ranks} parts")
        return self

    # -- what it says --------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name on disk or on a server."""
        return version_name(self.namespace, self.version)

    @property
    def token_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """`[T]` int32, read-only; unpacked anew each time."""
        return self.tokens.unpack()

    @property
    def attention_codes(self) -> bytes | None:
        """One code a token, or None; decoded anew each time."""
        return base64.b64decode(self.attention, validate=True) if self.attention else None

    @property
    def new_objects(self) -> tuple[ObjectEntry, ...]:
        """The objects that the ranks have yet to store."""
        return tuple(entry for entry in self.objects if not entry.parts)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all objects on all ranks."""
        return sum(entry.size_bytes for entry in self.objects)

    @property
    def cost_bytes(self) -> int:
        """What the manifest itself takes of a budget: an upper bound of its size that no tier and no state changes."""
        return (
            1024
            + len(self.attention)
            + 4 * self.tokens.length
            + 72 * len(self.extents)
            + (160 + 32 * self.ranks) * len(self.objects)
        )

    def info(self) -> VersionInfo:
        """Returns its line of a listing."""
        return VersionInfo(
            self.namespace,
            self.version,
            self.group,
            self.parent,
            self.tokens.length,
            len(self.objects),
            self.payload_bytes,
            self.sequence,
        )

    def with_objects(self, objects: Iterable[ObjectEntry], sequence: int = 0) -> Self:
        """Returns a copy with other entries for the same objects."""
        return self.model_copy(update={"objects": tuple(objects), "sequence": sequence})

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Returns the manifest as JSON that ends with its checksum."""
        body = self.model_dump_json().encode()
        return body[:-1] + b',"checksum":"%b"}' % xxhash.xxh3_128_hexdigest(body).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest | Refused:
        """Returns the manifest that `encode` gave these bytes for, or why there is none. Never raises."""
        if len(data) > MAX_BYTES:
            return Refused(f"the manifest has {len(data)} bytes; at most {MAX_BYTES} are read", "corrupt")
        tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
        body = data[:-_TAIL_BYTES] + b"}"
        if tail is None or xxhash.xxh3_128_hexdigest(body).encode() != tail[1]:
            return Refused("the manifest's checksum does not match: it was truncated or changed", "corrupt")
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            errors = error.errors()
            found = next((e["input"] for e in errors if e["loc"] == ("format",)), None)
            if found is not None:
                return Refused(f"it was stored in format {found!r:.40}; this release reads format {FORMAT}", "foreign")
            where = ".".join(str(part) for part in errors[0]["loc"][:4])
            return Refused(f"the manifest is malformed: {where or 'it'}: {errors[0]['msg']}", "corrupt")


def fingerprint_fault(stored: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """Returns what differs between two fingerprints, or None."""
    names = sorted(name for name in {*stored, *expected} if stored.get(name) != expected.get(name))
    if not names:
        return None
    listed = "; ".join(f"{name} {stored.get(name)!r}, here {expected.get(name)!r}" for name in names)
    return f"it was stored for another engine: {listed}"
