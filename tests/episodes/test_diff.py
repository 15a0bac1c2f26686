import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentcache.episodes import diff as diff_module
from agentcache.episodes.diff import MIN_MOVE, MIN_RUN, diff_tokens
from agentcache.errors import ConfigError
from agentcache.types import AlignedRun

# Few distinct tokens and repeated pieces: where hashing diffs go wrong.
pieces = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), max_size=12),
        st.builds(lambda token, times: [token] * times, st.integers(0, 2), st.integers(0, 80)),
        st.builds(lambda unit, times: unit * times, st.lists(st.integers(0, 2), max_size=5), st.integers(0, 20)),
        st.builds(lambda start, length: list(range(start, start + length)), st.integers(10, 60), st.integers(0, 60)),
    ),
    max_size=7,
).map(lambda parts: [token for part in parts for token in part])


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check(old, new, diff, min_run=MIN_RUN, min_move=MIN_MOVE):
    """Checks what must hold for any two sequences and returns the diff."""
    assert (diff.old_len, diff.new_len) == (len(old), len(new))
    prefix = common_prefix(old, new)
    assert diff.prefix == prefix
    for run in diff.aligned:
        assert list(old[run.old_start : run.old_stop]) == list(new[run.new_start : run.new_stop])
    for a, b in itertools.pairwise(diff.aligned):
        assert a.new_stop <= b.new_start
        assert (a.old_stop, a.new_stop) != (b.old_start, b.new_start), "two runs that should be one"
    for a, b in itertools.pairwise(sorted(diff.aligned)):
        assert a.old_stop <= b.old_start
    assert all(run.length >= min_run for run in diff.suffix)
    fresh = [list(new[a:b]) for a, b in diff.fresh]
    assert diff.apply(list(old), fresh) == list(new)
    suffix = common_prefix(list(old)[prefix:][::-1], list(new)[prefix:][::-1])
    if suffix >= min_run:
        last = diff.aligned[-1]
        assert (last.old_stop, last.new_stop) == (len(old), len(new))
        assert last.length >= suffix
    return diff


@given(pieces, pieces)
@settings(max_examples=300)
@example([], [])
@example([1], [])
@example([], [1])
@example([7] * 200, [7] * 130)
def test_any_two_sequences_give_a_valid_diff(old, new):
    check(old, new, diff_tokens(old, new))


@given(pieces, pieces, pieces, pieces, pieces)
@settings(max_examples=200)
def test_pieces_shared_in_any_order_give_a_valid_diff(a, b, c, d, e):
    check(a + b + c + d, a + c + e + b + d, diff_tokens(a + b + c + d, a + c + e + b + d))


@given(pieces, pieces, st.integers(1, 12), st.integers(0, 30))
@settings(max_examples=100)
def test_minimum_lengths_are_respected(old, new, min_run, more):
    min_move = min_run + more
    diff = check(old, new, diff_tokens(old, new, min_run=min_run, min_move=min_move), min_run)
    short = [run.old_start for run in diff.suffix if run.length < min_move]
    assert short == sorted(short), "a span in another order is shorter than min_move"


@given(pieces, pieces, pieces, pieces)
@settings(max_examples=200)
def test_prefix_and_suffix_of_a_single_edit_are_maximal(head, removed, added, tail):
    old, new = head + removed + tail, head + added + tail
    diff = check(old, new, diff_tokens(old, new))
    assert diff.prefix >= len(head)
    rest = min(len(old), len(new)) - diff.prefix
    if min(len(tail), rest) >= MIN_RUN:
        assert diff.aligned[-1].new_stop == len(new)
        assert diff.aligned[-1].length >= min(len(tail), rest)


@st.composite
def edit_scripts(draw):
    """Kept, deleted and inserted spans over distinct tokens: the aligned runs are then known exactly."""
    ops = draw(st.lists(st.tuples(st.sampled_from("kdi"), st.integers(1, 90)), max_size=14))
    old, new, kept = [], [], []
    token = itertools.count()
    for op, length in ops:
        tokens = list(itertools.islice(token, length))
        if op == "k":
            if kept and (kept[-1].old_stop, kept[-1].new_stop) == (len(old), len(new)):
                kept[-1] = kept[-1]._replace(length=kept[-1].length + length)
            else:
                kept.append(AlignedRun(len(old), len(new), length))
        old += tokens if op in "kd" else []
        new += tokens if op in "ki" else []
    return old, new, kept


@given(edit_scripts())
@settings(max_examples=200)
def test_an_edit_script_over_distinct_tokens_is_recovered_exactly(script):
    old, new, kept = script
    expected = [run for run in kept if run.length >= MIN_RUN or (run.old_start, run.new_start) == (0, 0)]
    assert list(check(old, new, diff_tokens(old, new)).aligned) == expected


@given(st.lists(st.integers(MIN_MOVE, 120), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_every_moved_span_of_min_move_tokens_is_found(lengths, random):
    token = itertools.count()
    blocks = [list(itertools.islice(token, length)) for length in lengths]
    old = [t for block in blocks for t in block]
    random.shuffle(blocks)
    new = [t for block in blocks for t in [*block, 10**6 + block[0]]]
    diff = check(old, new, diff_tokens(old, new))
    assert [b - a for a, b in diff.fresh] == [1] * len(blocks)


def test_moved_spans_below_min_move_are_recomputed():
    a, b = list(range(100)), list(range(100, 100 + MIN_MOVE - 1))
    assert diff_tokens([-1, *b, *a], [-2, *a, *b]).aligned == (AlignedRun(MIN_MOVE, 1, 100),)
    assert len(diff_tokens([-1, *b, 131, *a], [-2, *a, *b, 131]).aligned) == 2


def test_confetti_is_recomputed_but_the_prefix_is_kept_whatever_its_length():
    shared = list(range(MIN_RUN - 1))
    assert diff_tokens([500, *shared, 501], [600, *shared, 601]).aligned == ()
    assert diff_tokens([500, *shared, 99, 501], [600, *shared, 99, 601]).aligned == (AlignedRun(1, 1, MIN_RUN),)
    assert diff_tokens([1, 2, 3], [1, 9]).aligned == (AlignedRun(0, 0, 1),)


def test_middle_replaced_and_new_turn_appended_keeps_the_whole_suffix():
    rng = np.random.default_rng(0)
    head, middle, other, tail, turn = (rng.integers(0, 50_000, n) for n in (400, 90, 130, 900, 60))
    diff = diff_tokens(np.concatenate([head, middle, tail]), np.concatenate([head, other, tail, turn]))
    assert diff.aligned == (AlignedRun(0, 0, 400), AlignedRun(490, 530, 900))
    assert (diff.aligned_end, diff.fresh[-1]) == (1430, (1430, 1490))


def test_an_appended_prompt_is_an_append_even_when_it_repeats_itself():
    old = list(range(300))
    diff = diff_tokens(old, old + old)
    assert diff.is_append
    assert diff.aligned == (AlignedRun(0, 0, 300),)


@pytest.mark.parametrize("k", [8, 32])
def test_hash_collisions_never_yield_a_wrong_run(monkeypatch, k):
    monkeypatch.setattr(diff_module, "gram_hashes", lambda ids, k: np.zeros(max(len(ids) - k + 1, 0), np.uint64))
    rng = np.random.default_rng(k)
    old, new = rng.integers(0, 4, 400), rng.integers(0, 4, 430)
    new[60:200] = old[90:230]
    check(old.tolist(), new.tolist(), diff_tokens(old, new, min_run=k))


@pytest.mark.parametrize("kind", ["lists", "int32", "int64", "uint32"])
def test_sequences_and_arrays_give_the_same_plain_ints(kind):
    old, new = list(range(50)), [*range(20), 99, *range(21, 50)]
    pair = (old, new) if kind == "lists" else (np.array(old, kind), np.array(new, kind))
    diff = diff_tokens(*pair)
    assert diff.aligned == (AlignedRun(0, 0, 20), AlignedRun(21, 21, 29))
    assert all(type(value) is int for run in diff.aligned for value in run)


def test_arrays_are_left_as_they_were():
    old, new = np.arange(200), np.arange(50, 250)
    diff_tokens(old, new)
    assert (old == np.arange(200)).all()
    assert (new == np.arange(50, 250)).all()


@pytest.mark.parametrize("arguments", [{"min_run": 0}, {"min_run": 9, "min_move": 8}])
def test_minimums_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match="1 <= min_run <= min_move"):
        diff_tokens([1], [2], **arguments)


@pytest.mark.parametrize("ids", ["text", [[1, 2]], [0.5]])
def test_what_is_no_flat_integer_sequence_is_refused(ids):
    with pytest.raises(ConfigError, match="flat sequence of integers"):
        diff_tokens(ids, [1])
