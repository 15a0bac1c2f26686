"""Versions on the engine: who may resume from whom, and what a save costs."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from tests.engine.harness import NEW, OLD, assert_exact, first_version, lossy, text

pytestmark = pytest.mark.engine


def test_a_child_whose_parent_is_still_being_saved_waits(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), extra={"save_tokens_per_step": 32})
    decoding = engine.add(text(40, seed=8), n=80)
    parent = engine.add(OLD, ResumeParams(version="v1"), n=4)
    engine.run(parent)
    assert engine.version("v1").state == "saving"
    engine.step()
    assert engine.version("v1").state == "saving", "one step saves one object of up to 256 rows"
    child = engine.add(NEW, lossy("v2"))
    engine.step()
    assert engine.status(child) == "WAITING"
    assert engine.version("v1").state == "committed", "a save that a request waits for comes before its share"
    engine.run()
    engine.drain()
    assert child.recovery.reason is None
    assert child.recovery.reused_tokens == 157
    assert_exact(reference, decoding, parent)
    engine.check()


def test_a_child_whose_parent_still_generates_is_served_exactly(engine, reference):
    parent = engine.add(OLD, ResumeParams(version="v1"), n=30)
    for _ in range(5):
        engine.step()
    assert not parent.done
    child = engine.add(NEW, lossy("v2"))
    engine.run()
    engine.drain()
    assert "still generating" in child.recovery.reason
    assert child.recovery.exact
    assert child.recovery.policy == "prefix_cache"
    assert_exact(reference, parent, child)
    assert engine.version("v2").exact_end == len(child.ids) - 1


def test_a_version_is_created_once(engine, reference):
    first = engine.add(OLD, ResumeParams(version="v1"), n=30)
    engine.step()
    second = engine.add(NEW, ResumeParams(version="v1"), n=2)
    engine.run(second)
    third = engine.add(NEW, ResumeParams(version="v1"), n=2)
    child = engine.add(NEW, lossy("v2"), n=2)
    engine.run(third, child)
    assert not first.done
    engine.run()
    engine.drain()
    fourth = engine.ask(NEW, ResumeParams(version="v1"))
    for refused in (second, third, fourth):
        assert "exists already" in refused.recovery.reason
        assert refused.recovery.saved == "no"
    assert "still generating" in child.recovery.reason
    assert engine.version("v1").token_ids.tolist() == first.ids[:-1]
    assert_exact(reference, first, second, third, fourth, child)


def test_a_version_whose_request_was_aborted_may_be_asked_again(engine, reference):
    first = engine.add(OLD, ResumeParams(version="v1"))
    engine.abort(first)
    engine.drain()
    assert engine.version("v1") is None
    assert_exact(reference, first_version(engine))


def test_a_version_that_is_not_saved_leaves_no_trace(engine):
    answer = engine.ask(OLD, ResumeParams(version="v1", save=False))
    assert answer.recovery.saved == "no"
    assert engine.version("v1") is None
    assert len(engine.worker.store) == 0
    first_version(engine)


def test_namespaces_do_not_see_each_other(engine, reference):
    first_version(engine, namespace="a")
    stranger = engine.ask(NEW, lossy("v2", namespace="b"))
    assert "unknown or was evicted" in stranger.recovery.reason
    assert stranger.recovery.exact
    own = engine.ask(NEW, lossy("v3", namespace="a", policy="direct_reuse"))
    assert own.recovery.reused_tokens == 189
    # The same names and the same plan in another namespace: no approximate block is shared.
    first_version(engine, namespace="b")
    twin = engine.ask(NEW, lossy("v3", namespace="b", policy="direct_reuse"))
    assert twin.recovery.reused_tokens == 189
    assert twin.recovery.local_tokens == 288 - 192, "nothing beyond P"
    assert_exact(reference, stranger)


def test_a_second_version_stores_only_what_it_computed(engine):
    first_version(engine)
    before = engine.worker.store.size_bytes
    child = engine.ask(NEW, lossy("v2"))
    row_bytes = engine.worker.runtime.row_bytes
    assert engine.worker.store.size_bytes - before == (20 + 32 + 1 + 7) * row_bytes, "X, R, the last token, the reply"
    assert child.recovery.restored_bytes == child.recovery.restored_tokens * row_bytes
    append = engine.ask(child.ids + text(40, seed=9), lossy("v3", "v2"))
    assert engine.worker.store.size_bytes - before == (60 + 1 + 40 + 7) * row_bytes
    assert append.recovery.reason is None


def test_the_report_counts_every_prompt_token_once(engine):
    first_version(engine)
    for version, local in (("v2", True), ("v3", False)):
        if not local:
            engine.forget_local()
        report = engine.ask(NEW, lossy(version)).recovery
        assert (report.prefix_tokens, report.fresh_tokens, report.repair_tokens) == (100, 20, 32)
        assert (report.reused_tokens, report.new_tokens) == (157, 1)
        assert report.prompt_tokens == len(NEW) == 310
        assert report.local_tokens == (96 if local else 0)
        assert report.restored_tokens + report.recomputed_tokens + report.local_tokens == 309
        assert report.lost_tokens == 0
        assert report.policy == report.requested_policy == "edit_local"


def test_a_grandchild_recovers_from_rows_of_all_its_ancestors(engine, reference):
    first_version(engine)
    child = engine.ask(NEW, lossy("v2"))
    engine.forget_local()
    ids = child.ids[:220] + text(11, seed=10) + child.ids[226:] + text(8, seed=11)
    grandchild = engine.ask(ids, lossy("v3", "v2"))
    assert grandchild.recovery.reason is None
    assert len({e.object_id for e in engine.version("v3").extents}) > 3
    engine.half.index.drop_version(engine.version("v1"))
    engine.half.index.drop_version(engine.version("v2"))
    engine.ask(text(5, seed=12))
    engine.forget_local()
    again = engine.ask(grandchild.ids + text(6, seed=13), lossy("v4", "v3", "direct_reuse"))
    assert again.recovery.restored_tokens == len(grandchild.ids) - 1, "objects outlive the versions that made them"
    assert_exact(reference, engine.ask(ids))


# -- other engine settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [64, 128])
def test_other_block_sizes(start_engine, tiny, reference, block_size):
    engine = start_engine(tiny("llama"), block_size=block_size)
    first_version(engine)
    engine.forget_local()
    child = engine.ask(NEW, lossy("v2"), n=40)
    assert child.recovery.restored_tokens == 100 + 157
    plain = engine.ask(child.ids)
    assert plain.cached == 152 // block_size * block_size
    assert_exact(reference, plain)
    assert engine.audit(child.ids)[1] < 1e-3
    engine.check()


def test_without_prefix_caching_resumes_work_and_plain_requests_are_exact(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), enable_prefix_caching=False)
    first_version(engine)
    child = engine.ask(NEW, lossy("v2"))
    assert child.recovery.restored_tokens == 257
    assert child.recovery.local_tokens == 0
    append = engine.ask(child.ids + text(30, seed=14), lossy("v3", "v2", "direct_reuse"))
    assert append.recovery.restored_tokens == len(child.ids) - 1
    exact = engine.ask(NEW, ResumeParams(version="v4", parent="v1"))
    assert exact.recovery.restored_tokens == 100
    assert_exact(reference, exact, engine.ask(NEW))
    engine.check()
