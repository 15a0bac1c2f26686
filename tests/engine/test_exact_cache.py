"""vLLM's own prefix cache beside approximate versions: it gives plain requests exact blocks only."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.commits import salt_request
from agentcache.engine.wire import ResumeParams
from tests.engine.harness import BLOCK, NEW, OLD, assert_exact, differs, first_version, lossy, text

pytestmark = pytest.mark.engine


def test_a_plain_request_with_the_text_of_an_approximate_version_is_exact(engine, reference):
    first_version(engine)
    approximate = engine.ask(NEW, lossy("v2", policy="direct_reuse"))
    assert differs(reference, approximate)
    assert approximate.recovery.reused_tokens == 189
    plain = engine.ask(NEW)
    assert_exact(reference, plain)
    assert plain.cached == 96, "it finds the whole blocks of P and no other"
    assert engine.audit(NEW)[1] < 1e-3


def test_rows_computed_right_behind_the_prefix_are_shared_and_exact(engine, reference):
    """Contiguity buys exactness: X and the run right after it read exact rows only."""
    first_version(engine)
    approximate = engine.ask(NEW, lossy("v2", options={"k": 40}))
    assert engine.version("v2").exact_end == 160
    plain = engine.ask(NEW)
    assert plain.cached == 160
    assert_exact(reference, plain)
    assert differs(reference, approximate)


def test_a_plan_whose_exact_rows_end_inside_a_block_shares_that_block_with_nobody(engine, reference):
    first_version(engine)
    engine.ask(NEW, lossy("v2", options={"k": 13}))  # exact to 133: block 4 is half approximate
    plain = engine.ask(NEW)
    assert plain.cached == 128
    assert_exact(reference, plain)


def test_a_partial_approximate_tail_that_decode_fills_is_not_public(engine, reference):
    first_version(engine)
    approximate = engine.ask(NEW, lossy("v2", policy="direct_reuse"), n=60)  # 310 rows, then blocks 9 and 10 fill up
    plain = engine.ask(approximate.ids)
    assert plain.cached == 96
    assert_exact(reference, plain)
    child = engine.ask(approximate.ids + text(9, seed=3), lossy("v3", "v2", "direct_reuse"))
    assert child.recovery.local_tokens == 352, "the lineage finds its own, decoded blocks too"
    assert child.recovery.restored_tokens == 369 - 352


def _filled_tail(engine):
    """Returns a plain request with the text of a version whose only approximate rows, 290 to 305, lay in its partial tail."""
    first_version(engine)
    approximate = engine.ask(NEW[:-3], lossy("v2", options={"k": 170}), n=60)
    assert approximate.recovery.reused_tokens == 16
    assert engine.version("v2").exact_end == 290
    return engine.ask(approximate.ids)


def test_a_tail_that_is_approximate_alone_and_filled_by_decode_is_not_public(engine, reference):
    plain = _filled_tail(engine)
    assert plain.cached == 288
    assert_exact(reference, plain)


def test_salting_the_hashes_that_exist_would_miss_that_tail(engine, reference, monkeypatch):
    """The test above can fail: no approximate block is full when the request is hashed first."""

    def salted_once(request, salts):
        hasher = request._block_hasher
        salt_request(request, salts)
        request._block_hasher = hasher

    monkeypatch.setattr("agentcache.engine.resumes.salt_request", salted_once)
    plain = _filled_tail(engine)
    assert plain.cached > 288
    assert differs(reference, plain)


def _prefix_in_flight(engine, first):
    """Runs a resume in one step with a plain request that is computing the resume's prefix; returns both, plain first."""
    first_version(engine)
    engine.forget_local()
    other = NEW[:100] + text(20, seed=4)
    adds = [lambda: engine.add(other), lambda: engine.add(NEW, lossy("v2", options={"k": 40}))]
    requests = [add() for add in (adds if first == "plain" else adds[::-1])]
    engine.run()
    engine.drain()
    return requests if first == "plain" else requests[::-1]


@pytest.mark.parametrize("first", ["plain", "child"])
@pytest.mark.parametrize("batched", [1024, 128])
def test_a_prefix_that_another_request_computes_in_the_same_step(start_engine, tiny, reference, first, batched):
    """vLLM publishes blocks when it schedules them; our rows behind them are computed before they are."""
    engine = start_engine(tiny("llama"), max_num_batched_tokens=batched)
    other, _ = _prefix_in_flight(engine, first)
    assert engine.audit(NEW)[1] < 1e-3
    plain = engine.ask(NEW)
    assert_exact(reference, plain, other)
    version = engine.version("v2")
    assert engine.stored_error(version, version.exact_end) < 1e-3
    engine.check()


def test_overlooking_blocks_in_flight_would_do_harm(engine, reference, monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(type(engine.scheduler.connector), "_written_blocks", lambda *_: frozenset())
    _prefix_in_flight(engine, "plain")
    assert engine.audit(NEW)[1] > 0.1
    assert differs(reference, engine.ask(NEW))


def test_moved_text_is_exact_for_plain_requests(engine, reference):
    first_version(engine)
    moved = OLD[:64] + OLD[150:230] + OLD[64:150] + OLD[230:] + text(5, seed=7)
    approximate = engine.ask(moved, lossy("v2", options={"k": 16}))
    assert approximate.recovery.reused_tokens > 100
    plain = engine.ask(moved)
    assert_exact(reference, plain)
    assert differs(reference, approximate)


def test_an_append_only_child_of_an_exact_version_is_exact_and_public(engine, reference):
    parent = first_version(engine)
    engine.forget_local()
    child = engine.ask(parent.ids + text(50, seed=5), lossy("v2", policy="direct_reuse"))
    assert child.recovery.exact
    assert child.recovery.restored_tokens == len(parent.ids) - 1, "the last sampled token has no KV"
    assert_exact(reference, child)
    plain = engine.ask(child.ids)
    assert plain.cached == (len(child.ids) - 1) // BLOCK * BLOCK
    assert_exact(reference, plain)


def test_an_append_only_child_of_an_approximate_version_stays_in_its_lineage(engine, reference):
    first_version(engine)
    parent = engine.ask(NEW, lossy("v2", policy="direct_reuse"))
    turn = text(50, seed=6)
    warm = engine.ask(parent.ids + turn, lossy("v3", "v2", "direct_reuse"))
    engine.forget_local()
    cold = engine.ask(parent.ids + turn, lossy("v4", "v2", "direct_reuse"))
    assert warm.recovery.local_tokens == 288
    assert cold.recovery.local_tokens == 0
    assert warm.tokens == cold.tokens, "the rows are the same, from vLLM's blocks or from the checkpoint"
    assert not warm.recovery.exact
    assert not cold.recovery.exact
    assert differs(reference, warm)
    exact = engine.ask(parent.ids + turn, ResumeParams(version="v5", parent="v2"))
    plain = engine.ask(parent.ids + turn)
    assert exact.recovery.exact
    assert_exact(reference, exact, plain)


def test_two_policies_on_one_version_do_not_see_each_other(engine, reference):
    first_version(engine)
    alone = engine.ask(NEW, lossy("a", policy="direct_reuse")).tokens
    engine.forget_local()
    edited = engine.ask(NEW, lossy("b", options={"k": 64}))
    reused = engine.ask(NEW, lossy("c", policy="direct_reuse"))
    exact = engine.ask(NEW, ResumeParams(version="d", parent="v1"))
    assert edited.tokens != reused.tokens
    assert reused.tokens == alone
    assert reused.recovery.local_tokens == 96
    assert_exact(reference, exact)
