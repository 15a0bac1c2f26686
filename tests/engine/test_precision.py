"""Which block of a mixed checkpoint is stored how: the arithmetic, without an engine."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from agentcache.config import Precision
from agentcache.engine import precision
from agentcache.engine.precision import (
    ALPHA,
    EXACT_RISK,
    LOW_BIT_RESIDUAL,
    LOW_RISK,
    SINK_TOKENS,
    Thresholds,
    block_risk,
    block_tags,
    known_precisions,
    normalised_attention,
    tagged_sources,
)
from agentcache.kernels import BLOCK, Source, Tag

scores = st.floats(0, 1, width=32)


@st.composite
def rows(draw, most=300):
    """Attention and residual of some rows."""
    count = draw(st.integers(1, most))
    return tuple(draw(arrays.arrays(np.float32, count, elements=scores)) for _ in range(2))


def block_of(attention=0.0, residual=0.1, count=BLOCK):
    return [np.full(count, x, dtype=np.float32) for x in (attention, residual)]


def test_the_largest_row_that_is_no_sink_sets_the_scale():
    mass = np.array([0.5, 0.1, 0.0, 0.0, 0.02, 0.04, 0.01])
    assert normalised_attention(mass).tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.5, 1.0, 0.25])


@pytest.mark.parametrize("count", range(1, SINK_TOKENS + 1))
def test_a_version_of_sinks_alone_is_scaled_by_them(count):
    assert normalised_attention(np.linspace(0.2, 0.8, count)).max() == 1.0


def test_attention_of_nothing_on_anything_is_zero():
    assert normalised_attention(np.zeros(9)).tolist() == [0.0] * 9
    assert normalised_attention(np.zeros(0)).tolist() == []


@given(arrays.arrays(np.float32, st.integers(SINK_TOKENS + 1, 99), elements=scores))
def test_normalised_attention_keeps_the_order_of_rows_that_are_no_sinks(mass):
    out = normalised_attention(mass)
    assert out.dtype == np.float32
    assert ((out >= 0) & (out <= 1)).all()
    order = np.argsort(mass[SINK_TOKENS:])
    assert (np.diff(out[SINK_TOKENS:][order]) >= 0).all()


@given(rows(), st.sampled_from([0.0, 0.3, ALPHA, 1.0]))
def test_risk_is_that_of_the_paper(drawn, alpha):
    attention, residual = drawn
    risk = attention.astype(np.float64) * residual
    want = [
        alpha * risk[at : at + BLOCK].max() + (1 - alpha) * risk[at : at + BLOCK].mean()
        for at in range(0, len(risk), BLOCK)
    ]
    assert block_risk(attention, residual, alpha) == pytest.approx(np.array(want), rel=1e-5, abs=1e-30)


@given(
    rows(),
    st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)).map(sorted),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.floats(0, 1, width=32),
)
def test_tags_are_those_of_the_paper(drawn, taus, alpha, limit):
    attention, residual = drawn
    thresholds = Thresholds(tau_low=taus[0], tau_high=taus[1], alpha=alpha, low_bit_residual=limit)
    worst = [float(residual[at : at + BLOCK].max()) for at in range(0, len(residual), BLOCK)]
    want = []
    for risk, most in zip(block_risk(attention, residual, alpha).tolist(), worst, strict=True):
        if risk >= taus[1]:
            want.append(Tag.EXACT)
        elif risk >= taus[0] or most > limit:
            want.append(Tag.K8V8)
        else:
            want.append(Tag.K8V4)
    assert block_tags(attention, residual, thresholds) == want


def test_one_fragile_row_makes_its_block_risky():
    attention, residual = block_of()
    attention[7] = 1.0
    assert block_risk(attention, residual) == pytest.approx([(ALPHA + (1 - ALPHA) / BLOCK) * 0.1])
    assert block_tags(attention, residual) == [Tag.EXACT]


def test_tags_follow_the_thresholds():
    residual = 0.1
    cases = {0.0: Tag.K8V4, 0.9 * LOW_RISK: Tag.K8V4, 1.1 * LOW_RISK: Tag.K8V8, 0.9 * EXACT_RISK: Tag.K8V8}
    cases |= {1.1 * EXACT_RISK: Tag.EXACT}
    for risk, tag in cases.items():
        assert block_tags(*block_of(risk / residual, residual)) == [tag], risk


def test_a_block_that_four_bits_would_hurt_keeps_eight():
    attention, residual = block_of()
    residual[3] = LOW_BIT_RESIDUAL * 1.01
    assert block_tags(attention, residual) == [Tag.K8V8]


@pytest.mark.parametrize("part", [0, 1])
def test_a_risk_that_is_no_number_is_the_highest(part):
    drawn = block_of()
    drawn[part][5] = np.nan
    assert block_tags(*drawn) == [Tag.EXACT]


@given(rows(), st.integers(0, 40))
def test_more_attention_never_lowers_a_precision(drawn, at):
    attention, residual = drawn
    more = attention.copy()
    more[at % len(more)] = 1.0
    order = [Tag.K8V4, Tag.K8V8, Tag.EXACT]
    for before, after in zip(block_tags(attention, residual), block_tags(more, residual), strict=True):
        assert order.index(after) >= order.index(before)


@given(st.lists(st.sampled_from(list(Tag)), min_size=1, max_size=12), st.integers(0, 500), st.integers(1, BLOCK))
def test_sources_are_the_runs_of_equal_tags(tags, start, last):
    stop = start + BLOCK * (len(tags) - 1) + last
    sources = list(tagged_sources(start, stop, tags))
    covered = [(row, source.tag) for source in sources for row in range(source.start, source.start + source.length)]
    assert covered == [(row, tags[(row - start) // BLOCK]) for row in range(start, stop)]
    assert all(a.tag != b.tag for a, b in pairwise(sources))


def test_a_run_ends_where_its_rows_end():
    assert list(tagged_sources(5, 5 + 40, [Tag.K8V4, Tag.K8V4])) == [Source(5, 40, Tag.K8V4)]


def test_settings_take_what_is_known():
    assert {*get_args(Precision)} == known_precisions()


def test_every_format_and_mixed_are_known():
    assert {"exact", "k8v8", "k8v4", "mixed", "int8", "kivi2"} <= known_precisions()
    assert "k4v4" not in known_precisions()


def test_the_thresholds_are_in_order():
    assert 0 < precision.LOW_RISK < precision.EXACT_RISK < 1
    assert 0 <= precision.ALPHA <= 1
