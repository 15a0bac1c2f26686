"""Versions of a tier below, taken into an index: shared objects are shared, refusals change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.store.extents import OBJECT_TOKENS
from agentcache.store.index import Adopted, CheckpointIndex, Refusal, SavePlan, Version
from agentcache.store.version import BlockObject
from agentcache.types import AlignedRun

ROW = 10
Keyed = tuple[Version, list[tuple[str, int, int, int, int]], list[BlockObject]]


def saved(
    index: CheckpointIndex, name: str, tokens: list[int], parent: Version | None = None, keep: int = 0
) -> Version:
    restore = [AlignedRun(0, 0, keep)] if keep else []
    made = index.begin_save(name, "n", "g", parent, tokens, len(tokens), restore, exact_end=len(tokens))
    assert isinstance(made, SavePlan)
    assert index.commit(made.version)
    return made.version


def stored(index: CheckpointIndex, version: Version) -> Keyed:
    """Returns a version as a tier keeps it."""
    blocks = index.objects_of(version)
    keys = {block.object_id: block.key for block in blocks}
    copy = replace(version, extents=(), state="saving", pins=0)
    fresh = [replace(block, object_id=0, users=set(), pinned=0) for block in blocks]
    return copy, [(keys[e.object_id], *e[1:]) for e in version.extents], fresh


def rows(index: CheckpointIndex, version: Version) -> list[tuple[str, int]]:
    """Returns which row of which object each position holds."""
    keys = {block.object_id: block.key for block in index.objects_of(version)}
    return [(keys[e.object_id], e.offset + i) for e in version.extents for i in range(e.length)]


def family() -> tuple[CheckpointIndex, list[Version]]:
    """Returns an index of a version and its descendants, which share rows."""
    index = CheckpointIndex(ROW, 1 << 30)
    first = saved(index, "a", list(range(600)))
    second = saved(index, "b", [*range(300), *range(900, 1000)], first, keep=300)
    third = saved(index, "c", [*range(300), 7, 8], second, keep=300)
    return index, [first, second, third]


@given(st.permutations(range(3)), st.integers(0, 9000), st.data())
@settings(max_examples=200, deadline=None)
def test_adopted_versions_hold_the_rows_that_were_stored(order: list[int], budget: int, data: st.DataObject) -> None:
    source, versions = family()
    target = CheckpointIndex(ROW, budget)
    for number in order:
        version, extents, blocks = stored(source, versions[number])
        here = {block.key for known in target._versions.values() for block in target.objects_of(known)}
        before = target.stats()
        made = target.adopt(version, extents, blocks)
        target.check_integrity()
        if isinstance(made, Refusal):
            assert target.stats() == before | {"refusals": before["refusals"] + 1}
            assert version.extents == ()
            continue
        assert isinstance(made, Adopted)
        assert {key for _, key in made.new} == {block.key for block in blocks} - here
        assert version.state == "saving"
        assert version.pins == 1
        assert rows(target, version) == rows(source, versions[number])
        if data.draw(st.booleans()):
            assert target.commit(version)
            assert target.lookup("n", version.version_id) is version
        else:
            target.abort_save(version)
            assert target.lookup("n", version.version_id) is None
        target.check_integrity()
    target.clear()
    target.check_integrity()
    assert target.stats()["bytes"] == target.stats()["pinned_bytes"] == 0


def test_room_is_made_without_evicting_what_is_shared() -> None:
    source, (first, second, _) = family()
    target = CheckpointIndex(ROW, 600 * ROW + 600 * 4 + 400)
    made = target.adopt(*stored(source, first))
    assert isinstance(made, Adopted)
    assert target.commit(made.version)
    again = target.adopt(*stored(source, second))  # 100 more rows do not fit beside the first version
    assert isinstance(again, Refusal) or first.version_id not in {v.version_id for v in target._versions.values()}
    target.check_integrity()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: replace(block, tokens=OBJECT_TOKENS + 1), "more than 256 rows"),
        (lambda block: replace(block, tokens=block.tokens - 1), "another object of the same key"),
        (lambda block: replace(block, source_position=block.source_position + 1), "another object of the same key"),
    ],
)
def test_objects_that_cannot_be_are_refused(change, reason) -> None:
    source, (first, second, _) = family()
    target = CheckpointIndex(ROW, 1 << 30)
    assert isinstance(target.adopt(*stored(source, first)), Adopted)
    version, extents, blocks = stored(source, second)
    made = target.adopt(version, extents, [change(blocks[0]), *blocks[1:]])
    assert isinstance(made, Refusal)
    assert reason in made.reason
    target.check_integrity()


def test_a_version_that_is_here_is_not_adopted_again() -> None:
    source, (first, *_) = family()
    made = source.adopt(*stored(source, first))
    assert isinstance(made, Refusal)
    assert "here already" in made.reason
    source.check_integrity()


def test_attention_stays_with_its_version() -> None:
    index = CheckpointIndex(ROW, 1 << 30)
    plan = index.begin_save("a", "n", "g", None, [1, 2, 3], 3, (), 3)
    assert isinstance(plan, SavePlan)
    assert index.commit(plan.version, np.array([1, 2, 3], dtype=np.uint8))
    assert plan.version.attention is not None
    assert plan.version.attention.tolist() == [1, 2, 3]
