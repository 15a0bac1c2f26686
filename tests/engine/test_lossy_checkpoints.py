"""Checkpoints that are stored with less precision: what is restored from them is approximate, also in the prefix."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from agentcache.engine.wire import ResumeParams
from tests.engine.harness import NEW, OLD, assert_exact, first_version, lossy, text

pytestmark = pytest.mark.engine

K8V8 = {"precision": "k8v8"}


@pytest.fixture(params=["k8v8", "mixed"])
def engine(request, start_engine, tiny):
    # No block of a random model's short prompt is as unimportant as most of a real one's.
    thresholds = {"tau_low": 0.045, "tau_high": 0.05}
    engine = start_engine(tiny("llama"), extra={"precision": request.param} | thresholds)
    yield engine
    engine.drain()
    engine.check()


def test_a_prefix_from_a_lossy_checkpoint_is_approximate_and_not_public(engine, reference):
    first_version(engine)
    assert engine.half.index.trusted_end(engine.version("v1")) == 0
    engine.forget_local()
    turn = OLD + text(20, seed=3)
    child = engine.ask(turn, lossy("v2", policy="direct_reuse"))
    assert child.recovery.restored_tokens == 300
    assert not child.recovery.exact
    assert engine.version("v2").exact_end == 0
    plain = engine.ask(turn)
    assert plain.cached == 0
    assert_exact(reference, plain)
    assert engine.audit(turn)[1] < 1e-3


def test_the_exact_policy_restores_nothing_from_a_lossy_checkpoint(engine, reference):
    first_version(engine)
    engine.forget_local()
    child = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert child.recovery.restored_tokens == 0
    assert child.recovery.exact
    assert_exact(reference, child, engine.ask(NEW))


def test_the_first_object_of_a_mixed_checkpoint_is_trusted_where_all_its_blocks_are_exact(
    start_engine, tiny, reference
):
    engine = start_engine(tiny("llama"), extra={"precision": "mixed", "tau_low": 0.02, "tau_high": 0.03})
    first_version(engine)
    assert engine.half.index.trusted_end(engine.version("v1")) == 256
    engine.forget_local()
    child = engine.ask(NEW, ResumeParams(version="v2", parent="v1"))
    assert child.recovery.restored_tokens == 100
    assert child.recovery.exact
    assert_exact(reference, child)
    assert engine.audit(NEW)[1] < 1e-3
    engine.check()


def test_a_child_that_waits_for_its_parents_lossy_save_does_not_trust_it(start_engine, tiny, reference):
    engine = start_engine(tiny("llama"), extra=K8V8 | {"save_tokens_per_step": 32})
    other = engine.add(text(40, seed=8), n=40)
    parent = engine.add(OLD, ResumeParams(version="v1"), n=4)
    engine.run(parent)
    assert engine.version("v1").state == "saving"
    exact = engine.add(NEW, ResumeParams(version="v2", parent="v1"))
    child = engine.add(OLD + text(20, seed=9), lossy("v3", policy="direct_reuse"))
    # Meanwhile vLLM forgets the prefix: the checkpoint is all there is.
    engine.scheduler.kv_cache_manager.evict_blocks(set(range(1, 128)))
    engine.run()
    engine.drain()
    assert_exact(reference, other, parent, exact)
    for ids in (NEW, child.prompt):
        assert_exact(reference, engine.ask(ids))
        assert engine.audit(ids)[1] < 1e-3
    engine.check()


def test_local_blocks_that_were_evicted_after_the_plan_are_computed_not_restored(engine, reference):
    first_version(engine)  # its blocks are still in vLLM's cache: the plan counts on exact rows
    child = engine.add(NEW, lossy("v2", options={"k": 40}))
    engine.scheduler.kv_cache_manager.evict_blocks(set(range(1, 128)))
    engine.run()
    engine.drain()
    assert child.recovery.local_tokens == 0
    assert_exact(reference, engine.ask(NEW))
    assert engine.audit(NEW)[1] < 1e-3
