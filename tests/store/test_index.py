"""The checkpoint index: what a version stores, shares and loads, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from agentcache.store import Extent, LoadExtent, NewObject, Version
from agentcache.types import AlignedRun, Run
from tests.store.index_kit import EDITED, OLD, RESTORED, ROW, index, refused, save


def test_a_first_version_becomes_objects_of_at_most_256_rows() -> None:
    made = save(index(), "v1", OLD)
    assert [(new.start, new.stop) for new in made.new] == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert made.version.missing() == ()


def test_a_second_version_stores_only_what_was_computed() -> None:
    at = index()
    first = save(at, "v1", OLD)
    stored = at.stats()["bytes"]
    second = save(at, "v2", EDITED, parent=first.version, restore=RESTORED, exact_end=352)
    assert [(new.start, new.stop) for new in second.new] == [(300, 352)]
    assert at.stats()["bytes"] - stored == 52 * ROW
    assert second.version.missing() == ()


def test_an_object_is_cut_where_exactness_ends() -> None:
    at = index()
    made = save(at, "v1", OLD[:200], exact_end=90)
    assert [(new.start, new.stop) for new in made.new] == [(0, 90), (90, 200)]
    assert [at._objects[new.object_id].exact for new in made.new] == [True, False]


def test_rows_behind_the_edit_grow_a_generation_older_and_those_before_it_do_not() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    second = save(at, "v2", EDITED, parent=first, restore=RESTORED).version
    third = save(at, "v3", [*EDITED, 7], parent=second, restore=[AlignedRun(0, 0, len(EDITED))]).version
    fourth_ids = [9, *EDITED]
    fourth = save(at, "v4", fourth_ids, parent=third, restore=[AlignedRun(0, 1, len(EDITED))]).version

    def generations(version: Version, row: int) -> int:
        return next(e.generation for e in version.extents if e.position <= row < e.stop)

    assert [generations(v, 100) for v in (first, second, third)] == [0, 0, 0]
    assert [generations(v, 500) for v in (first, second, third)] == [0, 1, 1]
    assert (generations(fourth, 101), generations(fourth, 501), generations(fourth, 0)) == (1, 2, 0)


def test_rows_behind_an_edit_of_equal_length_age_though_they_did_not_move() -> None:
    at = index()
    first = save(at, "v1", OLD[:100]).version
    replaced = [*OLD[:50], 7, 7, *OLD[52:100]]
    restore = [AlignedRun(0, 0, 50), AlignedRun(52, 52, 48)]
    child = save(at, "v2", replaced, parent=first, restore=restore).version
    assert child.extents == (Extent(1, 0, 50, 0, 0), Extent(2, 0, 2, 50, 0), Extent(1, 52, 48, 52, 1))


def test_a_load_names_the_source_rows_and_turns_keys_once_from_where_they_were_computed() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    second = save(at, "v2", EDITED, parent=first, restore=RESTORED).version
    shifted = [AlignedRun(952, 950, 58)]
    assert at.load_plan(second, shifted) == [LoadExtent(4, 174, 58, 950, 8)]  # computed at 942 in v1, +10 in v2, -2 now


def test_a_load_starts_where_vllm_has_no_rows_of_its_own() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    restore = (AlignedRun(0, 0, 300), AlignedRun(310, 320, 20))
    assert at.load_plan(first, restore, 280) == [LoadExtent(2, 24, 20, 280, 0), LoadExtent(2, 54, 20, 320, 10)]
    assert at.load_plan(first, restore, 330) == [LoadExtent(2, 64, 10, 330, 10)]
    assert at.load_plan(first, restore, 340) == []


def test_rows_without_kv_are_missing() -> None:
    made = save(index(), "v1", OLD, computed=999)
    assert made.version.missing() == (Run(999, 1000),)


def test_lost_objects_leave_missing_rows_in_every_version_that_used_them() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    second = save(at, "v2", EDITED, parent=first, restore=RESTORED).version
    other = save(at, "w", OLD[:10], group="other").version
    assert at.lose_objects([2, 404]) == [first, second]
    at.check_integrity()
    assert first.missing() == (Run(256, 512),)
    assert second.missing() == (Run(256, 300), Run(352, 522))
    assert other.missing() == ()
    assert at.take_dropped() == (2,)
    assert at.load_plan(first, [AlignedRun(0, 0, 1000)]) == [
        LoadExtent(1, 0, 256, 0, 0),
        LoadExtent(3, 0, 256, 512, 0),
        LoadExtent(4, 0, 232, 768, 0),
    ]


def test_a_row_that_was_lost_before_the_save_is_stored_anew() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    at.lose_objects([2])
    second = save(at, "v2", EDITED, parent=first, restore=RESTORED)
    assert [(new.start, new.stop) for new in second.new] == [(256, 512), (512, 522)]
    assert second.version.missing() == ()


def test_other_namespaces_see_nothing_and_may_use_the_same_ids() -> None:
    at = index()
    mine = save(at, "v1", OLD).version
    assert at.lookup("other", "v1") is None
    theirs = save(at, "v1", OLD, namespace="other").version
    assert (at.lookup("default", "v1"), at.lookup("other", "v1")) == (mine, theirs)
    at.drop_group("other", "episode")
    assert at.lookup("default", "v1") is mine


def test_a_child_in_another_namespace_than_its_parent_is_a_broken_invariant() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    with pytest.raises(AssertionError, match="of another namespace than 'other'"):
        save(at, "v2", OLD, namespace="other", parent=first, restore=[AlignedRun(0, 0, 1000)])


def test_a_version_is_created_once() -> None:
    at = index()
    save(at, "v1", OLD, commit=False)
    assert "version 'v1' exists already" in refused(at, "v1", OLD)


def test_rows_cannot_be_shared_with_a_parent_that_is_not_stored_yet() -> None:
    at = index()
    parent = save(at, "v1", OLD, commit=False).version
    reason = refused(at, "v2", OLD, parent=parent, plan_restore=[AlignedRun(0, 0, 1000)])
    assert "'v1', whose rows it shares, was dropped or is not saved yet" in reason


def test_rows_cannot_be_shared_with_a_dropped_parent_though_its_id_is_in_use_again() -> None:
    at = index()
    parent = save(at, "v1", OLD).version
    at.pin(parent)
    at.drop_version(parent)
    save(at, "v1", OLD)
    reason = refused(at, "v2", OLD, parent=parent, plan_restore=[AlignedRun(0, 0, 1000)])
    assert "'v1', whose rows it shares, was dropped" in reason


def test_a_dropped_parent_is_no_obstacle_when_nothing_is_shared() -> None:
    at = index()
    parent = save(at, "v1", OLD).version
    at.drop_version(parent)
    assert save(at, "v2", OLD, parent=parent).version.parent == "v1"


def test_the_index_keeps_its_own_copy_of_the_tokens() -> None:
    ids = np.arange(10, dtype=np.int32)
    version = save(index(), "v1", ids).version
    ids[0] = 99
    assert version.token_ids[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        version.token_ids[0] = 1


def test_sharing_rows_of_other_tokens_is_a_broken_invariant() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    with pytest.raises(AssertionError, match="have other tokens"):
        save(at, "v2", EDITED, parent=first, restore=[AlignedRun(0, 0, 310)])


def test_integrity_is_really_checked() -> None:
    at = index()
    version = save(at, "v1", OLD[:10]).version
    version.extents = (Extent(1, 0, 9, 0), Extent(1, 0, 1, 9))
    at.check_integrity()  # odd, but every row is there
    for spoiled in (
        (Extent(1, 0, 11, 0),),
        (Extent(1, 0, 5, 0), Extent(1, 5, 5, 4)),
        (),
        (Extent(1, 0, 5, 0), Extent(1, 5, 5, 5)),
    ):
        version.extents = spoiled
        with pytest.raises(AssertionError):
            at.check_integrity()


def test_new_objects_are_never_named_twice() -> None:
    at = index()
    names: list[NewObject] = []
    for _ in range(5):
        made = save(at, "v", OLD[:300])
        names += made.new
        at.drop_version(made.version)
    assert len({new.object_id for new in names}) == len(names) == 10
