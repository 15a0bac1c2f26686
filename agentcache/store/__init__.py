"""Checkpoints: the block index of the scheduler and the payloads of the workers. This face needs no torch."""

from agentcache.store.extents import Extent, LoadExtent, NewObject
from agentcache.store.index import CheckpointIndex
from agentcache.store.version import BlockObject, IndexStats, Refusal, SavePlan, Version

__all__ = [
    "BlockObject",
    "CheckpointIndex",
    "Extent",
    "IndexStats",
    "LoadExtent",
    "NewObject",
    "Refusal",
    "SavePlan",
    "Version",
]
