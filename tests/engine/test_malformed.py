"""What clients may send: malformed parameters, lying diffs, requests that cannot be recovered. Never a crash, always exact."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcache.engine.wire import KEY, ResumeParams
from tests.engine.harness import NEW, OLD, assert_exact, differs, first_version, lossy, text

pytestmark = pytest.mark.engine

scalars = st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
counts = st.integers(-2, 400) | st.sampled_from([1 << 30, (1 << 30) + 1, 1 << 62])
nearly = {
    "version": st.sampled_from(["v1", "x", "", "a" * 300]) | st.integers(0, 10**6).map("n{}".format) | values,
    "parent": st.just("v1") | values,
    "namespace": st.just("default") | values,
    "episode": values,
    "policy": st.sampled_from(["edit_local", "direct_reuse", "prefix_cache", "none"]) | values,
    "options": st.dictionaries(st.sampled_from(["k", "to", "z"]), scalars, max_size=2) | values,
    "aligned": st.lists(st.tuples(counts, counts, counts), max_size=4) | values,
    "boundaries": st.lists(
        st.tuples(st.sampled_from(["message", "document", "tool_result", "?"]), counts, counts), max_size=4
    ),
    "save": st.booleans() | values,
    "salt": st.text(max_size=3) | values,
}
payloads = st.fixed_dictionaries({}, optional=nearly | {"unknown": values}) | values


@given(st.lists(payloads, min_size=20, max_size=20))
@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_malformed_parameters_never_harm_a_request(engine, reference, batch):
    engine.empty()
    first_version(engine)
    prompts = [NEW[: 150 + 8 * i] for i in range(len(batch))]
    answers = [engine.add(ids, {KEY: payload}, n=3) for ids, payload in zip(prompts, batch, strict=True)]
    engine.run()
    engine.drain()
    engine.check()
    for answer in answers:
        assert answer.recovery is not None, "a request that names us gets a report"
        if answer.recovery.exact:
            assert_exact(reference, answer)
    assert_exact(reference, *[engine.ask(ids, n=3) for ids in prompts[::7]])
    assert engine.audit(NEW)[1] < 1e-3


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ({}, "version"),
        ({"version": ""}, "version"),
        ({"version": "v", "parent": 3}, "parent"),
        ({"version": "v", "k": 3}, "k"),
        ({"version": "v", "aligned": [[0, 0]]}, "aligned.0"),
        ({"version": "v", "aligned": [[0, 0, -1]]}, "aligned.0.2"),
        ("text", "value"),
        (None, "value"),
    ],
)
def test_the_report_says_which_parameter_is_malformed(engine, reference, payload, where):
    answer = engine.ask(OLD[:50], {KEY: payload}, n=2)
    assert answer.recovery.reason.startswith(f"malformed kv_transfer_params: {where}")
    assert_exact(reference, answer)


def test_parameters_of_others_are_not_ours(engine, reference):
    answer = engine.ask(OLD[:50], {"remote_engine_id": "x", "remote_block_ids": [1, 2]}, n=2)
    assert answer.recovery is None
    assert_exact(reference, answer)


# -- diffs that callers send -------------------------------------------------------------------------------------------

TRUE = [(0, 0, 100), (110, 120, 190)]


@pytest.mark.parametrize(
    "aligned",
    [
        [(0, 0, 130), (110, 140, 100)],  # other tokens
        [(110, 120, 191)],  # beyond the end of the prompt
        [(110, 120, 190), (0, 0, 100)],  # not ascending
        [(0, 0, 100), (50, 90, 20)],  # overlapping
        [(0, 0, 1 << 30)],
    ],
    ids=["lies", "too long", "descending", "overlapping", "huge"],
)
def test_a_diff_that_does_not_hold_is_replaced_by_our_own(engine, reference, aligned):
    first_version(engine)
    expected = engine.ask(NEW, lossy("v2")).recovery
    engine.forget_local()
    child = engine.ask(NEW, lossy("v3", aligned=aligned))
    assert child.recovery.prefix_tokens == expected.prefix_tokens == 100
    assert child.recovery.reused_tokens == expected.reused_tokens == 157
    assert_exact(reference, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3


@pytest.mark.parametrize(
    "aligned", [[], [(0, 0, 0)], [(1 << 30, 0, 5)]], ids=["no run", "empty run", "beyond the parent"]
)
def test_a_diff_that_aligns_nothing_means_a_full_prefill(engine, reference, aligned):
    first_version(engine)
    engine.forget_local()
    child = engine.ask(NEW, lossy("v2", aligned=aligned))
    assert child.recovery.reason == "nothing of the parent can be reused"
    assert_exact(reference, child)


def test_a_diff_may_count_the_last_sampled_token(engine):
    """The caller does not know that it has no KV."""
    parent = first_version(engine)
    ids = parent.ids + text(20, seed=3)
    child = engine.ask(ids, lossy("v2", aligned=[(0, 0, len(parent.ids))]))
    assert child.recovery.reason is None
    assert child.recovery.prefix_tokens == len(parent.ids) - 1


@pytest.mark.parametrize("seed", range(12))
def test_any_diff_that_holds_keeps_plain_requests_exact(engine, reference, seed):
    """Not maximal, in many pieces, without a prefix, or with one that is shorter than it could be."""
    rng = random.Random(seed)
    first_version(engine)
    pieces = []
    for old, new, length in TRUE:
        at = 0
        while at < length:
            size = min(rng.randint(1, 60), length - at)
            if rng.random() < 0.7:
                pieces.append((old + at, new + at, size))
            at += size
    child = engine.ask(NEW, lossy("v2", aligned=pieces, options={"k": rng.choice([0, 3, 40])}))
    assert child.recovery.reason in (None, "nothing of the parent can be reused")
    assert_exact(reference, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
    version = engine.version("v2")
    assert engine.stored_error(version, version.exact_end) < 1e-3
    turn = child.ids + text(9, seed=4)
    grandchild = engine.ask(turn, lossy("v3", "v2", "direct_reuse"))
    assert grandchild.recovery.reason is None
    assert_exact(reference, engine.ask(turn))


# -- requests that cannot be recovered ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [({"prompt_logprobs": 1}, "log-probabilities"), ({"skip_reading_prefix_cache": True}, "not to read any cache")],
    ids=["prompt_logprobs", "skip_reading_prefix_cache"],
)
def test_a_request_that_needs_every_row_is_served_by_vllm_alone(engine, reference, sampling, reason):
    first_version(engine)
    child = engine.ask(NEW, lossy("v2"), **sampling)
    assert reason in child.recovery.reason
    assert child.recovery.exact
    assert child.cached == 0
    assert engine.version("v2") is None
    assert_exact(reference, child)


def test_a_short_prompt_is_recovered_up_to_its_last_token(engine, reference):
    first_version(engine)
    for length in (1, 2, 31, 32, 33, 64):
        child = engine.ask(OLD[:length], lossy(f"s{length}", policy="direct_reuse"), n=4)
        assert child.recovery.exact
        assert child.recovery.restored_tokens + child.recovery.local_tokens == length - 1
        engine.forget_local()
        assert_exact(reference, child)


def test_an_identical_prompt_is_recovered_exactly(engine, reference):
    parent = first_version(engine)
    engine.forget_local()
    child = engine.ask(OLD, lossy("v2", policy="direct_reuse"))
    assert child.recovery.restored_tokens == 299
    assert child.recovery.exact
    assert child.tokens == parent.tokens
    assert not differs(reference, child)


def test_a_version_of_a_prompt_that_was_sent_as_resume_params_is_json(engine):
    """Any client can send plain JSON values."""
    answer = engine.ask(OLD[:64], {KEY: ResumeParams(version="v1", options={"k": 3}).model_dump(mode="json")}, n=2)
    assert answer.recovery.saved == "pending"
