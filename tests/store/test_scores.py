"""Scores as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from agentcache.store.scores import decode_scores, encode_scores

SMALLEST = 2 ** (-254 / 15)
HALF_A_STEP = 2 ** (0.5 / 15) - 1


@given(arrays.arrays(np.float32, st.integers(0, 50), elements=st.floats(0, 1, width=32)))
def test_a_score_comes_back_within_half_a_step(scores):
    back = decode_scores(encode_scores(scores))
    assert back.dtype == np.float32
    large = scores >= SMALLEST
    assert back[large] == pytest.approx(scores[large], rel=1.01 * HALF_A_STEP)
    assert (back[~large] <= SMALLEST * 1.001).all()


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=30))
def test_codes_keep_the_order_of_scores(scores):
    codes = encode_scores(sorted(scores)).astype(int)
    assert (np.diff(codes) >= 0).all()


def test_every_code_comes_back_as_itself():
    codes = np.arange(256, dtype=np.uint8)
    assert encode_scores(decode_scores(codes)).tolist() == codes.tolist()
    assert (np.diff(decode_scores(codes)) > 0).all()


def test_zero_and_one_are_exact():
    assert decode_scores(encode_scores([0.0, 1.0])).tolist() == [0.0, 1.0]
    assert encode_scores([0.0, 1.0]).tolist() == [0, 255]


def test_what_lies_outside_is_clipped_and_what_is_no_number_counts_as_one():
    assert encode_scores([-1.0, 7.0, np.inf, -np.inf, np.nan]).tolist() == [0, 255, 255, 0, 255]


def test_the_shape_stays():
    assert encode_scores(np.zeros((2, 3))).shape == (2, 3)
    assert decode_scores(np.zeros((2, 3), dtype=np.uint8)).shape == (2, 3)
