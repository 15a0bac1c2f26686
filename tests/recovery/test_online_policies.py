"""What online policies choose from given signals, against direct computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.recovery import (
    Attended,
    CacheBlend,
    CarrierWindow,
    CausalOracle,
    Frontier,
    LengthModel,
    MeanShift,
    PolicyContext,
    ProphetKV,
    Signal,
    Signals,
    get_policy,
)
from agentcache.recovery.bounds import Bounds, bounded
from agentcache.recovery.query import query_rows
from agentcache.recovery.spec import parse_policy
from agentcache.types import AlignedRun, Boundary, BoundaryKind, PromptDiff, merge_runs

PREFIX, FRESH = 40, 7


def context(suffix: int, *, tail: int = 0, boundaries: tuple[Boundary, ...] = ()) -> PolicyContext:
    """Returns an edit of 40 rows before it, 7 new ones, `suffix` aligned ones, and a new turn of `tail`."""
    old = PREFIX + 5 + suffix
    new = PREFIX + FRESH + suffix + tail
    aligned = (AlignedRun(0, 0, PREFIX), AlignedRun(PREFIX + 5, PREFIX + FRESH, suffix))
    return PolicyContext(PromptDiff(old, new, aligned), np.arange(new, dtype=np.int32), boundaries)


def signals(shown: PolicyContext, done: range = range(0), **measured: np.ndarray) -> Signals:
    mask = np.zeros(shown.diff.new_len, dtype=np.bool_)
    mask[done.start : done.stop] = True
    return Signals(done=mask, **measured)


def chosen(runs: object) -> set[int]:
    return {row for run in merge_runs(runs) for row in range(*run)}  # type: ignore[arg-type]


scores = st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed).random(400, dtype=np.float32))


@given(scores, st.integers(1, 350), st.sampled_from([0, 16, 64]), st.sampled_from([1, 8, 16]))
@settings(max_examples=60, deadline=None)
def test_attended_takes_the_blocks_of_the_largest_mean(values: np.ndarray, suffix: int, k: int, block: int) -> None:
    shown = context(suffix)
    first, end = PREFIX + FRESH, shown.diff.new_len
    done = range(first, min(first + 16, end))
    got = chosen(Attended(k=k, block=block).choose(shown, signals(shown, done, query=values[:end]))) - set(done)
    rows = [row for row in range(first, end) if row not in done]
    blocks: dict[int, list[int]] = {}
    for row in rows:
        blocks.setdefault(row // block, []).append(row)
    ranked = sorted(blocks.values(), key=lambda part: -float(np.mean(values[part].astype(np.float64))))
    want: set[int] = set()
    for part in ranked:
        if len(want) + len(part) > k:
            break
        want |= set(part)
    assert {row for row in got if first <= row < end} - set(done) == want


@given(scores, st.integers(1, 350), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_token_policies_take_the_share_of_the_largest_scores(values: np.ndarray, suffix: int, share: float) -> None:
    shown = context(suffix)
    first, end = PREFIX + FRESH, shown.diff.new_len
    count = math.ceil(round(share * suffix, 9))
    want = set(sorted(range(first, end), key=lambda row: -values[row])[:count])
    values = values[:end]
    assert chosen(ProphetKV(share=share).choose(shown, signals(shown, query=values))) == want
    assert chosen(CacheBlend(share=share).choose(shown, signals(shown, key_error=values))) == want
    by_values = CacheBlend(share=share, rank="values")
    assert chosen(by_values.choose(shown, signals(shown, key_error=1 - values, value_error=values))) == want


@given(scores, scores, st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_mean_shift_probes_the_union_of_both_top_sets(keys: np.ndarray, values: np.ndarray, share: float) -> None:
    shown = context(200)
    first, end = PREFIX + FRESH, shown.diff.new_len
    b = math.ceil(round(share * 200, 9))
    want = {row for d in (keys, values) for row in sorted(range(first, end), key=lambda row, d=d: -d[row])[:b]}
    measured = signals(shown, key_deviation=keys[:end], value_deviation=values[:end])
    policy = MeanShift(share=share)
    assert chosen(policy.choose(shown, measured)) == want
    assert len(want) <= policy.most(shown)


@pytest.mark.parametrize("wrapped", [False, True])
def test_mean_shift_weighs_by_relative_or_absolute_deviations(wrapped: bool) -> None:
    shown = context(3)
    end = shown.diff.new_len
    deviation, error = np.full(end, 0.25, np.float32), np.full(end, 0.36, np.float32)
    deviation[-1] = error[-1] = 4.0
    measured = signals(
        shown, key_deviation=deviation, value_deviation=deviation / 2, key_error=error, value_error=error / 4
    )
    for weight, keys, values in (("relative", 0.25, 0.125), ("absolute", 0.6, 0.3)):
        policy = MeanShift(weight=weight)
        found = (bounded(policy, Bounds(max_tokens=9)) if wrapped else policy).shift_weights(measured)
        for row, want in zip(found, (keys, values), strict=True):
            assert row[:-1] == pytest.approx(want) and row[-1] == 1


@given(scores, st.integers(1, 6), st.sampled_from([8, 16]), st.integers(1, 3), st.floats(0.1, 0.9))
@settings(max_examples=80, deadline=None)
def test_a_frontier_ends_where_its_last_blocks_agree(
    agreed: np.ndarray, steps: int, block: int, calm: int, threshold: float
) -> None:
    shown = context(300)
    first = PREFIX + FRESH
    policy = Frontier(first=block, block=block, calm=calm, threshold=threshold, most_tokens=2**steps * block)
    ((start, end),) = policy.select(shown)
    assert (start, end) == (first, first + block)
    while True:
        agreement = np.full(shown.diff.new_len, np.nan, dtype=np.float32)
        agreement[first:end] = agreed[first:end]
        runs = list(policy.choose(shown, signals(shown, range(first, end), agreement=agreement)))
        tail = agreed[max(end - calm * block, first) : end]
        parts = [tail[len(tail) - at - block : len(tail) - at] for at in range(0, len(tail), block)]
        calm_now = all(float(part.mean()) >= threshold for part in parts)
        stop = min(first + policy.most_tokens, shown.diff.new_len)
        if calm_now or end == stop:
            assert runs == []
            break
        assert runs == [(end, min(end + (end - first), stop))]
        end = runs[0][1]


@pytest.mark.parametrize(("window", "step"), [(200, 50), (41, 16), (5000, 75)])
def test_a_length_model_gives_a_quarter_of_its_window_as_a_frontiers_first_step(window: int, step: int) -> None:
    constant = LengthModel((math.log1p(window), 0, 0, 0, 0, 0, 0)).to_text()
    ((start, end),) = Frontier(length_model=constant, first=999).select(context(300))
    assert (start, end) == (
        PREFIX + FRESH,
        PREFIX + FRESH + step,
    )  # a window ends with the suffix, and a step has a block


def test_the_query_is_the_last_message_unless_that_is_long() -> None:
    for start, end, want in ((300, 400, 300), (390, 400, 368), (100, 400, 368)):
        shown = context(end - PREFIX - FRESH, boundaries=(Boundary(BoundaryKind.MESSAGE, start, end),))
        assert query_rows(shown) == (want, end)
    assert query_rows(context(10)) == (25, 57)
    assert query_rows(PolicyContext(PromptDiff(3, 3), [1, 2, 3])) == (0, 3)


def test_policies_that_ask_never_reuse_the_query() -> None:
    shown = context(200)
    for policy in (Attended(), ProphetKV(), CausalOracle()):
        assert (shown.diff.new_len - 32, shown.diff.new_len) in list(policy.select(shown))


@pytest.mark.parametrize("name", ["attended", "prophetkv", "cacheblend", "frontier", "mean_shift", "causal_oracle"])
def test_a_policy_without_its_signals_says_so(name: str) -> None:
    shown = context(50)
    with pytest.raises(ConfigError, match="was not given"):
        get_policy(name).choose(shown, signals(shown))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("attended", {"k": -1}, "take a number|or more"),
        ("attended", {"check": 0}, "1 or more"),
        ("cacheblend", {"share": 1.2}, "from 0 to 1"),
        ("cacheblend", {"check": 0}, "1 or more"),
        ("prophetkv", {"k": -3}, "0 or more"),
        ("frontier", {"first": 0}, "1 or more"),
        ("frontier", {"threshold": 1.5}, "between -1 and 1"),
        ("mean_shift", {"selector": "mean_shift"}, "is itself"),
        ("mean_shift", {"selector": "frontier"}, "does not choose rows once"),
        ("mean_shift", {"selector": "prefix_cache"}, "does not choose rows once"),
        ("mean_shift", {"selector": "nobody"}, "unknown policy"),
        ("mean_shift", {"weight": "heavy"}, "weight='heavy' is not known; take relative or absolute"),
        ("carrier_window", {"start": 5, "stop": 4}, "5 or more"),
        ("causal_oracle", {"block": 0}, "1 or more"),
    ],
)
def test_options_that_are_not_allowed(name: str, options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        get_policy(name, options)


def test_what_each_policy_measures() -> None:
    assert Attended().signals == {Signal.QUERY}
    assert Attended(by="deviation").signals == {Signal.CHECK}
    assert Attended(by="product", check=3).signals == {Signal.QUERY, Signal.CHECK}
    assert Attended(by="product", check=3).check_layer == 3
    assert MeanShift(selector="attended").signals == {Signal.QUERY, Signal.CHECK}
    assert MeanShift(selector="attended").probe_share == 1.0
    assert CarrierWindow(start=3, stop=9).select(context(5)) == [(3, 9), (47, 47)]


def test_a_policy_as_one_word() -> None:
    assert parse_policy("attended") == ("attended", {})
    assert parse_policy("cacheblend:share=0.15:rank=values:check=2") == (
        "cacheblend",
        {"share": 0.15, "rank": "values", "check": 2},
    )
    with pytest.raises(ConfigError, match="name:option=value"):
        parse_policy("edit_local:64")
