"""Token ids of versions that grow out of one another, kept once."""

from __future__ import annotations

import numpy as np

from agentcache.episodes.pieces import TokenArray

__all__ = ["Buffer"]

_GROWTH = 1.5


class Buffer:
    """An array that append-only versions share: each holds a read-only view of its beginning.

    Written tokens never change, so the views stay what they are while longer versions are added. With growth by half,
    a chain of any length takes at most three times the memory of its last version.
    """

    def __init__(self, ids: TokenArray) -> None:
        self._data = ids.astype(np.int32)
        self._used = len(ids)

    def extended(self, ids: TokenArray) -> Buffer:
        """Returns the buffer that begins with ids: this one when they go on from all that is in it, else a new one."""
        used, total = self._used, len(ids)
        if total < used or not np.array_equal(self._data[:used], ids[:used]):
            return Buffer(ids)
        if total <= len(self._data):
            self._data[used:total] = ids[used:]
            self._used = total
            return self
        grown = Buffer(np.empty(0, np.int32))
        grown._data = np.empty(int(_GROWTH * total), np.int32)
        grown._data[:total] = ids
        grown._used = total
        return grown

    def view(self, start: int, stop: int) -> TokenArray:
        """Returns a read-only view of tokens `[start, stop)`."""
        view = self._data[start:stop]
        view.flags.writeable = False
        return view
