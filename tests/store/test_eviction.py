"""What leaves the checkpoint index and when: evicted for room, dropped, aborted, or kept by a pin."""

from __future__ import annotations

import pytest

from agentcache.store import CheckpointIndex, SavePlan, Version
from agentcache.types import AlignedRun
from tests.store.index_kit import EDITED, OLD, RESTORED, ROW, TOKEN, index, refused, save


def test_the_least_recently_used_group_goes_first_and_its_oldest_version() -> None:
    at = index(350)
    for name, group in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        save(at, name, OLD[:100], group=group)
    at.touch(at.lookup("default", "b1"))
    made = save(at, "c1", OLD[:100], group="c")
    assert [at.lookup("default", name) is None for name in ("a1", "a2", "b1")] == [True, False, False]
    assert made.evicted == (1,)
    assert at.take_dropped() == (1,)
    assert at.stats()["evictions"] == 1


def test_a_group_may_evict_its_own_last_version() -> None:
    at = index(150)
    save(at, "v1", OLD[:100])
    made = save(at, "v2", OLD[:100])
    assert (made.evicted, at.lookup("default", "v1")) == ((1,), None)


def test_an_object_is_freed_with_the_last_version_that_uses_it() -> None:
    at = index()
    first = save(at, "v1", OLD).version
    second = save(at, "v2", EDITED, parent=first, restore=RESTORED).version
    at.drop_version(first)
    at.check_integrity()
    assert at.take_dropped() == ()  # each of its objects still has rows in the second version
    at.drop_version(second)
    assert sorted(at.take_dropped()) == [1, 2, 3, 4, 5]
    assert at.stats()["bytes"] == at.stats()["token_bytes"] == 0


def test_pinned_saving_and_parent_versions_are_not_evicted() -> None:
    at = index(350)
    pinned = save(at, "pinned", OLD[:100], group="a").version
    at.pin(pinned)
    save(at, "saving", OLD[:100], group="b", commit=False)
    parent = save(at, "parent", OLD[:100], group="c").version
    reason = refused(at, "child", OLD[:160], group="d", parent=parent, plan_restore=[AlignedRun(0, 0, 100)])
    assert "open loads and saves use" in reason
    at.unpin(pinned)
    save(at, "child", OLD[:160], group="d", parent=parent, restore=[AlignedRun(0, 0, 100)])
    assert [at.lookup("default", name) is None for name in ("pinned", "saving", "parent")] == [True, False, False]


def test_what_can_never_fit_is_refused_before_anything_is_evicted() -> None:
    at = index(150)
    save(at, "v1", OLD[:100])
    refused(at, "v2", OLD[:151], group="other")
    assert at.stats()["refusals"] == 1


def test_an_empty_budget_refuses_everything() -> None:
    assert "0" in refused(CheckpointIndex(ROW, 0), "v1", [1])


def test_token_ids_count_so_that_versions_without_new_rows_cannot_pile_up() -> None:
    at = CheckpointIndex(ROW, 100 * ROW + 10 * 100 * TOKEN)
    parent = save(at, "v0", OLD[:100]).version
    for turn in range(1, 30):
        parent = save(at, f"v{turn}", OLD[:100], parent=parent, restore=[AlignedRun(0, 0, 100)]).version
    assert at.stats()["versions"] == 10
    assert at.stats()["bytes"] == 100 * ROW


def test_a_dropped_version_lives_until_its_last_pin_but_cannot_be_found() -> None:
    at = index()
    version = save(at, "v1", OLD[:100]).version
    at.pin(version)
    at.drop_version(version)
    at.check_integrity()
    assert (at.lookup("default", "v1"), at.take_dropped(), version.state) == (None, (), "dropped")
    assert len(at.load_plan(version, [AlignedRun(0, 0, 100)])) == 1
    save(at, "v1", OLD[:50])
    at.unpin(version)
    at.check_integrity()
    assert at.take_dropped() == (1,)


def test_clearing_during_a_save_frees_its_objects_when_the_save_ends() -> None:
    at = index()
    saving = save(at, "v1", OLD[:100], commit=False).version
    save(at, "v2", OLD[:100])
    at.clear()
    at.check_integrity()
    assert at.take_dropped() == (2,)
    assert at.commit(saving) is False
    at.check_integrity()
    assert at.take_dropped() == (1,)
    assert at.stats()["objects"] == 0


def test_an_aborted_save_leaves_nothing() -> None:
    at = index()
    saving = save(at, "v1", OLD[:100], commit=False).version
    at.abort_save(saving)
    at.check_integrity()
    assert at.lookup("default", "v1") is None
    assert at.take_dropped() == (1,)


def test_dropping_a_group_drops_its_versions_only() -> None:
    at = index()
    save(at, "a1", OLD[:10], group="a")
    save(at, "a2", OLD[:10], group="a")
    kept = save(at, "b1", OLD[:10], group="b").version
    at.drop_group("default", "a")
    at.drop_group("default", "nobody")
    at.check_integrity()
    assert at.take_dropped() == (1, 2)
    assert at.lookup("default", "b1") is kept


def test_misused_pins_are_broken_invariants() -> None:
    at = index()
    version = save(at, "v1", OLD[:10]).version
    with pytest.raises(AssertionError, match="is not pinned"):
        at.unpin(version)
    with pytest.raises(AssertionError, match="is committed already"):
        at.commit(version)
    at.drop_version(version)
    with pytest.raises(AssertionError, match="was dropped"):
        at.pin(version)


def test_an_expected_group_is_evicted_after_all_others_until_it_was_resumed() -> None:
    index = CheckpointIndex(ROW, 3 * (100 * ROW + 400))

    def save(name: str) -> Version:
        plan = index.begin_save(name, "n", name, None, list(range(100)), 100, (), 100)
        assert isinstance(plan, SavePlan)
        assert index.commit(plan.version)
        index.check_integrity()
        return plan.version

    first, second = save("a"), save("b")
    save("c")
    index.expect(first)
    index.expect(second)
    save("d")  # "c" is the only one that nobody expects
    assert {v for _, v in index._versions} == {"a", "b", "d"}
    index.touch(first)  # it was resumed
    save("e")
    assert {v for _, v in index._versions} == {"a", "b", "e"}
    save("f")
    assert {v for _, v in index._versions} == {"b", "e", "f"}
    save("g")
    index.expect(index.lookup("n", "f"))  # type: ignore[arg-type]
    index.expect(index.lookup("n", "g"))  # type: ignore[arg-type]
    save("h")  # all are expected: the least recently used one goes
    assert {v for _, v in index._versions} == {"f", "g", "h"}
