"""Compiles the CPU loops once an installation, and again when any source that they are made of changes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

__all__ = ["compiled"]


@functools.cache
def _sources_digest() -> str:
    """Returns a digest of every file whose code ends up in a compiled loop."""
    folder = Path(__file__).parent
    files = [folder / "formats.py", *sorted(folder.glob("cpu_*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class _SourceCache(FunctionCache):
    """numba's file cache, keyed by all sources: by itself it looks only at the file of the loop, not at what that inlines."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _sources_digest())


def compiled(loop: Callable[..., None]) -> Any:
    """Returns a loop that compiles without the interpreter lock, and loads what an earlier process compiled."""
    dispatcher = njit(nogil=True, error_model="numpy")(loop)
    dispatcher._cache = _SourceCache(loop)
    return dispatcher
