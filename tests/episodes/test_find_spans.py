"""Spans of a prompt that stand somewhere in other ids, in any order and any number of times."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentcache.episodes.diff import MIN_SPAN, find_spans
from agentcache.errors import ConfigError
from agentcache.types import AlignedRun, Run, complement

CHUNKS = [list(range(1000 * i, 1000 * i + 100)) for i in range(1, 6)]
SOURCE = [token for chunk in CHUNKS for token in (*chunk, -1)]


def whole(ids):
    return [Run(0, len(ids))]


def test_chunks_are_found_in_another_order_without_their_edges():
    new = [*range(7), *CHUNKS[3][2:99], 8, *CHUNKS[0], *CHUNKS[4][1:], 9, 9]
    found = find_spans(SOURCE, new, whole(new))
    assert found == ((305, 7, 97), (0, 105, 100), (405, 205, 99))


def test_a_chunk_is_found_as_often_as_it_stands_in_the_prompt():
    new = [5, *CHUNKS[1], 6, *CHUNKS[1][:50], 7, *CHUNKS[1][20:]]
    assert find_spans(SOURCE, new, whole(new)) == ((101, 1, 100), (101, 102, 50), (121, 153, 80))


def test_only_the_fresh_runs_are_searched():
    new = [*CHUNKS[0], *CHUNKS[1], *CHUNKS[2]]
    assert find_spans(SOURCE, new, [Run(40, 90), Run(210, 260), Run(280, 290)]) == ((40, 40, 50), (212, 210, 50))
    assert find_spans(SOURCE, new, []) == ()
    assert find_spans(SOURCE, new, [Run(10, 10)]) == ()


def test_what_two_sources_share_goes_with_the_longer_span():
    heading = list(range(50_000, 50_030))
    sources = [*heading, *CHUNKS[0], -1, *heading, *CHUNKS[1]]
    new = [3, *heading, *CHUNKS[1], 4, *heading, *CHUNKS[0]]
    assert find_spans(sources, new, whole(new)) == ((131, 1, 130), (0, 132, 130))


def test_shorter_spans_are_left():
    new = [1, *CHUNKS[0][:MIN_SPAN], 2, *CHUNKS[1][: MIN_SPAN - 1], 3]
    assert find_spans(SOURCE, new, whole(new)) == ((0, 1, MIN_SPAN),)
    assert len(find_spans(SOURCE, new, whole(new), min_span=5)) == 2
    with pytest.raises(ConfigError, match="min_span=0"):
        find_spans(SOURCE, new, whole(new), min_span=0)


few = st.lists(st.integers(0, 2), max_size=40)
rare = st.builds(lambda start, length: list(range(start, start + length)), st.integers(10, 60), st.integers(0, 60))
pieces = st.lists(st.one_of(few, rare), max_size=6).map(lambda parts: [token for part in parts for token in part])


@given(pieces, pieces, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=3))
@settings(max_examples=200)
@example([], [], [])
@example([7] * 90, [7] * 200, [])
def test_spans_hold_equal_tokens_of_the_fresh_runs(source, new, kept):
    fresh = complement(((a, a + n) for a, n in kept), len(new))
    found = find_spans(source, new, fresh, min_span=4)
    allowed = {at for a, b in fresh for at in range(a, b)}
    for span in found:
        assert span.length >= 4
        assert source[span.old_start : span.old_stop] == new[span.new_start : span.new_stop]
        assert allowed.issuperset(range(span.new_start, span.new_stop))
    assert all(a.new_stop <= b.new_start for a, b in itertools.pairwise(found))


@given(st.permutations(range(5)), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=5, max_size=5))
@settings(max_examples=60)
def test_every_long_piece_of_distinct_chunks_is_found_whole(order, cuts):
    new, want = [], []
    for place, (left, right) in zip(order, cuts, strict=True):
        new.append(60_000 + place)
        want.append(AlignedRun(101 * place + left, len(new), 100 - right - left))
        new += CHUNKS[place][left : 100 - right]
    assert find_spans(np.array(SOURCE), np.array(new), whole(new)) == tuple(
        run for run in want if run.length >= MIN_SPAN
    )


def test_repetitive_text_is_searched_in_bounded_work(monkeypatch):
    from agentcache.episodes import diff as module

    rounds = []
    real = module.match_grams
    monkeypatch.setattr(module, "match_grams", lambda *a, **k: rounds.append(len(a[1].starts)) or real(*a, **k))
    for source in ([7] * 20_000, [1, 2] * 10_000):
        rounds.clear()
        new = [5, *source[:9_000], 6, *source[:9_000]]
        found = find_spans(source, new, whole(new))
        assert sum(run.length for run in found) == 18_000
        assert len(rounds) <= 24
