"""PatchKV against its formulas, token by token."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.recovery import LengthModel, PatchKV, PolicyContext, get_policy, plan
from agentcache.recovery.length_model import length_features
from agentcache.types import AlignedRun, PromptDiff, Run
from tests.recovery.contexts import UNTIMED, contexts, covered, edited, selected, suffix, unasked

coefficients = st.tuples(*[st.floats(-2, 2)] * 7)
lengths = st.integers(0, 20_000)


def slow_length(beta: tuple[float, ...], prefix: int, middle: int, behind: int) -> float:
    """Formulas 8."""
    p, m, s = math.log1p(prefix), math.log1p(middle), math.log1p(behind)
    log_length = sum(b * f for b, f in zip(beta, (1.0, p, m, s, p * m, p * s, m * s), strict=True))
    return round(math.expm1(min(max(log_length, 0.0), math.log1p(behind))), 6)


def slow_dirty(policy: PatchKV, context: PolicyContext) -> set[int]:
    """Formulas 4 and 9, the union over edits."""
    diff, dirty = context.diff, set[int]()
    for at, run in enumerate(diff.suffix):
        before = diff.suffix[at - 1].new_stop if at else diff.prefix
        middle = run.new_start - before
        behind = sum(later.length for later in diff.suffix[at:])
        if policy.length_model is None:
            length = float(policy.window or 0)
        else:
            length = slow_length(LengthModel.from_text(policy.length_model).coefficients, before, middle, behind)
        dirty |= {i for i in suffix(context) if 0 <= i - (before + middle) < min(behind, length)}
    return dirty


def slow_patchkv(policy: PatchKV, context: PolicyContext) -> set[int]:
    """Formulas 9, 11 and 12."""
    assert context.attention is not None
    scores, block = context.attention.tolist(), policy.block
    dirty = slow_dirty(policy, context)
    clean = sorted(unasked(context, policy.query) - dirty)
    if policy.count == "tokens":
        take = math.ceil(Fraction(str(policy.kappa)) * len(clean))
        high = set(sorted(clean, key=lambda i: (-scores[i], i))[:take])
    else:
        taken = {i // block for i in dirty}
        best: dict[int, float] = {}
        for i in clean:
            if i // block not in taken:
                best[i // block] = max(best.get(i // block, 0.0), scores[i])
        take = math.ceil(Fraction(str(policy.kappa)) * len(best))
        ranked = sorted(best, key=lambda b: (-best[b], b))[:take]
        high = {i for i in clean if i // block in ranked}
    touched = {i // block for i in dirty | high}
    return {i for i in suffix(context) if i // block in touched}


policies = st.builds(
    PatchKV,
    window=st.integers(0, 60),
    kappa=st.sampled_from([0.0, 0.015, 0.07, 0.3, 1.0]),
    count=st.sampled_from(["blocks", "tokens"]),
    block=st.sampled_from([1, 8, 32]),
    query=st.sampled_from([0, 5, 32]),
)
modelled = st.builds(
    lambda beta, kappa: PatchKV(length_model=LengthModel(beta).to_text(), kappa=kappa, block=8, query=4),
    coefficients,
    st.sampled_from([0.0, 0.1]),
)


@UNTIMED
@given(policy=st.one_of(policies, modelled), context=contexts())
def test_the_repair_set_is_that_of_the_formulas(policy: PatchKV, context: PolicyContext) -> None:
    assert selected(policy, context) == slow_patchkv(policy, context)


@UNTIMED
@given(context=contexts(), window=st.integers(0, 40), block=st.sampled_from([1, 8, 32]))
def test_with_kappa_0_only_the_dirty_window_is_recomputed_and_no_attention_is_needed(
    context: PolicyContext, window: int, block: int
) -> None:
    policy = PatchKV(window=window, kappa=0, block=block)
    unmeasured = PolicyContext(context.diff, context.token_ids)
    touched = {i // block for i in slow_dirty(policy, context)}
    assert selected(policy, unmeasured) == {i for i in suffix(context) if i // block in touched}


@UNTIMED
@given(beta=coefficients, prefix=lengths, middle=lengths, behind=lengths)
def test_the_length_model_is_that_of_the_formula(
    beta: tuple[float, ...], prefix: int, middle: int, behind: int
) -> None:
    length = min(behind, slow_length(beta, prefix, middle, behind))
    assert int(LengthModel(beta).windows(prefix, middle, behind)) == sum(d < length for d in range(behind))


def test_a_length_model_that_learnt_a_length_gives_it_back() -> None:
    only_middle = LengthModel((0, 0, 1, 0, 0, 0, 0))  # log1p q = log1p|M_new|
    assert only_middle.windows([10, 10, 10], [0, 7, 400], [500, 500, 300]).tolist() == [0, 7, 300]


def test_a_length_model_of_huge_coefficients_takes_the_whole_suffix() -> None:
    assert int(LengthModel((1e308,) * 7).windows(1000, 1000, 1000)) == 1000


def test_features_are_a_row_a_training_pair_in_the_order_of_their_names() -> None:
    rows = length_features([0, 9], [0, 19], [0, 99])
    p, m, s = np.log([10, 20, 100])
    assert rows.shape == (2, 7)
    assert rows[0].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert np.allclose(rows[1], [1, p, m, s, p * m, p * s, m * s])


@UNTIMED
@given(beta=coefficients)
def test_a_length_model_survives_its_text(beta: tuple[float, ...]) -> None:
    assert LengthModel.from_text(LengthModel(beta).to_text()) == LengthModel(beta)


def test_the_text_of_fitted_coefficients_holds_plain_numbers() -> None:
    assert LengthModel(tuple(np.linspace(0, 3, 7))).to_text() == "0.0,0.5,1.0,1.5,2.0,2.5,3.0"


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4,5,6,x", "1,2,3,4,5,6,nan"])
def test_a_length_model_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not allowed; take 7"):
        PatchKV(length_model=text)


def test_a_dirty_window_comes_from_one_place() -> None:
    for options in ({}, {"window": 3, "length_model": "0,0,1,0,0,0,0"}):
        with pytest.raises(ConfigError, match=r"profile or from window=TOKENS, exactly one of them"):
            PatchKV(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window=-1 is not allowed; take 0 or more"),
        ({"window": 1, "kappa": 1.5}, "kappa=1.5 is not allowed; take a share from 0 to 1"),
        ({"window": 1, "kappa": math.nan}, "kappa=nan is not allowed"),
        ({"window": 1, "block": 0}, "block=0 is not allowed; take 1 or more"),
        ({"window": 1, "query": -2}, "query=-2 is not allowed"),
        ({"window": 1, "count": "rows"}, "count='rows' is not allowed: .*'blocks' or 'tokens'"),
    ],
)
def test_values_that_are_not_allowed_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_policy("patchkv", options)


def test_without_measured_attention_it_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"'patchkv' reads the attention .*'attention': True"):
        PatchKV(window=8).select(edited())


def test_without_an_edit_nothing_is_asked_and_nothing_selected() -> None:
    whole = PolicyContext(PromptDiff(0, 50), range(50))
    assert list(PatchKV(window=8).select(whole)) == []


def test_a_share_counts_in_decimals() -> None:
    # 0.07 * 100 is 7.000000000000001 in binary
    attention = np.linspace(0, 1, 3520, dtype=np.float32)
    context = edited(old_len=3510, at=288, removed=0, new=10, attention=attention)
    blocks = list(PatchKV(window=0, kappa=0.07, query=0).select(context))
    rows = len(suffix(context))
    assert (rows, -(-(rows + 298 % 32) // 32)) == (3222, 101)
    assert len(blocks) == math.ceil(Fraction(7, 100) * 101)
    assert len(list(PatchKV(window=22, kappa=0.07, query=0).select(context))) == 1 + 7


def test_a_scattered_token_claims_its_block_only_when_tokens_are_counted() -> None:
    attention = np.zeros(1010, dtype=np.float32)
    peaks = [420, 520, 620, 720, 820]
    attention[peaks] = [0.5, 0.9, 0.7, 1.0, 0.6]
    context = edited(attention=attention)
    tokens = selected(PatchKV(window=0, kappa=5 / 658, count="tokens"), context)
    assert tokens == covered(Run(at // 32 * 32, at // 32 * 32 + 32) for at in peaks)
    blocks = list(PatchKV(window=0, kappa=0.1, count="blocks").select(context))
    assert blocks == [Run(704, 736), Run(512, 544), Run(608, 640)], "3 of 22 blocks, the most attended first"


def test_the_rows_that_asked_are_no_candidates() -> None:
    attention = np.zeros(1010, dtype=np.float32)
    attention[-32:] = 1
    attention[500] = 0.1
    context = edited(attention=attention)
    assert selected(PatchKV(window=0, kappa=0.01), context) == covered([Run(480, 512)])
    assert selected(PatchKV(window=0, kappa=0.01, query=0), context) == covered([Run(960, 992)])


def test_a_plan_of_patchkv_recomputes_window_and_peak_and_restores_the_rest() -> None:
    attention = np.zeros(1010, dtype=np.float32)
    attention[700] = 1
    made = plan(PatchKV(window=64, kappa=0.01), edited(attention=attention), parent_exact_end=1000, limit=1009)
    assert made.recompute == (Run(300, 384), Run(672, 704))
    assert (made.first_approximate, made.repair_tokens) == (384, 96)


@pytest.mark.parametrize(("count", "planned"), [("tokens", 40 + 35), ("blocks", 40 + 62)])
def test_what_it_sets_out_to_recompute_is_not_rounded_to_blocks(
    count: Literal["tokens", "blocks"], planned: int
) -> None:
    diff = PromptDiff(500, 510, (AlignedRun(0, 0, 100), AlignedRun(110, 120, 390)))
    attention = np.linspace(0, 1, 510, dtype=np.float32)
    shown = PolicyContext(diff, np.arange(510, dtype=np.int32), attention=attention)
    policy = PatchKV(window=40, kappa=0.1, count=count, query=0)
    made = plan(policy, shown, parent_exact_end=500, limit=509)
    # D ends with block 4. Of the 350 rows and 11 blocks behind it, the last ones are attended to most: all of blocks 14 and 15.
    assert made.planned_tokens == planned
    assert made.repair_tokens + (510 - made.load_end) == 40 + 62
