"""Payload files: all new objects of one save and rank in one safetensors file, one U8 tensor an object, named by its key.

```
8 bytes   length N of the header, little-endian
N bytes   {"__metadata__": {key: checksum}, key: {"dtype": "U8", "shape": [n], "data_offsets": [a, b]}, ...} and blanks
...       payloads in the order in which they were put, without gaps
```

Room for the header is left while payloads arrive, so that none of them is held back or copied.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from agentcache.store.tiers.files import Files
from agentcache.store.tiers.manifest import KEY, Part
from agentcache.store.tiers.outcomes import Blob, Refused

__all__ = ["PayloadWriter", "Stretch", "read_header"]

_MOST = 10**15  # more digits than a size or an offset has
_HEADER_LIMIT = 64 << 20


class Stretch(NamedTuple):
    """Where a payload stands in its file."""

    offset: int
    size_bytes: int
    checksum: str


class PayloadWriter:
    """Writes one rank's file of a save as its payloads arrive; the file appears when the last one did.

    Args:
        files: How to write.
        path: The file that appears.
        keys: The objects that it will hold.
    """

    def __init__(self, files: Files, path: Path, keys: Collection[str]) -> None:
        self.path = path
        self._files = files
        self._keys = frozenset(keys)
        self._lock = threading.Lock()
        self._parts: dict[str, Part] = {}
        self._starts: dict[str, int] = {}
        self._room = len(_header(dict.fromkeys(keys, Stretch(_MOST, _MOST, "0" * 16))))
        self._end = 0
        self._part = path.with_suffix(".part")
        self._fd = files.create(self._part)

    def put(self, key: str, blob: Blob, checksum: str, most_bytes: int) -> Part | Refused:
        """Adds one payload unless the file would exceed `most_bytes`; returns what stands under its key.

        Raises:
            OSError: It could not be written, or the file could not be finished; the same call may be tried again.
        """
        with self._lock:
            if key not in self._keys:
                return Refused(f"object {key} is none that this save stores", "invalid")
            if key not in self._parts:
                if self._end + len(blob) > most_bytes:
                    return Refused(f"the payloads are more than the {most_bytes} bytes that the save reserved", "full")
                if self._fd < 0:
                    return Refused("the save has ended", "invalid")
                self._files.write(self._fd, blob, 8 + self._room + self._end)
                self._parts[key] = Part(len(blob), checksum)
                self._starts[key] = self._end
                self._end += len(blob)
            if len(self._parts) == len(self._keys) and self._fd >= 0:
                self._seal()
            return self._parts[key]

    def _seal(self) -> None:
        spans = {key: Stretch(self._starts[key], *part) for key, part in self._parts.items()}
        self._files.write(self._fd, struct.pack("<Q", self._room) + _header(spans).ljust(self._room), 0)
        self._files.sync(self._fd)
        self._files.rename(self._part, self.path)  # the name need not be safe: who completes the save moves the file
        self._close()

    def close(self) -> None:
        """Gives back the descriptor; an unfinished file stays where nobody looks."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _header(spans: dict[str, Stretch]) -> bytes:
    """Returns the header of payloads that stand at these offsets after it."""
    header: dict[str, object] = {"__metadata__": {key: span.checksum for key, span in spans.items()}}
    for key, (start, size, _) in spans.items():
        header[key] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
    return json.dumps(header, separators=(",", ":")).encode()


def read_header(path: Path) -> dict[str, Stretch]:
    """Returns where each payload of a file stands.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no whole payload file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT
        if length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"{path.name} is truncated")
        raw = file.read(length)
    base = 8 + length
    try:
        header = json.loads(raw)
    except RecursionError as error:
        raise ValueError(f"{path.name} has a header of nested nonsense") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise ValueError(f"{path.name} has no payload header")
    checksums = header.pop("__metadata__")
    out = {}
    for key, tensor in header.items():
        span = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        checksum = checksums.get(key)
        if not (
            KEY.fullmatch(key)
            and isinstance(checksum, str)
            and isinstance(span, list)
            and len(span) == 2
            and all(type(at) is int for at in span)
            and 0 <= span[0] < span[1] <= size - base
        ):
            raise ValueError(f"{path.name}: payload {key!r:.40} is truncated or malformed")
        out[key] = Stretch(base + span[0], span[1] - span[0], checksum)
    return out
