"""Structural, random, EPIC, attention blocks and edit-to-carrier against slow implementations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.recovery import (
    AttentionBlocks,
    EditLocal,
    EditLocalBoundary,
    EditToCarrier,
    Epic,
    PolicyContext,
    Random,
    RecoveryPolicy,
    Structural,
    get_policy,
    plan,
)
from agentcache.recovery.rows import distances, mask_runs, share_of
from agentcache.types import Boundary, BoundaryKind, Run, merge_runs
from tests.recovery.contexts import UNTIMED, contexts, covered, edited, selected, suffix, unasked

counts = st.integers(0, 80)
blocks = st.sampled_from([1, 8, 16])


def slow_distance(context: PolicyContext, row: int) -> int:
    """PatchKV, formulas 4, from the nearest edit before the row."""
    return min((row - run.new_start for run in context.diff.suffix if run.new_start <= row), default=0)


@UNTIMED
@given(context=contexts())
def test_distances_count_from_the_end_of_the_edit(context: PolicyContext) -> None:
    assert distances(context.diff).tolist() == [slow_distance(context, row) for row in range(context.diff.new_len)]


@UNTIMED
@given(rows=st.lists(st.booleans(), max_size=30))
def test_runs_of_a_mask_cover_it_merged(rows: list[bool]) -> None:
    runs = mask_runs(np.array(rows, dtype=np.bool_))
    assert runs == list(merge_runs(runs))
    assert covered(runs) == {at for at, row in enumerate(rows) if row}


def test_a_share_is_rounded_up_but_not_for_its_binary_form() -> None:
    assert [share_of(0.07, 100), share_of(0.015, 200), share_of(0.015, 201), share_of(0, 9)] == [7, 3, 4, 0]


# structural


@UNTIMED
@given(context=contexts(), k=counts, edge=st.integers(0, 3), ids=st.lists(st.integers(0, 40), max_size=4, min_size=1))
def test_structural_takes_the_delimiters_nearest_to_their_edits(
    context: PolicyContext, k: int, edge: int, ids: list[int]
) -> None:
    found = {at for at, token in enumerate(context.token_ids) if token in ids}
    for unit in context.boundaries:
        inside = range(unit.start, unit.stop)
        found |= {*inside[:edge], *inside[len(inside) - min(edge, len(inside)) :]}
    nearest = sorted(found & suffix(context), key=lambda row: (slow_distance(context, row), row))
    policy = Structural(k=k, edge=edge, ids=", ".join(map(str, ids)))
    assert [run.start for run in policy.select(context)] == nearest[:k]


def test_structural_reads_ids_with_commas_or_spaces_and_refuses_others() -> None:
    context = edited()
    for ids in ("400,500", " 400  500 ", "400, 500,"):
        assert selected(Structural(ids=ids), context) == {400, 500}
    with pytest.raises(ConfigError, match="ids='a b' is not allowed; take token ids with commas"):
        Structural(ids="a b")


def test_structural_finds_the_markers_of_messages_by_their_boundaries() -> None:
    units = (Boundary(BoundaryKind.MESSAGE, 0, 400), Boundary(BoundaryKind.DOCUMENT, 310, 350))
    assert selected(Structural(edge=2), edited(boundaries=units)) == {348, 349, 398, 399}


def test_structural_without_anything_that_delimits_says_so() -> None:
    with pytest.raises(ConfigError, match="knows no delimiters"):
        Structural().select(edited())


# random


@UNTIMED
@given(context=contexts(), k=counts, block=blocks, seed=st.integers(0, 5))
def test_random_takes_whole_blocks_until_the_budget_is_spent(
    context: PolicyContext, k: int, block: int, seed: int
) -> None:
    rows, chosen = suffix(context), selected(Random(k=k, block=block, seed=seed), context)
    touched = {row // block for row in chosen}
    assert chosen == {row for row in rows if row // block in touched}
    assert len(chosen) <= k
    assert chosen == rows or len(chosen) > k - block


def test_random_follows_from_seed_and_prompt_and_nothing_else() -> None:
    array, ids = edited(), edited(attention=np.ones(1010, dtype=np.float32))
    as_list = PolicyContext(ids.diff, list(range(1010)))
    assert selected(Random(seed=3), array) == selected(Random(seed=3), as_list)
    other_prompt = PolicyContext(ids.diff, [*range(1009), 7])
    choices = {frozenset(selected(Random(seed=seed), given)) for seed in (0, 1) for given in (array, other_prompt)}
    assert len(choices) == 4


def test_random_reaches_every_row_about_equally_often() -> None:
    context = edited(old_len=400)  # 11 or 12 blocks of 8, the first and the last cut
    hits = np.zeros(410)
    for seed in range(600):
        hits[list(selected(Random(k=8, seed=seed), context))] += 1
    rates = hits[sorted(suffix(context))] / 600
    assert rates.min() > 0.04
    assert rates.max() < 0.16


# epic and the boundary alias


@UNTIMED
@given(context=contexts(), k=counts)
def test_epic_takes_the_first_k_tokens_of_each_reused_run(context: PolicyContext, k: int) -> None:
    expected = {row for run in context.diff.suffix for row in [*range(run.new_start, run.new_stop)][:k]}
    assert selected(Epic(k=k), context) == expected == selected(EditLocal(k=k), context)


@UNTIMED
@given(context=contexts())
def test_edit_local_boundary_is_edit_local_to_the_boundary(context: PolicyContext) -> None:
    assert list(EditLocalBoundary().select(context)) == list(EditLocal(to="boundary").select(context))


# attention in blocks


def slow_ranking(context: PolicyContext, candidates: set[int], block: int) -> list[int]:
    """Blocks by their mean score over candidates."""
    assert context.attention is not None
    means = {}
    for at in {row // block for row in candidates}:
        scores = [float(context.attention[row]) for row in candidates if row // block == at]
        means[at] = sum(scores) / len(scores)
    return sorted(means, key=lambda at: (-means[at], at))


@UNTIMED
@given(context=contexts(), k=counts, block=blocks, window=st.integers(0, 20), query=st.sampled_from([0, 5, 32]))
def test_attention_blocks_takes_windows_and_the_most_attended_blocks_within_the_budget(
    context: PolicyContext, k: int, block: int, window: int, query: int
) -> None:
    rows = suffix(context)
    expected = {row for run in context.diff.suffix for row in range(run.new_start, run.new_stop)[:window]}
    left = k
    for at in slow_ranking(context, unasked(context, query) - expected, block):
        adds = {row for row in rows if row // block == at} - {
            row for run in context.diff.suffix for row in range(run.new_start, run.new_stop)[:window]
        }
        if len(adds) > left:
            break
        left -= len(adds)
        expected |= adds
    assert selected(AttentionBlocks(k=k, block=block, window=window, query=query), context) == expected


def test_attention_blocks_finds_what_edit_local_misses() -> None:
    attention = np.zeros(1010, dtype=np.float32)
    attention[600:624] = 0.3
    attention[800] = 1.0  # alone: a mean of 0.125
    context = edited(attention=attention)
    assert selected(AttentionBlocks(k=24), context) == covered([Run(320, 336), Run(600, 624)])


# one run to the carrier


@UNTIMED
@given(
    context=contexts(),
    k=counts,
    number=st.integers(0, 5),
    block=blocks,
    window=st.integers(0, 20),
    query=st.sampled_from([0, 5, 32]),
)
def test_edit_to_carrier_runs_to_the_last_carrier_that_the_budget_reaches(
    context: PolicyContext, k: int, number: int, block: int, window: int, query: int
) -> None:
    rows = suffix(context)
    carriers = slow_ranking(context, unasked(context, query), block)[:number]
    within = [at for at in carriers if sum(row < (at + 1) * block for row in rows) <= k]
    expected = {row for row in rows if within and row < (max(within) + 1) * block}
    expected |= {row for row in rows if row // block in carriers}
    expected |= {row for run in context.diff.suffix for row in range(run.new_start, run.new_stop)[:window]}
    assert selected(EditToCarrier(k=k, blocks=number, block=block, window=window, query=query), context) == expected


def carried(*peaks: int) -> PolicyContext:
    attention = np.zeros(1010, dtype=np.float32)
    for at in peaks:
        attention[at : at + 8] = 1 - at / 2000
    return edited(attention=attention)


def test_the_run_to_the_carrier_is_exact() -> None:
    made = plan(EditToCarrier(blocks=2), carried(400, 560), parent_exact_end=1000, limit=1009)
    assert made.recompute == (Run(300, 568),)
    assert made.first_approximate == 568


def test_a_carrier_beyond_the_budget_is_recomputed_on_its_own() -> None:
    policy = EditToCarrier(k=100, blocks=2)
    made = plan(policy, carried(400, 560), parent_exact_end=1000, limit=1009)
    assert made.recompute == (Run(300, 408), Run(560, 568))
    assert made.first_approximate == 408


def test_without_a_carrier_in_reach_the_window_remains() -> None:
    made = plan(EditToCarrier(k=100, blocks=1), carried(560), parent_exact_end=1000, limit=1009)
    assert made.recompute == (Run(300, 336), Run(560, 568))


@pytest.mark.parametrize("name", ["random", "attention_blocks", "edit_to_carrier", "patchkv"])
def test_numbers_beyond_all_measure_mean_the_whole_suffix_and_cost_no_memory(name: str) -> None:
    own = {"patchkv": {"window": 1, "kappa": 1}}.get(name, {"k": 10**30})
    policy = get_policy(name, {"block": 10**15, **own})
    context = edited(attention=np.ones(1010, dtype=np.float32))
    made = plan(policy, context, parent_exact_end=1000, limit=1009)
    assert (made.load_end, made.repair_tokens) == (300, 0), "nothing is left to restore after the edit"


# refusals that several share


@pytest.mark.parametrize("policy", [AttentionBlocks(), EditToCarrier()])
def test_a_policy_of_stored_attention_says_when_there_is_none(policy: RecoveryPolicy) -> None:
    with pytest.raises(ConfigError, match=rf"'{policy.name}' reads the attention .*'attention': True"):
        policy.select(edited())


@pytest.mark.parametrize("name", ["structural", "random", "epic", "attention_blocks", "edit_to_carrier"])
def test_a_negative_budget_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: k=-1 is not allowed; take 0 or more"):
        get_policy(name, {"k": -1})


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("structural", "edge"),
        ("random", "block"),
        ("attention_blocks", "block"),
        ("attention_blocks", "window"),
        ("attention_blocks", "query"),
        ("edit_to_carrier", "blocks"),
        ("edit_to_carrier", "block"),
        ("edit_to_carrier", "window"),
        ("edit_to_carrier", "query"),
    ],
)
def test_a_negative_count_is_refused_by_name(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {option}=-3 is not allowed"):
        get_policy(name, {option: -3})
