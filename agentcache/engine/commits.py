"""Salted block hashes: approximate KV gets names that no request outside its lineage can compute.

vLLM publishes every full block under a chain of content hashes, as if it were exact. A request whose rows are
approximate from block `i` on hashes block `i` with a salt; later hashes chain on it, so one salt names the whole rest.
A lineage knows its salts and finds its own blocks; a plain request computes the unsalted chain and hits exact blocks only.

The wrapper sits on the request's own hasher because vLLM also hashes blocks that fill up during decoding: a salt written
into `block_hashes` alone would miss the partial tail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Salts", "lineage_salts", "salt_request", "version_salt"]

Salts = tuple[tuple[int, bytes], ...]
"""`(block index, salt)`, ascending: the hash of that block is salted when it is computed."""


def version_salt(namespace: str, version: str, plan_digest: str, extra: str = "") -> bytes:
    """Returns the salt of the approximate rows that one plan of one version creates, 16 bytes."""
    digest = hashlib.blake2b(digest_size=16, person=b"agentcache.salt")
    for part in (namespace, version, plan_digest, extra):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def lineage_salts(
    parent: Salts,
    *,
    prefix: int,
    restored_after_prefix: bool,
    first_approximate: int | None,
    block_size: int,
    own: bytes,
) -> Salts:
    """Returns the salts of a version, given its parent's and its plan.

    Args:
        parent: The parent's salts.
        prefix: |P|, the rows shared with the parent from position 0.
        restored_after_prefix: Whether the plan reuses rows behind P (F is not empty).
        first_approximate: First approximate row of the plan, or None when all of them are exact.
        block_size: Tokens a hashed block.
        own: The version's own salt, see `version_salt`.
    """
    if first_approximate is None:
        return ()
    salts = tuple((index, salt) for index, salt in parent if index * block_size < prefix)
    first = first_approximate // block_size
    if restored_after_prefix:
        # Blocks wholly inside P are the parent's. From the first row that is both approximate and not the parent's, the
        # rows depend on this version's plan.
        index = max(first_approximate, prefix) // block_size
        salts = (*(s for s in salts if s[0] < index), (index, own))
    if not salts or salts[0][0] > first:
        # Lost rows of P were recomputed: what follows them is no longer what the parent's name stands for.
        salts = ((first, own), *salts)
    return salts


def salt_request(request: Any, salts: Salts) -> None:
    """Rehashes a request so that every salted block's hash, and all that chain on it, are its lineage's own.

    Mutates `request.block_hashes` and `request._block_hasher`; call it once, before the request is scheduled.

    Args:
        request: vLLM's `Request`.
        salts: Ascending `(block index, salt)`.
    """
    hasher = request._block_hasher
    if not salts or hasher is None:  # no prefix caching, nothing is published
        return
    request._block_hasher = _salted(hasher, dict(salts))
    del request.block_hashes[salts[0][0] :]
    request.update_block_hashes()


def _salted(hasher: Callable[[Any], Sequence[Any]], salts: dict[int, bytes]) -> Callable[[Any], list[Any]]:
    """Returns a hasher that salts the given block indices; like vLLM's it returns new hashes and mutates nothing."""

    def hash_new_blocks(request: Any) -> list[Any]:
        first = len(request.block_hashes)
        out: list[Any] = []
        try:
            while True:
                fresh = list(hasher(request))
                at = next((i for i in range(len(fresh)) if first + len(out) + i in salts), None)
                if at is None:
                    out += fresh
                    return out
                block_hash = fresh[at]
                mixed = hashlib.sha256(salts[first + len(out) + at] + bytes(block_hash)).digest()
                part = [*fresh[:at], type(block_hash)(mixed)]
                out += part
                # The wrapped hasher reads its parent hash and its start from `block_hashes`.
                request.block_hashes.extend(part)
        finally:
            del request.block_hashes[first:]

    return hash_new_blocks
