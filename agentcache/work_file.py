"""What a long run has measured so far: one JSON line for each measurement, under a name that says all that it depends on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["Found", "WorkFile", "digest_key"]

Found = Mapping[str, Any]
"""A measurement, as JSON has it."""


class WorkFile:
    """Measurements by name, one JSON line each.

    A line is written in one piece; one that a killed run left unfinished is ignored, and ends before the next one begins.

    Args:
        path: Made with the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[str, Found] = {}
        self._torn = False
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            self._torn = bool(text) and not text.endswith("\n")
            for line in text.split("\n"):
                try:
                    row = json.loads(line)
                    self._found[row["key"]] = row["found"]
                except (ValueError, TypeError, KeyError):
                    continue  # measured again

    def get(self, key: str) -> Found | None:
        """Returns a measurement, or None when it was not made."""
        return self._found.get(key)

    def rows(self) -> list[Found]:
        """Returns all measurements, in the order in which they were first made."""
        return list(self._found.values())

    def put(self, key: str, found: Found, *, name: str = "") -> Found:
        """Returns the measurement as a later run reads it, after it is on the disk.

        Args:
            key: See `digest_key`.
            found: What was measured.
            name: Of what was measured; for people.
        """
        line = json.dumps({"key": key, "name": name, "found": found}, separators=(",", ":")) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}" if self._torn else line)
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        kept: Found = json.loads(line)["found"]
        self._found[key] = kept
        return kept


def digest_key(what: Any) -> str:
    """Returns 32 hex digits that name JSON values: equal ones have equal digits, whatever the order of their fields."""
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
