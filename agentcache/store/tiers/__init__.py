"""Tiers of the checkpoint store: memory, disk, Redis, and one over another. No torch, no vLLM.

`open_store` opens one by its URL; `base.KVStore` is the contract and `conformance.check_store` its test.
"""

from agentcache.store.tiers.base import HINT_USES, KVStore, Observer
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, Part, StoredExtent, new_key, payload_checksum
from agentcache.store.tiers.outcomes import (
    Blob,
    GcReport,
    Lost,
    Miss,
    Refused,
    Stored,
    StoreStats,
    VerifyReport,
    VersionInfo,
)
from agentcache.store.tiers.registry import StoreSpec, open_store, parse_store_url, register_store, store_names

__all__ = [
    "HINT_USES",
    "Blob",
    "GcReport",
    "KVStore",
    "Lost",
    "Manifest",
    "Miss",
    "ObjectEntry",
    "Observer",
    "Part",
    "Refused",
    "StoreSpec",
    "StoreStats",
    "Stored",
    "StoredExtent",
    "VerifyReport",
    "VersionInfo",
    "new_key",
    "open_store",
    "parse_store_url",
    "payload_checksum",
    "register_store",
    "store_names",
]
