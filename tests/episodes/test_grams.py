import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.episodes.grams import Side, gram_hashes, heaviest_chain, match_grams


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 40))
def test_equal_grams_have_equal_hashes_and_other_grams_others(ids, k):
    hashes = gram_hashes(np.array(ids, np.int64), k)
    grams = [tuple(ids[i : i + k]) for i in range(max(len(ids) - k + 1, 0))]
    assert len(hashes) == len(grams)
    for (a, x), (b, y) in itertools.combinations(zip(grams, hashes.tolist(), strict=True), 2):
        assert (a == b) == (x == y)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=9))
def test_heaviest_chain_ascends_and_no_chain_is_heavier(items):
    positions, weights = [p for p, _ in items], [w for _, w in items]
    chain = heaviest_chain(positions, weights)
    assert chain == sorted(chain)
    assert all(positions[a] < positions[b] for a, b in itertools.pairwise(chain))
    best = max(
        sum(weights[i] for i in subset)
        for size in range(len(items) + 1)
        for subset in itertools.combinations(range(len(items)), size)
        if all(positions[a] < positions[b] for a, b in itertools.pairwise(subset))
    )
    assert sum(weights[i] for i in chain) == best


def side(grams, gaps=None):
    starts = np.arange(len(grams))
    hashes = np.array(grams, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return Side(starts, hashes, np.zeros(len(grams), np.int64) if gaps is None else np.array(gaps, np.int64))


@pytest.mark.parametrize(
    ("old", "new", "unique", "expected"),
    [
        ([1, 2, 3], [9, 1, 2, 3], True, [(0, 1, 3)]),
        ([1, 1, 2], [1, 2], True, [(2, 1, 1)]),
        ([1, 1, 2], [1, 2], False, [(0, 0, 1), (2, 1, 1)]),
        ([5, 5, 5], [5, 5], False, [(0, 0, 2)]),
        ([1, 2], [3, 4], False, []),
        ([], [3, 4], False, []),
        ([3], [], False, []),
    ],
)
def test_grams_pair_when_unique_or_by_occurrence(old, new, unique, expected):
    runs = match_grams(side(old), side(new), unique=unique)
    assert list(zip(*(a.tolist() for a in runs), strict=True)) == expected


def test_grams_of_different_gaps_never_pair():
    runs = match_grams(side([1, 2, 1], [0, 0, 1]), side([1, 2, 1], [1, 1, 0]), unique=True)
    assert list(zip(*(a.tolist() for a in runs), strict=True)) == [(2, 0, 1), (0, 2, 1)]
