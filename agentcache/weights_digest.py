"""Tells models apart by their weights without reading all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import xxhash

__all__ = ["weights_digest"]

_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
_SAMPLES = 16  # stretches read of each weight file: a whole one may have hundreds of gigabytes
_STRETCH = 64 << 10


def weights_digest(model: Path) -> str:
    """Returns the xxh3-128 of the length of each weight file and of stretches spread over it, 32 hex digits.

    Of the weights alone: each release of transformers writes `config.json` in its own way.

    Args:
        model: A folder with weight files, or one such file.
    """
    digest = xxhash.xxh3_128()
    for file in _files(model):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as stream:
            for i in range(_SAMPLES):
                stream.seek(max(size - _STRETCH, 0) * i // (_SAMPLES - 1))
                digest.update(stream.read(_STRETCH))
    return str(digest.hexdigest())


def _files(model: Path) -> Iterator[Path]:
    if model.is_file():
        yield model
        return
    for pattern in _WEIGHTS:
        yield from sorted(model.glob(pattern))
