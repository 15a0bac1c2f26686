"""What must hold in a checkpoint index at any time, recomputed from its extents. For tests and for doubts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.store.extents import merge_extents
from agentcache.store.version import Version

if TYPE_CHECKING:
    from agentcache.store.index import CheckpointIndex

__all__ = ["check_index"]


def check_index(index: CheckpointIndex) -> None:
    """Recomputes references, byte counts and tilings from the extents and compares; raises AssertionError."""
    versions = [*index._versions.values(), *index._doomed]
    users: dict[int, set[Version]] = {}
    for version in versions:
        at = 0
        for extent in version.extents:
            rows = index._objects[extent.object_id].tokens
            assert at <= extent.position < extent.stop <= len(version.token_ids), (version.key, extent)
            assert 0 <= extent.offset < extent.offset + extent.length <= rows, (version.key, extent)
            at = extent.stop
            users.setdefault(extent.object_id, set()).add(version)
        assert 0 <= version.exact_end <= len(version.token_ids), version.key
        assert version.extents == merge_extents(version.extents), version.key
        assert version.pins >= (version.state == "saving"), version.key
    assert users == {block.object_id: block.users for block in index._objects.values()}, "wrong users"
    index._objects.check()
    assert index._token_bytes == sum(version.token_ids.nbytes for version in versions)
    assert index._pinned_token_bytes == sum(version.token_ids.nbytes for version in versions if version.pins)
    assert index._objects.size_bytes + index._token_bytes <= index.budget_bytes, "over budget"
    grouped = [version for group in index._order.groups() for version in group]
    index._order.check()
    assert len(grouped) == len(index._versions), "wrong groups"
    assert all(index._versions[version.key] is version for version in grouped), "wrong groups"
    assert all(version.state != "dropped" for version in grouped), "a dropped version can be found"
    assert all(version.state == "dropped" and version.pins for version in index._doomed), "a leaked version"
