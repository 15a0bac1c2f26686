from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcache.store.extents import OBJECT_TOKENS, Extent, cut_objects, merge_extents, overlap, relocate
from agentcache.types import AlignedRun, Run, run_tokens


@st.composite
def extent_lists(draw: st.DrawFn) -> list[Extent]:
    """Draws ascending, disjoint extents with gaps."""
    out, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 4))
        length = draw(st.integers(1, 9))
        out.append(Extent(draw(st.integers(1, 3)), draw(st.integers(0, 5)), length, at, draw(st.integers(0, 2))))
        at += length
    return out


def rows(extents: list[Extent] | tuple[Extent, ...]) -> dict[int, tuple[int, int, int]]:
    """Returns position -> (object, row of the object, generation)."""
    return {e.position + i: (e.object_id, e.offset + i, e.generation) for e in extents for i in range(e.length)}


@given(extents=extent_lists(), start=st.integers(0, 60), length=st.integers(-3, 30))
def test_overlap_is_the_rows_inside(extents: list[Extent], start: int, length: int) -> None:
    parts = list(overlap(extents, start, start + length))
    assert rows(parts) == {at: row for at, row in rows(extents).items() if start <= at < start + length}
    assert all(part.length > 0 for part in parts)


@given(extents=extent_lists())
def test_merging_keeps_every_row_and_leaves_nothing_to_merge(extents: list[Extent]) -> None:
    merged = merge_extents(extents)
    assert rows(merged) == rows(extents)
    assert merge_extents(merged) == merged
    assert merge_extents(reversed(extents)) == merged


def test_pieces_of_one_object_that_continue_each_other_merge() -> None:
    pieces = [Extent(1, 0, 5, 10), Extent(1, 5, 3, 15), Extent(1, 8, 1, 18, 1), Extent(1, 20, 2, 19, 1)]
    assert merge_extents(pieces) == (Extent(1, 0, 8, 10), *pieces[2:])


@given(
    extents=extent_lists(),
    old=st.integers(0, 40),
    new=st.integers(0, 40),
    length=st.integers(1, 30),
    edit=st.integers(0, 50),
)
def test_relocated_rows_move_by_the_shift_and_age_behind_the_edit(
    extents: list[Extent], old: int, new: int, length: int, edit: int
) -> None:
    before, expected = rows(extents), {}
    for i in range(length):
        if old + i in before:
            object_id, row, generation = before[old + i]
            stays = old == new < edit
            expected[new + i] = (object_id, row, generation if stays else generation + 1)
    assert rows(list(relocate(extents, [AlignedRun(old, new, length)], edit))) == expected


@given(
    runs=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 900)), max_size=4).map(
        lambda pairs: [Run(a, a + n) for a, n in pairs]
    ),
    exact_end=st.integers(0, 3000),
)
def test_objects_tile_their_runs_and_are_short_and_of_one_kind(runs: list[Run], exact_end: int) -> None:
    cut = list(cut_objects(runs, exact_end))
    assert [row for run in cut for row in range(*run)] == [row for run in runs for row in range(*run)]
    assert all(0 < run.stop - run.start <= OBJECT_TOKENS for run in cut)
    assert not any(run.start < exact_end < run.stop for run in cut)
    assert len(cut) <= sum(-(-run_tokens([run]) // OBJECT_TOKENS) + 1 for run in runs)
