"""From a request and its parent's checkpoint to a plan, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.engine.planning import _measured, plan_request, refusal
from agentcache.engine.wire import ResumeParams
from agentcache.episodes.diff import diff_tokens
from agentcache.store.compose import compose
from agentcache.store.extents import Extent
from agentcache.store.scores import decode_scores, encode_scores
from agentcache.store.version import Version
from agentcache.types import Run, complement

OLD = list(range(100, 400))
NEW = [*OLD[:100], *range(1000, 1020), *OLD[110:]]


def parent(ids=OLD, *, stored=None, exact_end=None):
    """Returns a committed version whose rows `stored` are there."""
    extents = tuple(Extent(1, a, b - a, a) for a, b in (stored or [(0, len(ids))]))
    end = len(ids) if exact_end is None else exact_end
    return Version("v1", "default", "v1", None, np.asarray(ids, dtype=np.int32), end, (), extents, state="committed")


def plan(ids=NEW, version=None, exact_end=None, **params):
    version = version or parent()
    given = ResumeParams(version="v2", parent="v1", **params)
    made = plan_request(ids, compose(version), given, version.exact_end if exact_end is None else exact_end)
    return made.plan, made.prefix, made.reason


def request(**fields):
    """Returns what `refusal` reads of a vLLM request."""
    usual = {
        "prompt_token_ids": [1, 2],
        "prompt_embeds": None,
        "lora_request": None,
        "mm_features": [],
        "pooling_params": None,
        "resumable": False,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "skip_reading_prefix_cache": False,
        "cache_salt": None,
    }
    return SimpleNamespace(**usual | fields)


def test_an_ordinary_request_is_not_refused():
    assert refusal(request()) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_token_ids": None}, "prompt embeddings"),
        ({"prompt_embeds": object()}, "prompt embeddings"),
        ({"lora_request": object()}, "LoRA"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming"),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=0)}, "log-probabilities"),
        ({"skip_reading_prefix_cache": True}, "not to read any cache"),
        ({"cache_salt": "tenant"}, "cache_salt"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_request_that_cannot_be_recovered_is_refused_with_the_reason(fields, reason):
    assert reason in refusal(request(**fields))


def test_the_exact_policy_restores_the_prefix_alone():
    made, prefix, reason = plan()
    assert reason is None
    assert prefix == 100
    assert made.exact
    assert made.restore == ((0, 0, 100),)
    assert (made.load_end, made.recompute) == (100, ())


def test_a_lossy_policy_recomputes_the_middle_and_its_window():
    made, prefix, reason = plan(policy="edit_local")
    assert (prefix, reason) == (100, None)
    assert not made.exact
    assert made.recompute == (Run(100, 152),)
    assert made.restore == ((0, 0, 100), (142, 152, 157)), "all but the last token, which vLLM computes"
    assert made.first_approximate == 152


@pytest.mark.parametrize("exact_end", [0, 40, 100, 300])
def test_rows_beyond_the_exact_ones_are_approximate(exact_end):
    made, _, _ = plan(exact_end=exact_end)
    assert made is None or made.load_end == min(exact_end, 100)
    lossy, _, _ = plan(policy="direct_reuse", exact_end=exact_end)
    assert lossy.first_approximate == (120 if exact_end >= 100 else exact_end)


def test_lost_rows_are_recomputed():
    made, _, _ = plan(version=parent(stored=[(0, 60), (200, 300)]), policy="direct_reuse")
    assert made.restore == ((0, 0, 60), (200, 210, 99))
    assert made.recompute == (Run(60, 210),)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"policy": "nope"}, "unknown policy 'nope'"),
        ({"policy": "edit_local", "options": {"k": -1}}, "k=-1"),
        ({"policy": "edit_local", "options": {"window": 3}}, "no option 'window'"),
        ({"policy": "edit_local", "options": {"k": 2.5}}, "k=2.5"),
    ],
)
def test_no_plan_without_a_policy(params, reason):
    made, _, said = plan(**params)
    assert made is None
    assert reason in said


def test_no_plan_when_nothing_is_shared():
    made, prefix, reason = plan(ids=list(range(5000, 5300)), policy="direct_reuse")
    assert made is None
    assert prefix == 0
    assert reason == "nothing of the parent can be reused"


def test_a_sent_diff_that_holds_is_used_as_it_is():
    made, prefix, _ = plan(policy="direct_reuse", aligned=[(0, 0, 50), (150, 160, 100)])
    assert prefix == 50
    assert made.restore == ((0, 0, 50), (150, 160, 100))


@pytest.mark.parametrize(
    "aligned",
    [[(0, 0, 130)], [(0, 1, 50)], [(110, 130, 190)], [(110, 120, 5), (0, 0, 5)], [(0, 0, 60), (40, 59, 9)]],
    ids=["other tokens", "shifted", "too long", "descending", "overlapping"],
)
def test_a_sent_diff_that_does_not_hold_is_replaced(aligned):
    made, prefix, _ = plan(policy="direct_reuse", aligned=aligned)
    assert prefix == 100
    assert made.reused_tokens == 189


def test_a_sent_diff_may_reach_the_token_that_has_no_row():
    ids = [*OLD, 7, *range(2000, 2010)]
    made, prefix, _ = plan(ids=ids, aligned=[(0, 0, 301)])
    assert prefix == 300
    assert made.load_end == 300


counts = st.integers(0, 320) | st.just(1 << 30)


@given(
    aligned=st.lists(st.tuples(counts, counts, counts), max_size=5),
    policy=st.sampled_from(["prefix_cache", "edit_local", "direct_reuse"]),
    cut=st.integers(1, 310),
    exact_end=st.integers(0, 300),
    hole=st.tuples(st.integers(0, 299), st.integers(1, 60)),
)
@settings(max_examples=300, deadline=None)
def test_every_plan_restores_equal_tokens_that_are_stored(aligned, policy, cut, exact_end, hole):
    stored = list(complement([(hole[0], hole[0] + hole[1])], 300))
    version = parent(stored=stored, exact_end=exact_end)
    ids = NEW[:cut]
    made, prefix, reason = plan(ids, version, exact_end, policy=policy, aligned=aligned)
    if made is None:
        assert reason
        return
    assert reason is None
    assert made.load_end < len(ids)
    assert ids[:prefix] == OLD[:prefix]
    rows = set()
    for run in made.restore:
        assert ids[run.new_start : run.new_stop] == OLD[run.old_start : run.old_stop]
        assert all(a <= run.old_start and run.old_stop <= b for a, b in stored if a <= run.old_start < b)
        rows |= set(range(run.new_start, run.new_stop))
    assert rows | {i for a, b in made.recompute for i in range(a, b)} == set(range(made.load_end))
    if made.exact:
        assert all(run.shift == 0 and run.new_stop <= min(prefix, exact_end) for run in made.restore)
    assert made.exact or policy != "prefix_cache"


def test_a_policy_sees_what_is_known_of_the_parents_rows_at_their_new_places():
    version = parent(stored=[(0, 200)])
    version.extents = (Extent(1, 0, 150, 0, 2), Extent(1, 150, 50, 150))
    diff = diff_tokens(version.token_ids, np.asarray(NEW, dtype=np.int32))
    assert _measured(compose(version), version, diff)[0] is None
    version.attention = encode_scores(np.linspace(0.1, 1, len(OLD)))
    attention, generations = _measured(compose(version), version, diff)
    scores = decode_scores(version.attention)
    assert attention is not None
    assert attention[:100].tolist() == scores[:100].tolist()
    assert not attention[100:120].any(), "new tokens were attended to by nobody"
    assert attention[120:].tolist() == scores[110:].tolist()
    assert set(generations[:100]) == {2}
    assert not generations[100:120].any()
    assert generations[120:].tolist() == [2] * 40 + [0] * 150
