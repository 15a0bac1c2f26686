"""Compositions: several versions read as one, with rows at their places, and saved from like a parent."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.episodes.diff import find_spans
from agentcache.store import CheckpointIndex, Refusal, SavePlan, Version
from agentcache.store.compose import GAP, Composition, compose
from agentcache.store.extents import merge_extents
from agentcache.types import AlignedRun, Run

ROW = 10
TEXT = {
    name: list(range(start, start + length))
    for name, start, length in [("p", 0, 300), ("a", 1000, 280), ("b", 2000, 40)]
}


def saved(index: CheckpointIndex, name: str, tokens: list[int], **more: object) -> Version:
    made = index.begin_save(name, "n", name, None, tokens, len(tokens), (), len(tokens), **more)  # type: ignore[arg-type]
    assert isinstance(made, SavePlan)
    assert index.commit(made.version)
    return made.version


@dataclass
class Shelf:
    """An index with a parent and two chunks."""

    index: CheckpointIndex
    p: Version
    a: Version
    b: Version

    def compose(self) -> Composition:
        return compose(self.p, [self.a, self.b])


@pytest.fixture
def shelf() -> Shelf:
    index = CheckpointIndex(ROW, 1 << 20)
    return Shelf(index, *(saved(index, name, tokens) for name, tokens in TEXT.items()))


def cells(index: CheckpointIndex, version: Version) -> dict[int, tuple[int, int]]:
    """Returns the object and its row that each position holds."""
    return {e.position + i: (e.object_id, e.offset + i) for e in version.extents for i in range(e.length)}


def test_a_base_alone_is_itself(shelf):
    composition = compose(shelf.p)
    assert composition.view() is shelf.p
    assert (composition.base, composition.sources, composition.versions) == (shelf.p, (), (shelf.p,))
    assert compose(shelf.p, [shelf.p]).view() is shelf.p


def test_parts_follow_the_base_behind_gaps(shelf):
    composition = shelf.compose()
    view = composition.view()
    assert view.token_ids.tolist() == [*TEXT["p"], GAP, *TEXT["a"], GAP, *TEXT["b"]]
    assert not view.token_ids.flags.writeable
    assert view.missing() == (Run(300, 301), Run(581, 582))
    assert view.extents == merge_extents(view.extents)
    assert (view.exact_end, view.version_id, view.namespace, view.state) == (300, "p", "n", "committed")
    assert composition.source_start == 301
    held = cells(shelf.index, view)
    for version, offset in ((shelf.p, 0), (shelf.a, 301), (shelf.b, 582)):
        assert {at + offset: cell for at, cell in cells(shelf.index, version).items()}.items() <= held.items()


def test_a_version_that_is_named_twice_is_one_part(shelf):
    assert compose(shelf.p, [shelf.b, shelf.p, shelf.b]).versions == (shelf.p, shelf.b)


def test_a_prompt_that_is_the_composition_has_the_bases_prefix_and_no_more(shelf):
    """Without the gap, an append of a chunk's text to its parent would look like one exact prefix."""
    view = compose(shelf.p, [shelf.a]).view()
    prompt = [*TEXT["p"], *TEXT["a"]]
    (span,) = find_spans(view.token_ids, prompt, [Run(300, 580)])
    assert span == (301, 300, 280)
    (made,) = [
        shelf.index.begin_save(
            "c", "n", "c", view, prompt, 580, [AlignedRun(0, 0, 300), span], 300, (), [shelf.p, shelf.a]
        )
    ]
    assert isinstance(made, SavePlan)
    assert made.new == ()
    assert [(e.position, e.generation) for e in made.version.extents] == [(0, 0), (256, 0), (300, 1), (556, 1)]
    assert shelf.index.trusted_end(made.version) == 300
    shelf.index.commit(made.version)
    shelf.index.check_integrity()


def test_a_chunk_that_stands_where_it_was_computed_is_no_exact_row(shelf):
    """Nor when the lengths agree by chance: another context stands before it."""
    chunk = saved(shelf.index, "c", [*range(5000, 5300), *range(6000, 6050)])
    view = compose(shelf.p, [chunk]).view()
    prompt = [*TEXT["p"], *range(6000, 6050)]
    (span,) = find_spans(view.token_ids, prompt, [Run(300, 350)])
    (load,) = shelf.index.load_plan(view, [span])
    assert (load.position, load.shift) == (300, 0)
    made = shelf.index.begin_save(
        "d", "n", "d", view, prompt, 350, [AlignedRun(0, 0, 300), span], 300, (), [shelf.p, chunk]
    )
    assert isinstance(made, SavePlan)
    assert shelf.index.trusted_end(made.version) == 300
    shelf.index.commit(made.version)


def test_the_rows_of_a_dropped_part_are_missing_and_the_others_stay(shelf):
    composition = shelf.compose()
    shelf.index.pin(shelf.a)
    shelf.index.drop_version(shelf.a)
    view = composition.view()
    assert view.missing() == (Run(300, 582),)
    assert view.state == "committed"
    shelf.index.unpin(shelf.a)
    for version in (shelf.p, shelf.b):
        shelf.index.drop_version(version)
    assert composition.view().state == "dropped"
    assert composition.view().extents == ()


def test_a_part_that_is_being_saved_makes_the_whole_wait(shelf):
    made = shelf.index.begin_save("s", "n", "s", None, [7] * 20, 20, (), 20)
    assert isinstance(made, SavePlan)
    composition = compose(shelf.p, [made.version])
    assert composition.view().state == "saving"
    shelf.index.commit(made.version)
    assert composition.view().state == "committed"


def test_only_used_sources_are_kept_and_keep_their_places(shelf):
    composition = shelf.compose()
    whole = composition.view()
    used = composition.used_by([AlignedRun(0, 0, 100), AlignedRun(590, 100, 20)])
    assert used.versions == (shelf.p, shelf.b)
    assert used.token_ids is whole.token_ids
    part = used.view()
    assert part.missing() == (Run(300, 582),)
    assert {*part.extents} < {*whole.extents}
    assert composition.used_by([AlignedRun(580, 0, 1)]).versions == (shelf.p, shelf.a)
    assert composition.used_by([]).versions == (shelf.p,)


def test_attention_is_known_when_it_is_of_every_part(shelf):
    assert shelf.compose().view().attention is None
    for number, version in enumerate((shelf.p, shelf.a)):
        version.attention = np.full(len(version.token_ids), 10 + number, dtype=np.uint8)
    assert shelf.compose().view().attention is None, "what was not measured is not guessed"
    codes = compose(shelf.p, [shelf.a]).view().attention
    assert codes is not None
    assert codes.tolist() == [10] * 300 + [0] + [11] * 280


def test_a_save_is_refused_with_nothing_changed_and_pins_taken_back(shelf):
    view = shelf.compose().view()
    shelf.index.budget_bytes = shelf.index.stats()["bytes"] + shelf.index.stats()["token_bytes"]
    before = shelf.index.stats()
    prompt = [*TEXT["b"], *range(9000, 9600)]
    made = shelf.index.begin_save(
        "x", "n", "x", view, prompt, 640, [AlignedRun(582, 0, 40)], 0, (), [shelf.p, shelf.a, shelf.b]
    )
    assert isinstance(made, Refusal)
    assert shelf.index.stats() == before | {"refusals": 1}
    shelf.index.check_integrity()


def test_making_room_spares_the_sources(shelf):
    view = compose(shelf.p, [shelf.b]).view()
    shelf.index.budget_bytes = shelf.index.stats()["bytes"] + shelf.index.stats()["token_bytes"]
    prompt = [*TEXT["b"], *range(9000, 9100)]
    made = shelf.index.begin_save("x", "n", "x", view, prompt, 140, [AlignedRun(301, 0, 40)], 0, (), [shelf.p, shelf.b])
    assert isinstance(made, SavePlan)
    assert shelf.a.state == "dropped"
    assert (shelf.p.state, shelf.b.state) == ("committed", "committed")
    shelf.index.commit(made.version)
    shelf.index.check_integrity()


@given(
    lengths=st.lists(st.integers(1, 320), min_size=1, max_size=5),
    spans=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(1, 200), st.integers(0, 9)), max_size=6
    ),
    lost=st.sets(st.integers(1, 8), max_size=2),
    dropped=st.sets(st.integers(0, 4), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_rows_are_loaded_and_shared_as_their_own_versions_hold_them(lengths, spans, lost, dropped):
    index = CheckpointIndex(ROW, 1 << 20)
    versions = [saved(index, f"v{i}", list(range(1000 * i, 1000 * i + n))) for i, n in enumerate(lengths)]
    composition = compose(versions[0], versions[1:])
    restore: list[AlignedRun] = []
    prompt: list[int] = []
    for number, start, length, fresh in spans:  # any rows, in any order, also twice
        if number >= len(versions) or start >= lengths[number]:
            continue
        prompt += range(900_000 + len(prompt), 900_000 + len(prompt) + fresh)
        length = min(length, lengths[number] - start)
        restore.append(AlignedRun(composition.parts[number].offset + start, len(prompt), length))
        prompt += range(1000 * number + start, 1000 * number + start + length)
    prompt += [1_000_000]
    used = composition.used_by(restore)
    for version in used.versions:
        index.pin(version)
    index.lose_objects(lost)
    for number in dropped & set(range(len(versions))):
        index.drop_version(versions[number])
    view = used.view()
    assert (view is versions[0]) == (len(used.parts) == 1), (
        "a base alone is itself, and its state says what became of it"
    )
    assert all(a.stop <= b.position for a, b in pairwise(view.extents))
    origin = {  # the composition's row -> the version's own row
        part.offset + at: cell
        for part in used.parts
        if part.version.state != "dropped" or view is part.version
        for at, cell in cells(index, part.version).items()
    }
    want = {run.new_start + i: origin.get(run.old_start + i) for run in restore for i in range(run.length)}
    got: dict[int, tuple[int, int]] = {}
    for object_id, offset, length, position, shift in index.load_plan(view, restore):
        assert shift == position - (index._objects[object_id].source_position + offset)
        got |= {position + i: (object_id, offset + i) for i in range(length)}
    assert got == {at: cell for at, cell in want.items() if cell is not None}

    alive = [version for version in used.versions if version.state != "dropped"]
    if view.state == "committed":
        made = index.begin_save("child", "n", "g", view, prompt, len(prompt), restore, 0, (), alive)
        assert isinstance(made, SavePlan)
        child = made.version
        assert got.items() <= cells(index, child).items(), "shared, not gathered"
        assert {at for _, start, stop in made.new for at in range(start, stop)} == set(range(len(prompt))) - set(got)
        assert all(e.generation == 1 for e in child.extents if e.position in got and restore[0][:2] != (0, 0))
        assert index.commit(child)
        index.check_integrity()
    for version in used.versions:
        index.unpin(version)
    index.check_integrity()
    assert index.stats()["pinned_bytes"] == 0
