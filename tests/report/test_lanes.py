"""The graph of versions: lines that never meet in one lane."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcache.report.lanes import Lane, lay_lanes


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[str, str | None, str]]:
    """Versions whose parents come before them; few episodes."""
    versions: list[tuple[str, str | None, str]] = []
    for at in range(draw(st.integers(1, 25))):
        parent = None if at == 0 else draw(st.sampled_from([*range(at), None]))
        episode = draw(st.sampled_from("abc"))
        versions.append((f"v{at}", None if parent is None else f"v{parent}", episode))
    return versions


def test_a_line_stays_in_its_lane() -> None:
    lanes = lay_lanes([("a", None, "e"), ("b", "a", "e"), ("c", "b", "e")])
    assert lanes["a"] == Lane(0, above=False, below=True, through=(), forks=(), fork=False)
    assert lanes["b"] == Lane(0, above=True, below=True, through=(), forks=(), fork=False)
    assert lanes["c"] == Lane(0, above=True, below=False, through=(), forks=(), fork=False)


def test_a_fork_leaves_to_the_side_and_the_own_episode_goes_on_straight() -> None:
    lanes = lay_lanes([("a", None, "e"), ("f", "a", "fork"), ("b", "a", "e")])
    assert lanes["a"].forks == (1,) and lanes["a"].below
    assert lanes["f"] == Lane(1, above=True, below=False, through=(0,), forks=(), fork=True)
    assert lanes["b"] == Lane(0, above=True, below=False, through=(), forks=(), fork=False)


def test_a_lane_that_has_ended_is_taken_again() -> None:
    rows = [("a", None, "e"), ("f", "a", "f"), ("b", "a", "e"), ("g", "b", "g"), ("c", "b", "e")]
    assert {name: lane.lane for name, lane in lay_lanes(rows).items()} == {"a": 0, "f": 1, "b": 0, "g": 1, "c": 0}


def test_a_parent_that_is_not_in_the_log_is_none() -> None:
    lanes = lay_lanes([("a", "gone", "e")])
    assert not lanes["a"].above and not lanes["a"].fork


@given(trees())
def test_no_two_lines_share_a_lane_in_a_row(versions: list[tuple[str, str | None, str]]) -> None:
    lanes = lay_lanes(versions)
    parents = {version: parent for version, parent, _ in versions if parent is not None}
    for lane in lanes.values():
        assert lane.lane not in lane.through and len(set(lane.through)) == len(lane.through)
        assert not {*lane.forks} & {lane.lane, *lane.through} and len({*lane.forks}) == len(lane.forks)
    assert sum(len(lane.forks) for lane in lanes.values()) == sum(lane.fork for lane in lanes.values())
    assert sum(lane.below for lane in lanes.values()) + sum(lane.fork for lane in lanes.values()) == len(parents)
